"""The kernels that well-known models need, for ``python -m jax_memeff build --models``.

A model needs the kernels of calls with its shapes: JAX traces the calls, and the lowering chooses
kernels for them as it does in a program. Batch sizes and lengths are not part of a kernel; several
are traced, because small calls divide their work differently.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jax_memeff import (
    Mask,
    dot_product_attention,
    paged_attention,
    varlen_attention,
)
from jax_memeff._compat import ClosedJaxpr, Jaxpr, JaxprEqn
from jax_memeff._cuda import lowering, selection
from jax_memeff.codegen.spec import KernelSpec

Job = tuple[KernelSpec, str]
Call = tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]


class Model(NamedTuple):
    """The attention of a family of models, in bfloat16.

    ``windows`` has the number of keys to the left that each kind of layer attends to, None for all
    of them; ``traced`` is whether layers of different windows also run in one ``scan``. ``latent``
    is multi-head latent attention: ``value_dim`` in training, latent vectors in decoding.
    ``arguments`` are further arguments of every call.
    """

    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...] = (None,)
    traced: bool = False
    sinks: bool = False
    latent: bool = False
    arguments: Mapping[str, Any] = {}


MODELS = {
    "llama": Model(32, 8, 128),
    "gemma": Model(16, 8, 256, windows=(None, 1023), traced=True),
    "gemma-2": Model(16, 8, 256, windows=(None, 4095), arguments={"logits_soft_cap": 50.0}),
    "gpt-oss": Model(64, 8, 64, windows=(None, 127), traced=True, sinks=True),
    "deepseek": Model(128, 128, 192, latent=True),
}
"""Llama, Qwen and Mistral share kernels (``"llama"``); Gemma 3 has no soft cap, Gemma 2 has one."""

_TRAINING = ((1, 512), (1, 2048), (4, 4096), (64, 128))
"""Batch sizes and lengths: few tiles, enough of them, many, and many of short sequences."""

_DECODING = ((1, 1), (16, 1), (1, 64), (2, 512))
"""Batch sizes, and new tokens of each sequence: steps, and chunks of prompts."""

_CACHED = 8192
_PAGE_SIZE = 64
_LATENT_DIM, _ROTARY_DIM, _VALUE_DIM = 512, 64, 128


def kernels(names: Sequence[str], archs: Sequence[str]) -> list[Job]:
    """The kernels of models, each once, for each architecture.

    Raises ``ValueError`` if a name is not in ``MODELS``, and ``UnsupportedError`` if a call has no
    kernel on an architecture.
    """
    for name in names:
        if name not in MODELS:
            raise ValueError(f"expected models among {', '.join(MODELS)}, got {name!r}")
    found: dict[Job, None] = {}
    for call, types in itertools.chain.from_iterable(_calls(MODELS[name]) for name in names):
        found |= dict.fromkeys(of_program(call, types, archs))
    return list(found)


def of_program(
    program: Callable[..., Any], arguments: Sequence[Any], archs: Sequence[str] = ()
) -> Iterator[Job]:
    """The kernels of the forwards, backwards and tangents in a program, which is traced.

    Tangents without a kernel are computed in plain JAX. Without ``archs`` the architectures are
    those that the program would be compiled for.

    Raises:
        UnsupportedError: a call has no kernel.
    """
    for equation in _equations(jax.make_jaxpr(program)(*arguments).jaxpr):
        avals = [variable.aval for variable in equation.invars]
        if equation.primitive.name == "attention_tangent":
            found = [lowering.kernels(avals, **equation.params, archs=archs) or {}]
        else:
            found = selection.kernels_of_primitive(avals, **equation.params, archs=archs)
        for specs in found:
            yield from ((spec, arch) for arch, spec in specs.items())


def _calls(model: Model) -> Iterator[Call]:
    value_dim = _VALUE_DIM if model.latent else model.head_dim
    for window in (*model.windows, *(["traced"] if model.traced else [])):
        for batch, length in _TRAINING:
            yield _training(model, window, batch, length, value_dim)
        yield _packed_training(model, window, 8192, value_dim)
        for batch, new in _DECODING:
            yield _decoding(model, window, batch, new)
            if not model.latent:
                yield _decoding_without_pages(model, window, batch, new)


def _training(model: Model, window, batch: int, length: int, value_dim: int) -> Call:
    """Forward and backward of padded sequences."""

    def loss(query, key, value, sinks, left):
        return dot_product_attention(
            query, key, value, mask=_mask(window, left), **_arguments(model, sinks)
        ).sum()

    return _gradients(model, loss), (
        _array(batch, length, model.heads, model.head_dim),
        _array(batch, length, model.kv_heads, model.head_dim),
        _array(batch, length, model.kv_heads, value_dim),
        *_scalars(model),
    )


def _packed_training(model: Model, window, tokens: int, value_dim: int) -> Call:
    """Forward and backward of packed sequences."""

    def loss(query, key, value, sinks, left, starts):
        mask, longest = _mask(window, left), tokens // 2
        return varlen_attention(
            query, key, value, starts, starts, longest, longest, mask=mask,
            **_arguments(model, sinks),
        ).sum()  # fmt: skip

    return _gradients(model, loss), (
        _array(tokens, model.heads, model.head_dim),
        _array(tokens, model.kv_heads, model.head_dim),
        _array(tokens, model.kv_heads, value_dim),
        *_scalars(model),
        _array(9, dtype=jnp.int32),
    )


def _decoding(model: Model, window, batch: int, new: int) -> Call:
    """New tokens of sequences in pages."""
    latent_dim = _LATENT_DIM if model.latent else None
    head_dim = _LATENT_DIM + _ROTARY_DIM if model.latent else model.head_dim
    pages = _CACHED // _PAGE_SIZE
    kv_heads = 1 if model.latent else model.kv_heads
    pool = _array(batch * pages, _PAGE_SIZE, kv_heads, head_dim)

    def step(query, key_pages, value_pages, sinks, left, table, lengths):
        if model.latent:
            value_pages = None
        mask = None if window is None else _mask(window, left, "bottom_right")
        return paged_attention(
            query, key_pages, value_pages, table, lengths, mask=mask, value_dim=latent_dim,
            **_arguments(model, sinks),
        )  # fmt: skip

    table, lengths = _array(batch, pages, dtype=jnp.int32), _array(batch, dtype=jnp.int32)
    query = _array(batch, new, model.heads, head_dim)
    return step, (query, pool, pool, *_scalars(model), table, lengths)


def _decoding_without_pages(model: Model, window, batch: int, new: int) -> Call:
    """New tokens of sequences whose keys and values are in an array of the longest length."""

    def step(query, key, value, sinks, left, lengths):
        mask = _mask(window, left, "bottom_right") & Mask.lengths(key=lengths)
        return dot_product_attention(query, key, value, mask=mask, **_arguments(model, sinks))

    cache = _array(batch, _CACHED, model.kv_heads, model.head_dim)
    lengths = _array(batch, dtype=jnp.int32)
    query = _array(batch, new, model.heads, model.head_dim)
    return step, (query, cache, cache, *_scalars(model), lengths)


def _gradients(model: Model, loss: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(loss, (0, 1, 2, 3) if model.sinks else (0, 1, 2))


def _mask(window, left: jax.Array, alignment: Literal["top_left", "bottom_right"] = "top_left"):
    return Mask.window(left if window == "traced" else window, 0, alignment)


def _arguments(model: Model, sinks: jax.Array) -> dict[str, Any]:
    return {**model.arguments, "sinks": sinks if model.sinks else None}


def _scalars(model: Model) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """The sinks, and the traced bound of a window."""
    return _array(model.heads, dtype=jnp.float32), _array(dtype=jnp.int32)


def _array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The attention primitives of a program, those of its functions too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("attention_fwd", "attention_bwd", "attention_tangent"):
            yield equation
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: isinstance(x, Jaxpr | ClosedJaxpr)
        ):
            if isinstance(value, ClosedJaxpr):
                value = value.jaxpr
            if isinstance(value, Jaxpr):
                yield from _equations(value)
