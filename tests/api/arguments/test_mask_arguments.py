"""Masks, lengths and positions as arguments: what a call refuses, and what it takes.

Masks whose arrays do not fit what they are used for, and masks of calls without elements.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import zeros
from test_bad_input import attention, good

import jax_memeff
from jax_memeff import Mask, Offsets, dot_product_attention

B, N, T, S = 2, 4, 16, 20
QUERY, KEY = zeros(B, T, N, 8), zeros(B, S, N, 8)

MISFITS = {
    "lengths": (
        Mask.lengths(key=np.array([1, 2, 3])),
        r"key lengths must have shape \[B\] = \[2\], got",
    ),
    "long": (
        Mask.lengths(key=np.array([1, 99])),
        r"key lengths must be in \[0, 20\], got 99 at index 1",
    ),
    "segments": (
        Mask.segments(np.zeros(5, int), np.zeros(S, int)),
        r"query segment ids must have shape \[2, 16\] or \[16\], got \(5,\)",
    ),
    "boolean": (
        Mask.boolean(np.ones((5, 7), bool)),
        r"mask must broadcast to \[B, N, T, S\] = \[2, 4, 16, 20\]",
    ),
    "lists": (
        Mask.kv_blocks(np.array([[0], [1]])),
        r"KV block indices must have shape \[2 or 1, 4 or 1, 1, n\]",
    ),
}


@pytest.mark.parametrize("field", ["top_left", "bottom_right"])
def test_windows_of_a_mask_are_windows(field):
    with pytest.raises(
        TypeError, match=rf"Mask\.{field} must be a Window or None, got 5; use Mask"
    ):
        Mask(**{field: 5})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("segment_ids", "ids"),
        ("segment_ids", [(np.zeros(5, int), np.zeros(7, int))]),
        ("segment_ids", ((np.zeros(5, int),),)),
        ("booleans", np.ones((5, 7), bool)),
        ("booleans", [np.ones((5, 7), bool)]),
        ("more_lengths", 5),
        ("more_lengths", (([3, 2],),)),
    ],
)
def test_arrays_of_a_mask_are_such_as_its_constructors_make(field, value):
    mask = Mask(**{field: value})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=rf"(?s)^Mask\.{field} must be .*; use Mask\."):
        attention(**good(), mask=mask)


@pytest.mark.parametrize("name", ["key_value_seq_lengths", "mask", "offsets"])
def test_keys_are_no_numbers(name):
    random_key = jax.random.key(0)
    value = {"mask": Mask(query_lengths=random_key), "offsets": Offsets(query=random_key)}
    arguments = {name: value.get(name, random_key)}
    with pytest.raises(TypeError, match=f"^{name} must hold numbers, got a random key"):
        jax_memeff.check(**good(), **arguments)
    with pytest.raises(TypeError, match=r"must be .*integer.*got dtype key"):
        attention(**good(), **arguments)


def test_lengths_of_a_mask_may_be_lists(assert_close):
    wanted = attention(**good(), mask=Mask.lengths(np.array([3, 2]), np.array([1, 7])))
    assert_close(attention(**good(), mask=Mask(query_lengths=[3, 2], key_lengths=(1, 7))), wanted)  # type: ignore[arg-type]


def test_device_lengths_are_clamped(assert_close):
    operands = {name: x + 1 for name, x in good().items()}
    lengths = {
        "query_seq_lengths": jnp.array([-3, 9]),
        "key_value_seq_lengths": jnp.array([100, -1]),
    }
    clamped = {
        "query_seq_lengths": jnp.array([0, 5]),
        "key_value_seq_lengths": jnp.array([7, 0]),
    }
    assert_close(
        attention(**operands, **lengths, return_residual=True),
        attention(**operands, **clamped, return_residual=True),
    )


@pytest.mark.quick
@pytest.mark.parametrize("invert", [False, True], ids=["", "not"])
@pytest.mark.parametrize("name", MISFITS)
def test_arrays_that_do_not_fit(name, invert):
    mask, message = MISFITS[name]
    mask = ~mask if invert else mask
    uses = [
        lambda: mask.blocks(QUERY, KEY),
        lambda: dot_product_attention(QUERY, KEY, KEY, mask=mask),
    ]
    if name != "long":  # it is clamped there
        uses.append(lambda: mask.as_array(B, N, T, S))
    for use in uses:
        with pytest.raises(ValueError, match=message):
            use()


def test_pictures_of_arrays_that_do_not_fit():
    # The batch and the heads of a picture are those of the mask.
    for name in ("segments", "boolean", "lists"):
        mask, message = MISFITS[name]
        expected = message.replace(r"\[2, 16\]", r"\[1, 16\]").replace("2, 4, ", "1, 1, ")
        with pytest.raises(ValueError, match=expected.replace("2 or 1, 4 or 1", "1, 1")):
            mask.picture(T, S)


ANYTHING: Any = "x"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda m: m.blocks(None, KEY), TypeError, "Mask.blocks: query must be an array, got None"),
        (lambda m: m.blocks(QUERY, "k"), TypeError, "Mask.blocks: key must be an array, got str"),
        (lambda m: m.blocks(QUERY, KEY[:1]), ValueError, "key must have the batch .* 2, got 1"),
        (lambda m: m.blocks(QUERY, KEY, ANYTHING), TypeError, "offsets must be jax_memeff.Offsets"),
        (
            lambda m: m.blocks(QUERY, KEY, Offsets(query=np.array([1, 2, 3]))),
            TypeError,
            r"offsets.query must be an int or an integer array of shape \(\) or \(2,\), got .* \(3",
        ),
        (lambda m: m.as_array(1, 1, -1, 4), ValueError, "T must be at least 0, got -1"),
        (lambda m: m.as_array(1, None, 4, 4), TypeError, "N must be a Python integer, got None"),
        (
            lambda m: m.as_array(1, 1, 4, 4, Offsets()),
            TypeError,
            r"position must be None or the re",
        ),
        (lambda m: m.as_array(1, 1, 4, 2**31), ValueError, "S must be at most 2147483647, got 214"),
        (lambda m: m.picture(4, tile=8), TypeError, r"tile must be \(rows, columns\), got 8"),
        (lambda m: m.picture(4, tile=(8,)), TypeError, r"tile must be \(rows, columns\), got \(8,"),
        (lambda m: m.picture(4, batch=2**31), ValueError, r"batch must be in .* got 2147483648"),
        (lambda m: m.picture(4, offsets=ANYTHING), TypeError, "offsets must be jax_memeff.Offsets"),
    ],
)
def test_wrong_arguments(use, error, message):
    with pytest.raises(error, match=message):
        use(Mask.function(lambda b, h, q, k: k <= q))


def masks_of(B: int, T: int, S: int) -> dict[str, Mask]:
    lists = np.zeros((1, 1, -(-T // 128), 2), int)
    ids = np.zeros((B, T), int), np.zeros((B, S), int)
    causal = Mask.causal()
    return {
        "lists": Mask.kv_blocks(lists),
        "boolean": Mask.boolean(np.ones((B, 1, T, S), bool)) | causal,
        "segments": ~Mask.segments(*ids),
        "lengths": Mask.lengths(query=np.zeros(B, int), key=np.zeros(B, int)) | causal,
    }


@pytest.mark.parametrize("sizes", [(0, 3, 5), (2, 0, 5), (2, 3, 0), (0, 0, 0)], ids=str)
def test_calls_without_elements(sizes):
    """JAX cannot index an empty array, not even in a program that never does it."""
    batch, rows, columns = sizes
    query = jnp.ones((batch, rows, 2, 8))
    key = value = jnp.ones((batch, columns, 2, 8))
    for name, mask in masks_of(*sizes).items():

        def gradients(query, key, value, mask=mask):
            def loss(*qkv):
                out, lse = dot_product_attention(*qkv, mask=mask, return_residual=True)
                return out.sum(), (out, lse)

            return jax.grad(loss, (0, 1, 2), has_aux=True)(query, key, value)

        found, (out, lse) = jax.jit(gradients)(query, key, value)
        assert not any(x.any() for x in (out, *found)), name
        assert out.shape == query.shape and (lse == -jnp.inf).all(), name
        blocked = jax.jit(lambda *arrays, mask=mask: mask.blocks(*arrays))(query, key)
        assert jax.jit(blocked.as_array, static_argnums=range(4))(batch, 2, rows, columns).size == 0


CASTS = {
    "bfloat16": lambda x: x.astype(jnp.bfloat16),
    "int32": lambda x: x.astype(jnp.int32),
    "rank": lambda x: jnp.stack([x, x]),
    "nothing": lambda x: None,
}


@pytest.mark.parametrize("name", CASTS)
def test_arrays_of_a_function_keep_the_types_that_it_was_traced_with(name):
    """Kernels would read memory of one dtype as another one, and beyond its end."""
    limits = jnp.arange(T) + 0.5
    mask = jax.tree.map(CASTS[name], Mask.function(lambda b, h, q, k: k < limits[q]))
    for made in (mask, Mask.causal() | mask):
        with pytest.raises(TypeError, match="an array that a mask function reads must be"):
            dot_product_attention(QUERY, KEY, KEY, mask=made)
    if name != "nothing":
        with pytest.raises(TypeError, match=r"float32 of rank 1.* do not cast or reshape"):
            jax.eval_shape(lambda mask: dot_product_attention(QUERY, KEY, KEY, mask=mask), mask)


def test_arrays_of_lists_and_windows_are_checked_again():
    """``jax.tree.map`` changes them after the constructors of masks have checked them."""
    lists = Mask.kv_blocks(np.zeros((1, 1, 1, 1), int), block_size=T)
    window = jax.jit(lambda left: Mask.window(left, 0))(jnp.int32(2))
    blocked = Mask.function(lambda b, h, q, k: k < 3).blocks(QUERY, KEY)
    for mask, said in (
        (lists, "KV block indices must be integers"),
        (window, "window left must be integers"),
        (blocked, "Mask.block_masks must be a tuple of uint8 arrays"),
    ):
        mask = jax.tree.map(lambda x: x.astype(jnp.float32), mask)
        with pytest.raises(TypeError, match=said):
            dot_product_attention(QUERY, KEY, KEY, mask=mask)
    for mask, said in ((lists, "KV block indices must have shape"), (window, "one integer, got")):
        mask = jax.tree.map(lambda x: jnp.stack([x] * 3), mask)
        with pytest.raises(ValueError, match=said):
            dot_product_attention(QUERY, KEY, KEY, mask=mask)
