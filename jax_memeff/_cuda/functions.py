"""The user's functions in a custom call: programs for the kernels, literals and arrays.

Windows whose bounds are data are a part of the mask function of a kernel. A bound is a captured
array without dims of the user's own, so a kernel reads one number per batch index. A bottom-right
window reads lengths in the same way, or has T and S as literals.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_memeff._blockwise import backward, packed
from jax_memeff._call.mask import Mask
from jax_memeff._call.operands import NeedsGrad, Operands, QkvPackedOperands
from jax_memeff._call.options import Options
from jax_memeff.codegen.features.functions import AskedFunctions
from jax_memeff.codegen.functions.program import CapturedType, Program, Value

_WIDENED = {"int8": "int32", "int16": "int32", "uint16": "uint32"}
"""Dtypes of captured arrays unknown to the host library, and what XLA converts them to."""


def programs(operands: Any, options: Options) -> AskedFunctions:
    """The programs of a call in the form that kernels use, with the values of literals.

    ``operands`` are separate, and may be types.
    """
    mask = operands.mask
    mask_program, bounds = _with_traced_windows(
        mask.functions[0] if mask.functions else None,
        mask,
        operands.scores_shape,
        operands.sequences is not None,
    )
    given = options.score_function, mask_program
    score, mask_program = (None if x is None else in_kernel_types(x) for x in given)
    return AskedFunctions(score, mask_program, bounds)


def asked(
    operands: Operands, options: Options, needs_grad: NeedsGrad | None
) -> AskedFunctions | None:
    """The structures that a kernel is compiled for; None without functions."""
    call_programs = programs(operands, options)
    if not call_programs.programs:
        return None
    score, mask = (
        None if x is None else x.structure for x in (call_programs.score, call_programs.mask)
    )
    gradients = gradients_in_kernels(operands, options, needs_grad)
    fixed_point = bool(gradients) and options.deterministic_backward
    return AskedFunctions(score, mask, call_programs.bounds, gradients, fixed_point)


def gradients_in_kernels(
    operands: Operands, options: Options, needs_grad: NeedsGrad | None
) -> tuple[int, ...]:
    """The captured arrays whose gradients the kernels sum; XLA computes the others.

    A call that needs no other gradients runs no kernel.
    """
    program = options.score_function
    if needs_grad is None or program is None or not needs_grad._replace(captured=()).names:
        return ()
    return tuple(index for index, needed in enumerate(needs_grad.captured) if needed)


def in_kernel_types(program: Program) -> Program:
    arrays = (
        CapturedType(_WIDENED.get(array.dtype, array.dtype), array.ndim) for array in program.arrays
    )
    return program._replace(arrays=tuple(arrays))


def unread_indices(operands: Any, options: Options) -> set[str]:
    """The names of the buffers of indices on which no function depends. Kernels may load them, but
    use nothing of them.
    """
    all_programs = programs(operands, options).programs.values()
    read = {name for each in all_programs for name in each.dependence(each.results[0])}
    return {f"function_{name}_index" for name in ("batch", "head") if name not in read}


def literals(operands: Any, options: Options) -> np.ndarray:
    """The bits of all literals, int32; at least one word, because the array must not be empty."""
    words = [word for x in programs(operands, options).programs.values() for word in _words(x)]
    return np.array(words or [0], np.uint32).view(np.int32)


def _words(program: Program) -> Iterator[int]:
    dtypes = {
        value.param("index"): value.dtype for value in program.values if value.op == "literal"
    }
    for index, number in enumerate(program.literals):
        if dtypes[index] == "float32":
            yield int(np.float32(number).view(np.uint32))
        else:
            yield int(number) % 2**32


def captured_gradients(
    *leaves: jax.Array, tree: Any, options: Options, needs_grad: NeedsGrad
) -> list[jax.Array]:
    """The gradients of captured arrays as XLA computes them, from ``attention_bwd``'s arguments."""
    operands, *results = jax.tree.unflatten(tree, leaves)
    if isinstance(operands, QkvPackedOperands):
        operands = operands.separate()
    path = backward.backward if operands.sequences is None else packed.backward
    out, lse, dout, dlse = results
    gradients = path(operands, options, out, lse, dout, dlse, needs_grad)
    return [x for x in gradients.captured if x is not None]


