"""``jax.vmap`` of ``paged_attention`` is one call with more sequences, and with more pages if the
pool is mapped.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import paging
import pytest
from jaxprs import primitives_of

NAMES = ("query", "key_pages", "value_pages", "page_table", "kv_lengths")


def cases(count=3):
    rng = np.random.default_rng(0)
    return [
        paging.paging(
            rng,
            lengths=list(rng.integers(5, 60, 3)),
            counts=[4, 4, 4],
            max_pages=4,
            pages=12,
            heads=(4, 2),
        )
        for _ in range(count)
    ]


def attention(query, key_pages, value_pages, page_table, kv_lengths, **arguments):
    batched = query.reshape(3, 4, *query.shape[1:])
    return paging.paged_attention(
        batched, key_pages, value_pages, page_table, kv_lengths, return_residual=True, **arguments
    )


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    "mapped",
    [
        NAMES,
        ("query",),
        ("query", "page_table", "kv_lengths"),
        ("key_pages", "value_pages"),
        ("value_pages", "page_table"),
        ("key_pages", "kv_lengths"),
    ],
    ids="+".join,
)
def test_each_call_is_computed(mapped):
    each = [[jnp.asarray(x) for x in case.arguments] for case in cases()]
    # Every page of a call's table is valid in the pools of the other calls.
    each = [[jnp.nan_to_num(x) if x.dtype == jnp.float32 else x for x in own] for own in each]
    axes = tuple(0 if name in mapped else None for name in NAMES)
    given = [
        jnp.stack([own[i] for own in each]) if axis == 0 else each[0][i]
        for i, axis in enumerate(axes)
    ]
    found = jax.jit(jax.vmap(attention, axes))(*given)
    one = jax.jit(attention)
    for index in range(len(each)):
        expected = one(*(x[index] if axis == 0 else x for x, axis in zip(given, axes, strict=True)))
        for got, want in zip(found, expected, strict=True):
            np.testing.assert_allclose(got[index], want, atol=1e-6)


def test_pages_of_other_calls_are_not_read():
    """Hazard: an entry beyond a call's pool would be a page of the next call in the folded pool."""
    each = [[jnp.asarray(x) for x in case.arguments] for case in cases(2)]
    each[0][3] = each[0][3].at[0, 0].set(12).at[1, 0].set(-1)
    found = jax.jit(jax.vmap(attention))(*(jnp.stack(pair) for pair in zip(*each, strict=True)))
    for index, own in enumerate(each):
        for got, want in zip(found, jax.jit(attention)(*own), strict=True):
            np.testing.assert_allclose(got[index], want, atol=1e-6)


def test_nested_with_functions_and_sinks():
    each = [[jnp.asarray(x) for x in case.arguments] for case in cases(4)]
    given = [jnp.stack(group) for group in zip(*each, strict=True)]
    given = [x.reshape(2, 2, *x.shape[1:]) for x in given]
    slopes = jnp.linspace(0.1, 0.5, 8).reshape(2, 4)

    def one(slopes, *arrays):
        return attention(
            *arrays, score_mod=lambda s, b, h, q, k: s + slopes[h] * (k - q), sinks=slopes
        )

    found = jax.jit(jax.vmap(jax.vmap(one, (None, 0, 0, 0, 0, 0))))(slopes, *given)
    one = jax.jit(one)
    for i, j in np.ndindex(2, 2):
        expected = one(slopes[i], *(x[i, j] for x in given))
        for got, want in zip(found, expected, strict=True):
            np.testing.assert_allclose(got[i, j], want, atol=1e-6)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("mapped_pool", [False, True])
@pytest.mark.parametrize("scale_axes", [(None, None), (0, 0), (None, 0)])
def test_scales(mapped_pool, scale_axes):
    given = [jnp.asarray(x) for x in cases(1)[0].arguments]
    pools = [jnp.nan_to_num(x).astype(jnp.float8_e4m3fn) for x in given[1:3]]
    pools = [jnp.stack([x, x[::-1]]) if mapped_pool else x for x in pools]
    scales = [
        jnp.linspace(0.5, 2, 4).reshape(2, 2),
        jnp.linspace(0.5, 2, 48).reshape(2, 12, 2),
    ]
    scales = [x if axis == 0 else x[0] for x, axis in zip(scales, scale_axes, strict=True)]

    def one(key_pages, value_pages, key_scale, value_scale, query):
        return attention(
            query, key_pages, value_pages, *given[3:], key_scale=key_scale, value_scale=value_scale
        )

    axes = (*[0 if mapped_pool else None] * 2, *scale_axes, 0)
    arrays = [*pools, *scales, jnp.stack([given[0], -given[0]])]
    found = jax.jit(jax.vmap(one, axes))(*arrays)
    one = jax.jit(one)
    for index in range(2):
        own = (x[index] if axis == 0 else x for x, axis in zip(arrays, axes, strict=True))
        for got, want in zip(found, one(*own), strict=True):
            np.testing.assert_allclose(got[index], want, atol=1e-6)


def test_a_pool_that_is_not_mapped_is_not_copied():
    case = cases(1)[0]
    given = [jnp.asarray(x) for x in case.arguments]
    query = jnp.stack([given[0]] * 5)
    mapped = jax.vmap(functools.partial(attention), (0, None, None, None, None))
    (call,) = (
        eqn
        for eqn in primitives_of(jax.make_jaxpr(mapped)(query, *given[1:]).jaxpr)
        if eqn.primitive.name == "attention_fwd"
    )
    shapes = [var.aval.shape for var in call.invars]
    assert (1, 60, 4, 8) in shapes
    assert shapes.count((1, 12 * 16, 2, 8)) == 2
