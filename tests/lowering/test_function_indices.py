"""The indices of batch and heads in programs with users' functions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cuda_programs import attention_calls, lower, names_of, shapes, types_of

import jax_memeff
from jax_memeff import Mask

pytestmark = [pytest.mark.usefixtures("hopper"), pytest.mark.quick]

BATCH, HEADS = 3, 4


@pytest.mark.parametrize(
    ("functions", "read"),
    [
        ({"score_mod": lambda s, b, h, q, k: s + 0.1 * (q - k)}, set()),
        ({"score_mod": lambda s, b, h, q, k: s + 0.1 * h * (q - k)}, {"head"}),
        ({"mask": Mask.function(lambda b, h, q, k: q < 9 * b)}, {"batch"}),
        (
            {
                "score_mod": lambda s, b, h, q, k: s + h,
                "mask": Mask.function(lambda b, h, q, k: jnp.arange(BATCH)[b] < k),
            },
            {"batch", "head"},
        ),
    ],
    ids=lambda value: "-".join(sorted(value)) if isinstance(value, set) else None,
)
def test_only_indices_that_a_function_reads_are_computed(functions, read, fake_compiler):
    """XLA would compute the others in a kernel each. They are constants of rank 2 instead."""

    def loss(*operands: Any) -> jax.Array:
        out = jax_memeff.dot_product_attention(*operands, implementation="cuda", **functions)
        return out.astype(jnp.float32).sum()

    for call in attention_calls(lower(jax.grad(loss, (0, 1, 2)), *shapes(B=BATCH, N=HEADS))):
        types = dict(zip(names_of(call).split(","), types_of(call)[0], strict=True))
        for name, size in (("batch", BATCH), ("head", HEADS)):
            expected = f"{size}xi32" if name in read else f"1x{size}xi32"
            assert types[f"function_{name}_index"] == expected
