"""``merge_attention``: attention over all keys from results over parts of them."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import paging
import pytest

import jax_memeff
from jax_memeff import Mask


def arrays(dtype=jnp.float32) -> Any:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (2, 5, 4, 8), (2, 24, 2, 8), (2, 24, 2, 8)
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def merged(query, key, value, bounds):
    parts = [
        jax_memeff.dot_product_attention(
            query, key[:, first:last], value[:, first:last], return_residual=True
        )
        for first, last in itertools.pairwise(bounds)
    ]
    return jax_memeff.merge_attention(parts)


@pytest.mark.parametrize("bounds", [(0, 24), (0, 1, 24), (0, 7, 8, 24)])
def test_parts_of_the_keys(bounds):
    query, key, value = arrays()
    out, lse = merged(query, key, value, bounds)
    expected = jax_memeff.dot_product_attention(query, key, value, return_residual=True)
    np.testing.assert_allclose(out, expected[0], atol=1e-6)
    np.testing.assert_allclose(lse, expected[1], atol=1e-6)


def test_gradients():
    given = arrays()

    def loss(function: Any) -> Any:
        return lambda *arrays: jnp.sum(jnp.sin(function(*arrays)))

    found = jax.grad(loss(lambda q, k, v: merged(q, k, v, (0, 7, 24))[0]), (0, 1, 2))(*given)
    expected = jax.grad(loss(jax_memeff.dot_product_attention), (0, 1, 2))(*given)
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_rows_without_keys():
    query, key, value = arrays()
    none = Mask.lengths(key=jnp.array([0, 24]))
    parts = [
        jax_memeff.dot_product_attention(query, key, value, mask=none, return_residual=True),
        jax_memeff.dot_product_attention(query, key, value, mask=none, return_residual=True),
    ]
    out, lse = jax_memeff.merge_attention(parts)
    assert not out[0].any() and (lse[0] == -jnp.inf).all()
    np.testing.assert_allclose(out[1], parts[0][0][1], atol=1e-6)
    gradient = jax.grad(
        lambda x: jnp.sum(jax_memeff.merge_attention([(x, parts[0][1]), parts[1]])[0])
    )(parts[0][0])
    assert jnp.isfinite(gradient).all()
    of_lse = jax.grad(
        lambda x: jnp.sum(jax_memeff.merge_attention([(parts[0][0], x), parts[1]])[0])
    )(parts[0][1])
    assert jnp.isfinite(of_lse).all()


def test_nan_reaches_the_results():
    out, lse = jnp.ones((2, 1, 8)), jnp.zeros((2, 1))
    wrong = lse.at[0].set(jnp.nan)
    for parts in ([(out, wrong), (out, lse)], [(out, lse), (out, wrong)], [(out, wrong)]):
        merged_out, merged_lse = jax_memeff.merge_attention(parts)
        assert jnp.isnan(merged_out[0]).all() and jnp.isnan(merged_lse[0]).all()
        np.testing.assert_allclose(merged_out[1], 1)
        assert jnp.isfinite(merged_lse[1]).all()
    (merged_out, _) = jax_memeff.merge_attention([(out, lse), (out * jnp.nan, lse + jnp.inf)])
    assert jnp.isnan(merged_out).all()


def test_a_part_without_keys_may_hold_nan():
    out, lse = jnp.ones((2, 1, 8)), jnp.zeros((2, 1))
    none = jnp.full_like(out, jnp.nan), jnp.full_like(lse, -jnp.inf)

    def merged_out(*arrays):
        return jnp.sum(jax_memeff.merge_attention([arrays[:2], arrays[2:]])[0])

    found = jax_memeff.merge_attention([none, (out, lse), none])
    for got, want in zip(found, (out, lse), strict=True):
        np.testing.assert_array_equal(got, want)
    gradients = jax.grad(merged_out, (0, 1, 2, 3))(out, lse, *none)
    assert all(jnp.isfinite(gradient).all() for gradient in gradients)


def test_a_sink_of_infinity_takes_the_whole_row():
    query, key, value = arrays()
    sinks = jnp.array([jnp.inf, 0.5, -jnp.inf, -3.0])

    def loss(function: Any) -> Any:
        return lambda *arrays: jnp.sum(jnp.sin(function(*arrays)[0]))

    def whole(query, key, value, sinks):
        return jax_memeff.dot_product_attention(
            query, key, value, sinks=sinks, return_residual=True
        )

    def in_parts(query, key, value, sinks):
        first = whole(query, key[:, :7], value[:, :7], sinks)
        return jax_memeff.merge_attention([first, whole(query, key[:, 7:], value[:, 7:], None)])

    for got, want in zip(
        in_parts(query, key, value, sinks), whole(query, key, value, sinks), strict=True
    ):
        np.testing.assert_allclose(got, want, atol=1e-6)
    places = (0, 1, 2, 3)
    found = jax.grad(loss(in_parts), places)(query, key, value, sinks)
    expected = jax.grad(loss(whole), places)(query, key, value, sinks)
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_16_bits():
    query, key, value = arrays(jnp.bfloat16)
    out, lse = merged(query, key, value, (0, 7, 24))
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    expected = jax_memeff.dot_product_attention(query, key, value).astype(jnp.float32)
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=2e-2)


def test_a_prefix_that_sequences_share():
    """One call computes the prefix for the queries of all sequences."""
    rng = np.random.default_rng(0)
    case = paging.paging(rng, lengths=[40, 45, 33], counts=[1] * 3)
    for b in (1, 2):
        case.table[b, :2] = case.table[0, :2]
        case.keys[b][:32], case.values[b][:32] = case.keys[0][:32], case.values[0][:32]
    query, *pools, table, lengths = case.arguments
    prefix = paging.paged_attention(
        query[None], *pools, table[:1], [32], is_causal=False, return_residual=True
    )
    rest = paging.paged_attention(
        query[:, None], *pools, table[:, 2:], lengths - 32, return_residual=True
    )
    out, _ = jax_memeff.merge_attention(
        [(prefix[0][0], prefix[1][0]), (rest[0][:, 0], rest[1][:, 0])]
    )
    np.testing.assert_allclose(out, paging.answer(case)[0], atol=1e-5)


OUT, LSE = jnp.zeros((2, 4, 8)), jnp.zeros((2, 4))


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ([], ValueError, "parts must have at least one pair"),
        (None, TypeError, "parts must be a list of pairs .* got None of type NoneType"),
        (jnp.float32(0), TypeError, "parts must be a list of pairs .* got Array"),
        (
            [(1.0, 2.0)],
            ValueError,
            r"parts\[0\]: out must have shape \[..., N, Hv\], got shape \(\)",
        ),
        ([OUT], TypeError, r"parts\[0\] must be a pair \(out, lse\)"),
        ([(OUT, LSE), (OUT, LSE[:1])], ValueError, r"parts\[1\]: lse must have the shape of out"),
        ([(OUT, LSE), (OUT[:1], LSE[:1])], ValueError, r"parts\[1\]: out must have the shape of p"),
        ([(OUT, LSE.astype(jnp.float16))], TypeError, r"parts\[0\]: lse must be float32.*float16"),
        ([(OUT.astype(int), LSE)], TypeError, r"parts\[0\]: out must be one of float16"),
        ([(OUT, LSE), (OUT.astype("float16"), LSE)], TypeError, r"parts\[1\]: out must have the d"),
    ],
)
def test_wrong_arguments(parts, error, message):
    with pytest.raises(error, match=message):
        jax_memeff.merge_attention(parts)
