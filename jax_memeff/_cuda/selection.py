"""The kernels of a call: one for each architecture that its program may run on."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jax_memeff import config
from jax_memeff._call.operands import NeedsGrad, Operands
from jax_memeff._call.options import Options
from jax_memeff._call.sequences import MOST_POSITIONS
from jax_memeff._call.values import require_static
from jax_memeff._cuda import bits, buffers, few_rows, key_lists, paged_calls
from jax_memeff._cuda.problem import KernelCall, problem_of, sizes_of
from jax_memeff.codegen import arch as architectures
from jax_memeff.codegen import gpu
from jax_memeff.codegen.select import choose, select
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.toolchain import compile as compiler
from jax_memeff.errors import UnsupportedError


def kernels(
    avals: Operands,
    options: Options,
    needs_grad: NeedsGrad | None,
    archs: Sequence[str] = (),
    is_tangent: bool = False,
) -> dict[str, KernelSpec]:
    """The kernel for each architecture, by default for those that the program may run on."""
    if avals.mask.key_lists and not is_tangent:
        _, avals, options, needs_grad, _ = without_lists(avals, options, needs_grad, archs)
        avals = buffers.separate(avals)
    _require_static(avals)
    _require_lengths(avals)
    call = KernelCall(avals, options, needs_grad, is_tangent)
    return {arch: on_architecture(call, arch) for arch in archs or _architectures()}


class WithoutLists(NamedTuple):
    """A call without lists of keys that computes one with lists."""

    convert: Callable[[Any], tuple[Any, Options]]
    """From the operands with lists to those without, and the options."""
    operands: Any
    """Their types."""
    options: Options
    needs_grad: NeedsGrad | None
    """The gradients that kernels compute."""
    in_pages: bool
    """Whether keys are gathered (``key_lists.py``). If not, lists are bits (``bits.py``)."""


def without_lists(
    types: Any, options: Options, needs_grad: NeedsGrad | None, archs: Sequence[str] = ()
) -> WithoutLists:
    """The faster way, among those that kernels have, to compute a call with lists of keys.

    Raises:
        UnsupportedError: a backward is faster in plain JAX.
    """
    separate = buffers.separate(types)
    _require_static(separate)
    needs, is_backward = key_lists.needed_positions(types, options), needs_grad is not None
    if bits.is_faster(separate, options, is_backward) or (needs and not is_backward):
        return _in_bits(types, options, needs_grad)
    if needs:
        raise UnsupportedError([f"kernels that gather keys have no {'; '.join(needs)}"])
    return _in_pages(types, options, needs_grad, archs)


def _in_bits(types: Any, options: Options, needs_grad: NeedsGrad | None) -> WithoutLists:
    convert = functools.partial(bits.in_bits, options=options)
    operands, own = jax.eval_shape(convert, types)
    return WithoutLists(convert, operands, own, needs_grad, in_pages=False)


def _in_pages(
    types: Any, options: Options, needs_grad: NeedsGrad | None, archs: Sequence[str]
) -> WithoutLists:
    own = key_lists.gradients_in_pages(needs_grad)

    def converted(copies_values: bool) -> WithoutLists:
        convert = functools.partial(
            key_lists.in_pages,
            options=options,
            copies_values=copies_values,
            is_backward=needs_grad is not None,
        )
        operands, own_options = jax.eval_shape(convert, types)
        return WithoutLists(convert, operands, own_options, own, in_pages=True)

    found = converted(copies_values=False)
    if options.latent_dim is not None and needs_grad is None:
        try:
            kernels(found.operands, found.options, None, archs)
        except UnsupportedError:
            # As in calls without lists, which copy the values.
            found = converted(copies_values=True)
    return found


def kernels_of_primitive(
    avals: Sequence[Any],
    *,
    tree: Any,
    options: Options,
    needs_grad: NeedsGrad | None = None,
    archs: Sequence[str] = (),
) -> list[dict[str, KernelSpec]]:
    """The kernels of a primitive with these types and parameters, by architecture.

    A mixed batch of prompts and decode steps has two kernels for each architecture. A backward of
    lists of keys may have none; it is then in plain JAX. Without ``archs`` the architectures are
    those that the program would be compiled for.

    Raises:
        UnsupportedError: as the lowering would.
    """
    operands = jax.tree.unflatten(tree, avals)
    types = operands if needs_grad is None else operands[0]
    is_optional = needs_grad is not None and bool(types.mask.key_lists)
    try:
        if types.mask.key_lists:
            _, types, options, needs_grad, _ = without_lists(types, options, needs_grad, archs)
        elif needs_grad is None and (split := few_rows.split_of(types, options)):
            types = jax.eval_shape(split.convert, types)
        parts = paged_calls.parts_of(buffers.separate(types))
        return [kernels(part.types, options, needs_grad, archs) for part in parts]
    except UnsupportedError:
        if is_optional:
            return []
        raise


def digest(
    avals: Sequence[Any], *, tree: Any, options: Options, needs_grad: NeedsGrad | None = None
) -> bytes:
    """A digest that changes with the kernels of a call: with their specs, sources and compiler.

    Raises:
        UnsupportedError, CompileError: as the lowering would.
    """
    return digest_of(kernels_of_primitive(avals, tree=tree, options=options, needs_grad=needs_grad))


def digest_of(specs: Sequence[Mapping[str, KernelSpec]]) -> bytes:
    """A digest that changes with these kernels, their sources or the compiler."""
    keys = [compiler.key(spec, arch) for own in specs for arch, spec in own.items()]
    return hashlib.sha256(repr((specs, keys)).encode()).digest()


def on_architecture(call: KernelCall, arch: str) -> KernelSpec:
    """The kernel of a call on one architecture."""
    problem = problem_of(call, arch)
    sizes = sizes_of(call.operands, call.options.divisors)
    return select(problem, choose(problem, sizes, gpu.multiprocessors(arch)))


def _require_static(avals: Any) -> None:
    shapes = {name: getattr(avals, name) for name in ("query", "key", "value")}
    require_static(
        {name: x.shape for name, x in shapes.items() if x is not None}
        | {"scores": avals.scores_shape},
        where="programs for CUDA need static sizes",
        remedy="export a program for each size, or pass implementation='xla'",
    )


def _require_lengths(avals: Operands) -> None:
    longest = max(avals.query.shape[1], avals.key.shape[1], *avals.scores_shape[2:])
    if longest > MOST_POSITIONS:
        raise UnsupportedError(
            [
                f"kernels support at most {MOST_POSITIONS} positions in a sequence, got {longest}",
                "pass implementation='xla', or split the sequence",
            ]
        )


def _architectures() -> tuple[str, ...]:
    """``JAX_MEMEFF_ARCHS``, else the architectures of this process's CUDA devices."""
    if chosen := config.archs():
        return chosen
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        raise UnsupportedError(
            [
                "this process has no CUDA device, which would determine what to compile for",
                "set JAX_MEMEFF_ARCHS, for example to sm_90a",
            ]
        ) from None
    capabilities = {tuple(map(int, device.compute_capability.split("."))) for device in devices}
    return tuple(architectures.of_capability(*capability) for capability in sorted(capabilities))
