"""How the gradients of captured arrays are summed, from the indices of their reads."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from jax_memeff._functions.trace import traced_score_function
from jax_memeff.codegen.features import FUNCTIONS, AskedBias
from jax_memeff.codegen.features.functions import AskedFunctions
from jax_memeff.codegen.functions.regions import indices_of_columns
from jax_memeff.codegen.functions.sums import MOST_STRIPS, Sum, read_sums, strips
from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.select import select

VECTOR = jnp.ones(64)
DOCUMENTS = jnp.arange(64) // 8


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (lambda b, h, q, k: h, Sum.HEAD),
        (lambda b, h, q, k: b + 7, Sum.HEAD),
        (lambda b, h, q, k: q // 4, Sum.QUERY),
        (lambda b, h, q, k: DOCUMENTS[k] + h, Sum.KEY),
        (lambda b, h, q, k: q - k + h, Sum.DIAGONAL),
        (lambda b, h, q, k: jnp.clip(abs(q - k) // 4, 0, 9), Sum.DIAGONAL),
        (lambda b, h, q, k: DOCUMENTS[q] - DOCUMENTS[k], Sum.ELEMENT),
        (lambda b, h, q, k: q + k, Sum.ELEMENT),
    ],
)
def test_the_index_decides_the_sum(index, expected):
    program, _ = traced_score_function(lambda s, *at: s + VECTOR[index(*at)])
    assert read_sums(program, range(len(program.arrays))) == (expected,)
    assert read_sums(program, set()) == (Sum.NONE,)


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (lambda b, h, q, k: h, ()),
        (lambda b, h, q, k: q, ()),
        (lambda b, h, q, k: k, (0,)),
        (lambda b, h, q, k: q - k + h, (0,)),
        (lambda b, h, q, k: q - k - 64, (0,)),  # a negative index counts from the end
        (lambda b, h, q, k: abs(q - k), ()),
        (lambda b, h, q, k: jnp.clip(q - k + 8, 0, 15), ()),
        (lambda b, h, q, k: (q - k) // 4 + 32, ()),
        (lambda b, h, q, k: DOCUMENTS[k], ()),
        (lambda b, h, q, k: jnp.where(k > 8, k, k + 4), ()),
        (lambda b, h, q, k: k * q, ()),
        (lambda b, h, q, k: 2 * k, ()),  # the program does not contain the factor
    ],
)
def test_indices_that_differ_between_the_columns_of_a_row(index, expected):
    program, _ = traced_score_function(lambda s, *at: s + VECTOR[index(*at)])
    (read,) = program.float_reads
    assert indices_of_columns(program, read) == expected


def test_few_sums_pass_through_shared_memory():
    program, _ = traced_score_function(
        lambda s, b, h, q, k: s + sum(VECTOR[q - k + i] for i in range(MOST_STRIPS + 1)) + VECTOR[h]
    )
    found = read_sums(program, {0})
    assert sorted(own.value for own in found) == ["diagonal"] * MOST_STRIPS + ["element", "head"]
    assert strips(found, Sum.QUERY) == MOST_STRIPS


def test_strips_are_of_columns_of_the_accumulators():
    sums = (Sum.QUERY, Sum.KEY, Sum.DIAGONAL, Sum.HEAD)
    assert strips(sums, Sum.QUERY) == strips(sums, Sum.KEY) == 2
    assert strips(sums[:1], Sum.KEY) == 0


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_90a"])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256, 320])
@pytest.mark.parametrize("bias", [None, AskedBias("32", "full")])
def test_every_head_dim_has_a_kernel_that_sums(arch, head_dim, bias):
    """Strips leave shared memory for a tile, or the kernel adds each element by itself."""
    program, _ = traced_score_function(lambda s, b, h, q, k: s + VECTOR[q - k] + VECTOR[k - q + 9])
    asked = AskedFunctions(program.structure, None, gradients=(0,))
    for dtype in ("f16",) if arch == "sm_75" else ("f16", "f32"):
        features = {"functions": asked, "bias": bias, "dropout": True, "soft_cap": False}
        spec = select(Problem("backward", dtype, head_dim, head_dim, arch, features))
        own = spec[FUNCTIONS]
        assert own is not None and own.gradients == (0,)
        small = arch == "sm_75" or (arch == "sm_86" and "large_dim" in spec.kernel.stem)
        assert own.read_sums == (Sum.ELEMENT if small else Sum.DIAGONAL,) * 2
