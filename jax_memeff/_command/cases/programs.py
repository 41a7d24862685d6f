"""The programs of a case: this library's paths, and ``jax.nn`` where it has the arguments."""

from __future__ import annotations

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
        moving = {name: arrays[name] for name in MOVING if name in arrays}
        _, transpose, results = jax.vjp(differentiable, moving, has_aux=True)
        (gradients,) = transpose((arrays["dout"], arrays["dlse"]))
        return {**results, **{f"d{name}": gradient for name, gradient in gradients.items()}}

    return program


def of_jax_nn(case: Case, implementation: Literal["cudnn", "xla"], gradients: bool) -> Program:
    """``jax.nn.dot_product_attention``, with gradients of query, key, value and bias on request."""

    def run(arrays: Given) -> jax.Array:
        lengths = {}
        if case.lengths is not None:
            lengths["query_seq_lengths"] = arrays["query_lengths"]
            lengths["key_value_seq_lengths"] = arrays["key_lengths"]
        return jax.nn.dot_product_attention(
            arrays["query"],
            arrays["key"],
            arrays["value"],
            arrays.get("bias"),
            arrays.get("boolean"),
            is_causal=case.causal is not None,
            local_window_size=case.window,
            implementation=implementation,
            **lengths,
        )

    def program(arrays: Given) -> dict[str, jax.Array]:
        if not gradients:
            return {"out": run(arrays)}
        moving = {name: arrays[name] for name in MOVING if name in arrays}
        out, transpose = jax.vjp(lambda moving: run({**arrays, **moving}), moving)
        return {"out": out, **transpose(arrays["dout"])[0]}

    return program


def jax_nn_can_run(case: Case) -> bool:
    """Whether ``jax.nn`` has an argument for each feature of a case.

    Its causal mask begins at the first row and column, and it multiplies float32 as asked.
    """
    lacking = (
        *(case.segments, case.mask_function, case.score_function, case.soft_cap, case.dropout),
        *(case.sinks, case.max_logits, case.tangents, case.fast, case.causal == "bottom_right"),
    )
    return case.kind == "padded" and case.value_dim == case.H and not any(lacking)


def _padded(case: Case, arrays: Given, implementation: Implementation) -> tuple[jax.Array, ...]:
    arguments = _arguments(case, arrays, implementation) | _of_training(case, arrays)
    return dot_product_attention(
        arrays["query"],
        arrays["key"],
        arrays["value"],
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
        arrays["value"],
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
        None if case.latent else arrays["value"],
        arrays["table"],
        arrays["key_lengths"],
        value_dim=case.value_dim if case.latent else None,
        batch_invariant=case.batch_invariant,
        return_residual=True,
        **_arguments(case, arrays, implementation),
    )


def _arguments(case: Case, arrays: Given, implementation: Implementation) -> dict[str, Any]:
    """What all functions take. New tokens in pages end their sequence, and so does their mask."""
    mask = Mask()
    if case.causal == "bottom_right" and case.kind != "paged":
        mask &= Mask.causal("bottom_right")
    if case.segments:
        mask &= Mask.segments(arrays["query_ids"], arrays["key_ids"])
    if case.boolean:
        mask &= Mask.boolean(arrays["boolean"])
    if case.mask_function == "blocks":
        mask &= Mask.function(in_blocks)
    elif case.mask_function:
        mask &= named_functions.mask(case.mask_function)
    return {
        "mask": mask,
        "is_causal": case.causal is not None if case.kind == "paged" else case.causal == "top_left",
        "local_window_size": case.window,
        "logits_soft_cap": case.soft_cap,
        "score_mod": _score_function(case, arrays.get("captured")),
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


def _score_function(case: Case, captured: jax.Array | None) -> Callable[..., Any] | None:
    if captured is None:
        if not case.score_function:
            return None
        return named_functions.imported("--score-function", case.score_function)
    if case.score_function == "alibi":
        return lambda s, b, h, q, k: s + captured[h] * (k - q).astype(jnp.float32)
    return lambda s, b, h, q, k: s + captured[q - k + (case.S - 1)]
