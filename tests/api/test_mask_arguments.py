"""Masks, lengths and positions as arguments: what a call refuses, and what it takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_bad_input import attention, good

import jax_memeff
from jax_memeff import Mask, Offsets


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
