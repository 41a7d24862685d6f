"""CUDA programs are lowered under JAX's strictest rules of promotion."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cuda_programs import loss, lower, shapes, varlen_loss, varlen_shapes

from jax_memeff import Mask
from jax_memeff.codegen.toolchain import compile as compiler

pytestmark = pytest.mark.usefixtures("hopper")

IDS = jnp.arange(128) // 50
PREFIX = jnp.arange(7)


def not_compiled(spec: Any, arch: str) -> compiler.Compiled:
    del arch
    names = tuple(entry.name for entry in spec.entry_points)
    return compiler.Compiled(b"image", names, (), (), "", 0.0, False)


def of_prefix(b, h, q, k):
    return k < PREFIX[b]


def of_window(query, key, value, left):
    return loss(query, key, value, mask=Mask.window(left, 0, "bottom_right"))


@pytest.mark.parametrize(
    "function, arrays",
    [
        (
            functools.partial(
                loss, mask=Mask.segments(IDS, IDS) & Mask.boolean(jnp.ones((128, 128), bool))
            ),
            shapes(),
        ),
        (of_window, (*shapes(), jax.ShapeDtypeStruct((), jnp.int32))),
        (
            functools.partial(varlen_loss, mask=Mask.function(of_prefix) | Mask.causal()),
            varlen_shapes(),
        ),
    ],
    ids=["segments", "traced_window", "packed_function"],
)
def test_strict_promotion(monkeypatch, function, arrays):
    monkeypatch.setattr(compiler, "compile", not_compiled)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        assert "@jax_memeff_" in lower(jax.grad(function, (0, 1, 2)), *arrays)