def in_kernel_type(array: jax.Array) -> jax.Array:
    """A captured array in a dtype that kernels read."""
    name = array.dtype.name
    return array.astype(_WIDENED[name]) if name in _WIDENED else jnp.asarray(array)


def is_converted(array: Any) -> bool:
    """Whether :func:`in_kernel_type` changes an array of this type."""
    return array.dtype.name in _WIDENED


_SIDES = ("left", "right")


def window_buffers(mask: Mask) -> dict[str, str]:
    """The buffers of the bounds, by the paths of the bounds in the operands."""
    return {
        f"mask.traced_windows.{index}.{side}": f"window{index}_{side}"
        for index, window in enumerate(mask.traced_windows)
        for side in _SIDES
        if getattr(window, side) is not None
    }


class _Builder:
    """Deduplicates the values of a program; its arrays and literals follow those of ``base``."""

    def __init__(self, base: Program):
        self.values = dict(zip(base.values, range(len(base.values)), strict=True))
        self.arrays = list(base.arrays)
        self.literals = list(base.literals)
        self.literal_count = base.literal_count
        self.names: list[str] = []

    def add(self, op: str, dtype: Any, *args: int, **params: Any) -> int:
        value = Value(op, dtype, args, tuple(sorted(params.items())))
        return self.values.setdefault(value, len(self.values))

    def read(self, name: str) -> int:
        """The value that reads the batch index's entry of an array [B]."""
        if name not in self.names:
            self.names.append(name)
            self.arrays.append(CapturedType("int32", 0))
        place = len(self.arrays) - len(self.names) + self.names.index(name)
        return self.add("read", "int32", array=place, mode="clip")

    def literal(self, number: int) -> int:
        self.literals.append(number)
        self.literal_count += 1
        return self.add("literal", "int32", index=self.literal_count - 1)


_ALWAYS = Program((Value("constant", "bool", (), (("value", True),)),), (0,), ())


def _with_traced_windows(
    base: Program | None, mask: Mask, scores_shape: tuple[int, int, int, int], is_packed: bool
) -> tuple[Program | None, tuple[str, ...]]:
    """The conjunction of ``base`` and the traced windows of a mask, and the buffers of the arrays
    that it adds to those of ``base``.

    Args:
        base: the mask's function, with the values of its literals; None means true.
        mask: that of the call.
        scores_shape: (B, N, T, S).
        is_packed: whether sequences are packed; they have lengths.
    """
    if not mask.traced_windows:
        return base, ()
    base = _ALWAYS if base is None else base
    builder = _Builder(base)
    key, query = (builder.add(name, "int32") for name in ("key", "query"))
    result = base.results[0]
    for index, window in enumerate(mask.traced_windows):
        distance = builder.add("sub", "int32", key, query)
        if window.alignment == "bottom_right":
            lengths = (
                builder.read(name)
                if is_packed or getattr(mask, name) is not None
                else builder.literal(size)
                for name, size in (
                    ("key_lengths", scores_shape[3]),
                    ("query_lengths", scores_shape[2]),
                )
            )
            distance = builder.add("sub", "int32", distance, builder.add("sub", "int32", *lengths))
        if window.left is not None:
            least = builder.add("neg", "int32", builder.read(f"window{index}_left"))
            result = builder.add("and", "bool", result, builder.add("ge", "bool", distance, least))
        if window.right is not None:
            most = builder.read(f"window{index}_right")
            result = builder.add("and", "bool", result, builder.add("le", "bool", distance, most))
    program = Program(
        tuple(builder.values), (result,), tuple(builder.arrays), tuple(builder.literals)
    )
    return program, tuple(builder.names)
