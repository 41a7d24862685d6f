"""``Mask.function``, ``|`` and ``~``: values, pytrees, equality, gradients, errors."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_memeff
from jax_memeff import Mask, Offsets, dot_product_attention

B, N, T, S, H = 2, 3, 9, 11, 8
DOCUMENTS = np.array([[0] * 4 + [1] * 3 + [-1] * 4, [2] * 11])


def draw(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


QUERY, KEY, VALUE = draw(0, B, T, N, H), draw(1, B, S, N, H), draw(2, B, S, N, H)
BOOLEAN = np.random.default_rng(3).random((1, N, T, S)) < 0.5

ATOMS: dict[str, Mask] = {
    "causal": Mask.causal(),
    "bottom_right": Mask.window(3, 0, "bottom_right"),
    "key_lengths": Mask.lengths(key=np.array([5, 11])),
    "query_lengths": Mask.lengths(query=np.array([9, 4])),
    "segments": Mask.segments(DOCUMENTS[:, :T], DOCUMENTS),
    "boolean": Mask.boolean(BOOLEAN),
    "function": Mask.function(lambda b, h, q, k: (q + h) % 2 == k % (b + 2)),
}


def as_array(mask: Mask) -> np.ndarray:
    return np.asarray(jax.jit(lambda: mask.as_array(B, N, T, S))())


@pytest.mark.parametrize("name", ATOMS)
def test_not(name):
    np.testing.assert_array_equal(as_array(~ATOMS[name]), ~as_array(ATOMS[name]))


@pytest.mark.rotating(3)
@pytest.mark.parametrize("name", ATOMS)
@pytest.mark.parametrize("other", ["causal", "segments", "function"])
def test_or(name, other):
    a, b = ATOMS[name], ATOMS[other]
    want = as_array(a) | as_array(b)
    np.testing.assert_array_equal(as_array(a | b), want)
    # Attention agrees.
    got = dot_product_attention(QUERY, KEY, VALUE, mask=a | b)
    np.testing.assert_allclose(got, dot_product_attention(QUERY, KEY, VALUE, mask=want), atol=1e-6)


def test_any_expression():
    a, b, c, d = (ATOMS[name] for name in ("causal", "segments", "boolean", "function"))
    arrays = map(as_array, (a, b, c, d))
    x, y, z, w = arrays
    np.testing.assert_array_equal(as_array((a | b | ~c) & ~(d & ~a)), (x | y | ~z) & ~(w & ~x))
    np.testing.assert_array_equal(as_array(~~a), x)
    np.testing.assert_array_equal(as_array(Mask() | a), np.ones_like(x))
    np.testing.assert_array_equal(as_array(~Mask()), np.zeros_like(x))


def test_lengths_of_the_whole_mask_stay():
    """Rows and columns beyond them stay invalid, and bottom-right windows end at them."""
    lengths = Mask.lengths(np.array([9, 4]), np.array([5, 11]))
    either = ATOMS["bottom_right"] | Mask.function(lambda b, h, q, k: True)
    inside = as_array(lengths)
    np.testing.assert_array_equal(as_array(either & lengths), inside)
    placed = ~ATOMS["bottom_right"] & lengths
    want = inside & ~as_array(ATOMS["bottom_right"] & lengths)
    np.testing.assert_array_equal(as_array(placed), want)
    garbage = VALUE.at[0, 5:].set(jnp.nan)
    out = dot_product_attention(QUERY, KEY, garbage, mask=either & lengths)
    assert np.isfinite(out).all() and not out[1, 4:].any()


def test_rows_without_keys_are_zero():
    mask = Mask.function(lambda b, h, q, k: q > 3)
    out, lse = dot_product_attention(QUERY, KEY, VALUE, mask=mask, return_residual=True)
    np.testing.assert_array_equal(out[:, :4], 0)
    np.testing.assert_array_equal(lse[:, :4], -np.inf)
    assert np.isfinite(lse[:, 4:]).all()


@pytest.mark.parametrize("name", ["segments", "boolean", "key_lengths", "bottom_right", "causal"])
def test_offsets_leave_arrays_in_place(name):
    """As without ``~``, windows count from global positions and arrays from those of the call."""
    offsets = Offsets(batch=3, head=2, num_heads=8, query=4, key=1)
    mask = ATOMS[name]
    got = dot_product_attention(QUERY, KEY, VALUE, mask=~~mask & ~~~~mask, offsets=offsets)
    again = dot_product_attention(QUERY, KEY, VALUE, mask=~(~mask & ~mask), offsets=offsets)
    want = dot_product_attention(QUERY, KEY, VALUE, mask=mask, offsets=offsets)
    np.testing.assert_allclose(got, want, atol=1e-6)
    np.testing.assert_allclose(again, want, atol=1e-6)


def test_functions_get_global_indices():
    offsets = Offsets(batch=3, head=2, num_heads=8, query=4, key=jnp.array([1, 2]))
    seen = np.asarray([3, 4])[:, None, None, None], np.arange(2, 5)[:, None, None]
    rows, columns = np.arange(4, 4 + T)[:, None], np.arange(S) + np.array([1, 2])[:, None]

    def function(b, h, q, k):
        return (b * q + h * k) % 3 != 0

    want = function(*seen, rows, columns[:, None, None])
    mask = Mask.function(function)
    got = dot_product_attention(QUERY, KEY, VALUE, mask=mask, offsets=offsets)
    expected = dot_product_attention(QUERY, KEY, VALUE, mask=np.asarray(want))
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_masks_of_functions_cross_jit_scan_and_vmap():
    bounds = jnp.array([[2, 3], [5, 0], [9, 9]])

    def attention(mask):
        return dot_product_attention(QUERY, KEY, VALUE, mask=mask)

    def mask_of(bound):
        return Mask.causal() | Mask.function(lambda b, h, q, k: k < bound[b])

    each = jnp.stack([attention(mask_of(bound)) for bound in bounds])
    masks = jax.vmap(mask_of)(bounds)
    for got in (
        jnp.stack([jax.jit(attention)(mask_of(bound)) for bound in bounds]),
        jax.vmap(attention)(masks),
        jax.lax.scan(lambda carry, mask: (carry, attention(mask)), None, masks)[1],
    ):
        np.testing.assert_allclose(got, each, atol=1e-6)


def test_equality():
    def one(b, h, q, k):
        return q - k < 3

    assert Mask.function(one) == Mask.function(lambda b, h, q, k: q - k < 3)
    assert hash(Mask.function(one)) == hash(Mask.function(one))
    assert Mask.function(one) != Mask.function(lambda b, h, q, k: q - k < 4)
    assert ~Mask.causal() == ~Mask.causal() != ~Mask.window(1, 1)
    array = jnp.arange(3)
    mask = Mask.function(lambda b, h, q, k: array[b] < q)
    for action in (lambda: mask == Mask(), lambda: hash(~mask)):
        with pytest.raises(TypeError, match=r"a Mask that holds arrays .*as_array"):
            action()
    assert (~mask).kinds() == mask.kinds() == {"function"}


def test_arrays_of_a_mask_have_zero_gradients():
    def loss(bounds, query):
        mask = Mask.function(lambda b, h, q, k: k < bounds[b] + q)
        return dot_product_attention(query, KEY, VALUE, mask=mask).sum()

    bounds = jnp.array([1.5, 2.5])
    of_bounds, of_query = jax.grad(loss, (0, 1))(bounds, QUERY)
    np.testing.assert_array_equal(of_bounds, 0)
    assert of_query.any()
    with jax_memeff.forward_mode():
        tangent = jax.jvp(lambda bounds: loss(bounds, QUERY), [bounds], [bounds])[1]
    assert tangent == 0


NOT_A_FUNCTION: Any = 3
NOT_A_MASK: Any = lambda b, h, q, k: q > k  # noqa: E731
ARRAY: Any = BOOLEAN


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Mask.function(NOT_A_FUNCTION), TypeError, "Mask.function must be a function"),
        (lambda: Mask.function(lambda q, k: q > k), TypeError, "Mask.function must take"),
        (lambda: Mask.function(lambda b, h, q, k: q - k), TypeError, "must return a bool scalar"),
        (lambda: Mask.causal() | NOT_A_FUNCTION, TypeError, "combines with another Mask, got "),
        (lambda: Mask.causal() & ARRAY, TypeError, "got ndarray: pass jax_memeff.Mask.boolean"),
        (lambda: ARRAY & Mask.causal(), TypeError, "got ndarray: pass jax_memeff.Mask.boolean"),
        (lambda: jnp.asarray(BOOLEAN) | Mask.causal(), TypeError, r"Mask\.boolean"),
        (lambda: Mask.causal() | NOT_A_MASK, TypeError, "Mask.function"),
        (lambda: Mask.causal() and Mask.window(1, 1), TypeError, r"&, \| and ~ instead of and"),
        (lambda: not Mask.causal(), TypeError, "has no truth value"),
    ],
)
def test_errors(make: Any, error, text):
    with pytest.raises(error, match=text):
        make()


def test_a_wrong_array_under_or_is_named():
    mask: Any = Mask.causal() | Mask.lengths(key=np.array([3]))
    with pytest.raises(ValueError, match="key lengths must have shape"):
        dot_product_attention(QUERY, KEY, VALUE, mask=mask)


def test_check_takes_functions():
    bounds = jnp.array([2, 3])
    mask = (Mask.causal() | Mask.function(lambda b, h, q, k: k < bounds[b])) & Mask.lengths(
        key=jnp.array([5, 12])
    )
    with pytest.raises(ValueError, match=r"key lengths must be in \[0, 11\], got 12 at index 1"):
        jax_memeff.check(QUERY, KEY, VALUE, mask=mask)
    arguments: Any = {"score_mod": lambda s, b, h, q, k: s + bounds[b], "mask": ~mask}
    with pytest.raises(ValueError, match=r"key lengths must be in \[0, 11\], got 12 at index 1"):
        jax_memeff.check(QUERY, KEY, VALUE, **arguments)
    arguments["mask"] = Mask.causal() | Mask.function(lambda b, h, q, k: k < bounds[b])
    jax_memeff.check(QUERY, KEY, VALUE, **arguments)


@pytest.mark.parametrize("grad", [False, True])
def test_a_call_without_a_kernel_says_so(grad, monkeypatch):
    """The functions read more arrays than kernels support."""
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", "sm_90a")

    def loss(query, tables, implementation):
        def score_mod(s, b, h, q, k):
            return s + sum(table[k] for table in tables)

        arrays = (x.astype("bfloat16") for x in (query, KEY, VALUE))
        out = dot_product_attention(*arrays, score_mod=score_mod, implementation=implementation)
        return out.sum()

    def lower(implementation):
        function = jax.grad(loss, (0, 1)) if grad else loss
        tables = [jnp.ones(S) for _ in range(20)]
        traced = jax.jit(function, static_argnums=2).trace(QUERY, tables, implementation)
        return traced.lower(lowering_platforms=("cuda",))

    with pytest.raises(jax_memeff.UnsupportedError, match=r"functions read 20 arrays.*'xla'"):
        lower(None)
    assert "jax_memeff_forward" not in lower("xla").as_text()


def test_arguments_that_are_mixed_up():
    with pytest.raises(TypeError, match=r"got a function; pass mask=jax_memeff\.Mask\.function"):
        dot_product_attention(QUERY, KEY, VALUE, mask=NOT_A_MASK)
    mask: Any = Mask.causal()
    with pytest.raises(TypeError, match="got a Mask; pass mask="):
        dot_product_attention(QUERY, KEY, VALUE, score_mod=mask)


def test_one_answer_for_quotients():
    """XLA multiplies by the reciprocal of a broadcast divisor, so that 41 / 41 is below 1."""
    size, page = 128, 16
    numbers = np.random.default_rng(4).uniform(0.5, 2, size).astype(np.float32)
    weights = np.where(np.arange(size) < 90, np.float32(41), numbers)
    want = weights[None, :] / weights[:, None] >= 1
    query, key, value = draw(5, size, 1, H), draw(6, size, 1, H), np.eye(size)[:, None, :]
    arrays = tuple(jax.device_put(np.asarray(x, np.float32)) for x in (query, key, value))
    pages = (x.reshape(size // page, page, 1, -1) for x in arrays[1:])

    @jax.jit
    def selected(weights, query, key, value, key_pages, value_pages):
        """Which elements of the scores are valid in each call: value selects a column."""
        mask = Mask.function(lambda b, h, q, k: weights[k] / weights[q] >= 1)
        one = jnp.array([0, size])
        packed = query, key, value, one, one, size, size
        table = jnp.arange(size // page)[None, :]
        paged = jax_memeff.paged_attention(
            query,
            key_pages,
            value_pages,
            table,
            one[1:],
            query_starts=one,
            max_query_length=size,
            mask=mask,
            is_causal=False,
        )

        def attention(value):
            return dot_product_attention(query, key, value, mask=mask)

        gradient = jax.vjp(attention, value)[1](jnp.eye(size)[:, None, :])[0]
        return {
            "as_array": mask.as_array(1, 1, size, size)[0, 0],
            "output": attention(value)[:, 0] > 0,
            "gradient": gradient[:, 0].T > 0,
            "packed": jax_memeff.varlen_attention(*packed, mask=mask)[:, 0] > 0,
            "paged": paged[:, 0] > 0,
        }

    for name, valid in selected(weights, *arrays, *pages).items():
        np.testing.assert_array_equal(valid, want, err_msg=name)


def test_a_quotient_is_computed_in_the_loop_that_uses_it():
    """A tile of quotients in memory would take 4 bytes per score."""
    size = 512
    query, key, value = (jax.ShapeDtypeStruct((1, size, 1, H), jnp.float32) for _ in range(3))
    weights = jax.ShapeDtypeStruct((size,), jnp.float32)

    def temporaries(function):
        def attention(weights, *qkv):
            mask = Mask.function(lambda b, h, q, k: function(weights[q], weights[k]))
            return dot_product_attention(*qkv, mask=mask)

        analysis = jax.jit(attention).lower(weights, query, key, value).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    of_comparison = temporaries(lambda row, column: column >= row)
    assert of_comparison > 4 * size**2
    assert temporaries(lambda row, column: column / row >= 1) < of_comparison + size**2 / 4
