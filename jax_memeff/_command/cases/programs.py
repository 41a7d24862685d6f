"""The programs of a case: this library's paths, and ``jax.nn`` where it has the arguments.

Their clock is that of ``verify`` and ``bench``: programs take turns, in batches of launches.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_memeff import (
    Mask,
    dot_product_attention,
    forward_mode,
    paged_attention,
    varlen_attention,
)
from jax_memeff._command.cases.arrays import MOVING, in_blocks
from jax_memeff._command.cases.case import Case
from jax_memeff._cuda import named_functions

Given = Mapping[str, jax.Array]
Program = Callable[[Given], dict[str, jax.Array]]
Implementation = Literal["cuda", "xla"]


def forward(case: Case, implementation: Implementation) -> Program:
    """Maps the arrays of a case to ``out``, ``lse`` and, if the case asks for them, ``maxima``."""
    call = {"padded": _padded, "packed": _packed, "paged": _paged}[case.kind]

    def program(arrays: Given) -> dict[str, jax.Array]:
        results = call(case, arrays, implementation)
        return dict(zip(("out", "lse", "maxima"), results, strict=False))

    return program


def complete(case: Case, implementation: Implementation) -> Program:
    """As :func:`forward`, with the gradients or tangents of the case: ``dquery``, …,
    ``out_tangent`` and ``lse_tangent``.
    """
    run = forward(case, implementation)

    def program(arrays: Given) -> dict[str, jax.Array]:
        if not case.gradients and not case.tangents:
            return run(arrays)

        def differentiable(moving: Given) -> tuple[tuple[jax.Array, jax.Array], Given]:
            results = run({**arrays, **moving})
            return (results["out"], results["lse"]), results

        if case.tangents:
            moving = {name: arrays[name] for name in MOVING[:3]}
            directions = {name: arrays[f"{name}_tangent"] for name in moving}
            with forward_mode():
                _, tangents, results = jax.jvp(
                    differentiable, (moving,), (directions,), has_aux=True
                )
            return {**results, "out_tangent": tangents[0], "lse_tangent": tangents[1]}
        _, transpose, results = jax.vjp(differentiable, _moving(case, arrays), has_aux=True)
        (gradients,) = transpose((arrays["dout"], arrays["dlse"]))
        return {**results, **{f"d{name}": gradient for name, gradient in gradients.items()}}

    return program


def trained(case: Case, implementation: Implementation, gradients: bool) -> Program:
    """``out`` of a padded call and, on request, its gradients by ``dout`` alone, by the names of
    the arrays: what a model computes.
    """

    def run(arrays: Given) -> jax.Array:
        arguments = _arguments(case, arrays, implementation) | _of_training(case, arrays)
        return dot_product_attention(
            arrays["query"], arrays["key"], _value(case, arrays), return_residual=False, **arguments
        )

    return _with_gradients(case, run) if gradients else lambda arrays: {"out": run(arrays)}


def of_jax_nn(case: Case, implementation: Literal["cudnn", "xla"], gradients: bool) -> Program:
    """As :func:`trained`, by ``jax.nn.dot_product_attention``.

    It has no argument for some masks and unequal head dims: it gets what its users write instead, a
    boolean mask, and zeros that pad the head dims to the same size.
    """

    def run(arrays: Given) -> jax.Array:
        lengths = {}
        if case.lengths is not None:
            lengths["query_seq_lengths"] = arrays["query_lengths"]
            lengths["key_value_seq_lengths"] = arrays["key_lengths"]
        dim = max(case.H, case.value_dim)
        value = arrays["key"][..., : case.value_dim] if case.latent else arrays["value"]
        query, key, value = (_with_dim(x, dim) for x in (arrays["query"], arrays["key"], value))
        out = jax.nn.dot_product_attention(
            query,
            key,
            value,
            arrays.get("bias"),
            _mask_of_jax_nn(case, arrays),
            scale=case.H**-0.5,
            is_causal=case.causal is not None,
            local_window_size=case.window,
            implementation=implementation,
            **lengths,
        )
        return out[..., : case.value_dim]

    return _with_gradients(case, run) if gradients else lambda arrays: {"out": run(arrays)}


def jax_nn_lacks(case: Case) -> list[str]:
    """The features of a padded case that ``jax.nn`` has no argument for, nor a mask can replace."""
    features = {
        "lists of keys": case.keys,
        "dropout": case.dropout,
        "soft cap": case.soft_cap,
        "function of the scores": case.score_function,
        "sinks": case.sinks,
        "max logits": case.max_logits,
        "tangents of its cuDNN path": case.tangents,
        "mask aligned to the last query": case.causal == "bottom_right",
    }
    return [name for name, value in features.items() if value]


def jax_nn_can_run(case: Case) -> bool:
    """Whether ``jax.nn`` has an argument for each feature of a case.

    Its causal mask begins at the first row and column, and it multiplies float32 as asked.
    """
    is_replaced = case.segments or case.mask_function or case.value_dim != case.H or case.fast
    return case.kind == "padded" and not is_replaced and not jax_nn_lacks(case)


def _moving(case: Case, arrays: Given) -> Given:
    """The arrays that have gradients: not the values of latent attention."""
    moving = {name: arrays[name] for name in MOVING if name in arrays}
    if case.latent:
        del moving["value"]
    return moving


def _with_gradients(case: Case, run: Callable[[Given], jax.Array]) -> Program:
    def program(arrays: Given) -> dict[str, jax.Array]:
        moving = _moving(case, arrays)
        out, transpose = jax.vjp(lambda moving: run({**arrays, **moving}), moving)
        return {"out": out, **transpose(arrays["dout"])[0]}

    return program


def _with_dim(array: jax.Array, dim: int) -> jax.Array:
    return jnp.pad(array, [(0, 0)] * 3 + [(0, dim - array.shape[3])])


def _mask_of_jax_nn(case: Case, arrays: Given) -> jax.Array | None:
    """The boolean mask of all that has no argument, broadcast where it does not differ."""
    mask = arrays.get("boolean")
    if case.segments:
        query_ids, key_ids = (arrays[f"{x}_ids"] for x in ("query", "key"))
        same = query_ids[:, None, :, None] == key_ids[:, None, None, :]
        same &= query_ids[:, None, :, None] >= 0
        mask = same if mask is None else mask & same
    if (function := mask_function(case)) is not None:
        indices = [jnp.arange(size) for size in (case.B, case.N, case.T, case.S)]
        of_function = _over_indices(function, indices)
        mask = of_function if mask is None else mask & of_function
    return mask


def _over_indices(function: Callable[..., Any], indices: list[jax.Array]) -> jax.Array:
    """A function of four indices for all of them, bool[B or 1, N or 1, T, S]: batch indices and
    heads have an axis only if the function depends on them.
    """
    of_rows = jax.vmap(jax.vmap(function, (None, None, None, 0)), (None, None, 0, None))
    of_heads = _over_index(of_rows, 1, [indices[0][0], *indices[1:]])
    return _over_index(of_heads, 0, indices)(*indices)


def _over_index(
    function: Callable[..., Any], place: int, indices: list[jax.Array]
) -> Callable[..., Any]:
    """``jax.vmap`` over one argument; an axis of size 1 if the function does not depend on it."""
    places = tuple(0 if other == place else None for other in range(4))
    try:
        jax.eval_shape(jax.vmap(function, places, out_axes=None), *indices)
    except ValueError:  # it depends on it
        return jax.vmap(function, places)
    return lambda *elements: function(
        *elements[:place], elements[place][0], *elements[place + 1 :]
    )[None]


def _padded(case: Case, arrays: Given, implementation: Implementation) -> tuple[jax.Array, ...]:
    arguments = _arguments(case, arrays, implementation) | _of_training(case, arrays)
    return dot_product_attention(
        arrays["query"],
        arrays["key"],
        _value(case, arrays),
        query_seq_lengths=arrays.get("query_lengths"),
        key_value_seq_lengths=arrays.get("key_lengths"),
        return_residual=True,
        **arguments,
    )


def _packed(case: Case, arrays: Given, implementation: Implementation) -> tuple[jax.Array, ...]:
    arguments = _arguments(case, arrays, implementation) | _of_training(case, arrays)
    return varlen_attention(
        arrays["query"],
        arrays["key"],
        _value(case, arrays),
        arrays["query_starts"],
        arrays["key_starts"],
        case.T,
        case.S,
        return_residual=True,
        **arguments,
    )


def _paged(case: Case, arrays: Given, implementation: Implementation) -> tuple[jax.Array, ...]:
    return paged_attention(
        arrays["query"],
        arrays["key"],
        _value(case, arrays),
        arrays["table"],
        arrays["key_lengths"],
        batch_invariant=case.batch_invariant,
        return_residual=True,
        **_arguments(case, arrays, implementation),
    )


def _value(case: Case, arrays: Given) -> jax.Array | None:
    return None if case.latent else arrays["value"]


def _arguments(case: Case, arrays: Given, implementation: Implementation) -> dict[str, Any]:
    """What all functions take. New tokens in pages end their sequence, and so does their mask."""
    mask = Mask()
    if case.causal == "bottom_right" and case.kind != "paged":
        mask &= Mask.causal("bottom_right")
    if case.segments:
        mask &= Mask.segments(arrays["query_ids"], arrays["key_ids"])
    if case.boolean:
        mask &= Mask.boolean(arrays["boolean"])
    if case.keys:
        is_packed = case.kind == "packed"
        lists = arrays["lists"]
        mask &= Mask.keys(lists if is_packed else jnp.swapaxes(lists, 1, 2))
    if (function := mask_function(case)) is not None:
        mask &= Mask.function(function)
    return {
        "value_dim": case.value_dim if case.latent else None,
        "mask": mask,
        "is_causal": case.causal is not None if case.kind == "paged" else case.causal == "top_left",
        "local_window_size": case.window,
        "logits_soft_cap": case.soft_cap,
        "score_mod": score_function(case, arrays.get("captured")),
        "sinks": arrays.get("sinks"),
        "implementation": implementation,
    }


def _of_training(case: Case, arrays: Given) -> dict[str, Any]:
    key = None
    if case.dropout:
        key = jax.random.wrap_key_data(arrays["words"], impl="threefry2x32")
    return {
        "bias": arrays.get("bias"),
        "dropout_rate": case.dropout,
        "dropout_key": key,
        "precision": "default" if case.fast else None,
        "deterministic_backward": case.deterministic,
        "return_max_logits": case.max_logits,
    }


def mask_function(case: Case) -> Callable[..., Any] | None:
    """The mask function of a case: a function of (b, h, q, k)."""
    if case.mask_function == "blocks":
        return in_blocks
    if not case.mask_function:
        return None
    return named_functions.imported("--mask-function", case.mask_function)


def score_function(case: Case, captured: jax.Array | None) -> Callable[..., Any] | None:
    """The score function of a case, which may read its array: a function of (s, b, h, q, k)."""
    if captured is None:
        if not case.score_function:
            return None
        return named_functions.imported("--score-function", case.score_function)
    if case.score_function == "alibi":
        return lambda s, b, h, q, k: s + captured[h] * (k - q).astype(jnp.float32)
    return lambda s, b, h, q, k: s + captured[q - k + (case.S - 1)]


_BATCH_SECONDS = 0.02
_MOST_LAUNCHES = 500
_SLOW_SECONDS = 1.0


def interleaved(
    launches: Mapping[str, Callable[[], Any]], *, seconds: float, least: int, most: int
) -> dict[str, list[float]]:
    """Seconds of a call of each program, in ``least`` to ``most`` rounds in which each has its
    turn, for about ``seconds`` in all.

    A turn is a batch of launches, because the host takes part of the time of a short one: the times
    of small calls are those of the host. The order changes from round to round, so that no program
    always comes after the same one.
    """

    def timed(name: str, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            results = launches[name]()
        jax.block_until_ready(results)
        return (time.perf_counter() - start) / count

    counts = {}
    total = 0.0
    for name in launches:
        once = timed(name, 1)
        if once < _SLOW_SECONDS:  # the first launches record command buffers
            timed(name, 1)
            once = timed(name, 1)
        counts[name] = min(_MOST_LAUNCHES, max(1, math.ceil(_BATCH_SECONDS / once)))
        total += counts[name] * once
    rounds = min(most, max(least, int(seconds / total))) if launches else 0
    samples: dict[str, list[float]] = {name: [] for name in launches}
    orders = itertools.cycle(itertools.permutations(launches))
    for order in itertools.islice(orders, rounds):
        for name in order:
            samples[name].append(timed(name, counts[name]))
    return samples
