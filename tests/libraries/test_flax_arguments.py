"""No argument of Flax is ignored in silence: each changes the program, or an error names it."""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from flax import linen, nnx
from jax.nn import initializers

import jax_memeff.flax
from jax_memeff import UnsupportedError
from jax_memeff.flax import attention_fn

OURS = jax_memeff.flax
B, T, N, H = 2, 5, 4, 8
X = normal(0, B, T, N * H)
HEADS = X.reshape(B, T, N, H)
KEY = jax.random.key(0)
MASK = np.tri(T, dtype=bool)[None, None]
DROPOUT = {"dropout_rate": 0.5, "deterministic": False}


def halved(arrays, dtype=None):
    """A function to promote dtypes that differs from Flax's."""
    return tuple(None if x is None else x.astype(jnp.bfloat16) for x in arrays)


def dot_general(*arguments, **settings):
    return -jax.lax.dot_general(*arguments, **settings)


def product(*arguments, **settings):
    raise AssertionError("a product that is refused runs")


NO_EFFECT = {"force_fp32_for_softmax"}
"""The softmax is always in float32."""

BASE: dict[str, dict[str, Any]] = {
    "attention_fn": {**DROPOUT, "dropout_rng": KEY},
    "linen fields": DROPOUT,
    "linen call": {"deterministic": False, "dropout_rng": KEY},
    "nnx constructor": {**DROPOUT, "decode": False},
    "nnx call": {},
}
"""The arguments to which a test adds one or changes one."""

CHANGES: dict[str, dict[str, Any]] = {
    "attention_fn": {
        "query": HEADS[:, :3],
        "key": 2 * HEADS,
        "value": HEADS[..., :4],
        "bias": normal(1, T, T),
        "mask": MASK,
        "broadcast_dropout": False,
        "dropout_rng": jax.random.key(1),
        "dropout_rate": 0.25,
        "deterministic": True,
        "dtype": jnp.bfloat16,
        "precision": "default",
        "module": object(),
        "is_causal": True,
        "promote_dtype": halved,
        "force_fp32_for_softmax": True,
        **dict.fromkeys(("einsum_dot_general", "qk_attn_weights_einsum"), product),
        "attn_weights_value_einsum": product,
    },
    "linen fields": {
        "num_heads": 8,
        "dtype": jnp.bfloat16,
        "param_dtype": jnp.bfloat16,
        "qkv_features": 16,
        "out_features": 16,
        "broadcast_dropout": False,
        "dropout_rate": 0.25,
        "deterministic": True,
        "precision": "highest",
        **dict.fromkeys(("kernel_init", "out_kernel_init"), initializers.ones),
        **dict.fromkeys(("bias_init", "out_bias_init"), initializers.ones),
        "use_bias": False,
        "attention_fn": linen.dot_product_attention,
        "decode": True,
        "normalize_qk": True,
        "force_fp32_for_softmax": True,
        **dict.fromkeys(("qkv_dot_general", "out_dot_general"), dot_general),
        **dict.fromkeys(
            ("qkv_dot_general_cls", "out_dot_general_cls"), lambda: functools.partial(dot_general)
        ),
        **dict.fromkeys(
            ("qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls"), lambda: product
        ),
    },
    "linen call": {
        "inputs_q": X[:, :3],
        "inputs_k": 2 * X,
        "inputs_v": 2 * X,
        "inputs_kv": 2 * X,
        "mask": MASK,
        "deterministic": True,
        "dropout_rng": jax.random.key(1),
        "sow_weights": True,
    },
    "nnx constructor": {
        "num_heads": 8,
        "in_features": 16,
        "qkv_features": 16,
        "out_features": 16,
        "num_kv_heads": 2,
        "in_kv_features": 16,
        "dtype": jnp.bfloat16,
        "param_dtype": jnp.bfloat16,
        "broadcast_dropout": False,
        "dropout_rate": 0.25,
        "deterministic": True,
        "precision": "highest",
        "use_bias": False,
        "decode": True,
        **dict.fromkeys(("kernel_init", "out_kernel_init"), initializers.ones),
        **dict.fromkeys(("bias_init", "out_bias_init"), initializers.ones),
        "attention_fn": nnx.dot_product_attention,
        "normalize_qk": True,
        "keep_rngs": False,
        **dict.fromkeys(("qkv_promote_dtype", "out_promote_dtype"), halved),
        **dict.fromkeys(("qkv_dot_general", "out_dot_general"), dot_general),
        **dict.fromkeys(
            ("qkv_dot_general_cls", "out_dot_general_cls"), lambda: functools.partial(dot_general)
        ),
        "rngs": 1,  # a seed: a stream belongs to the trace in which it is made
    },
    "nnx call": {
        "inputs_q": X[:, :3],
        "inputs_k": 2 * X,
        "inputs_v": 2 * X,
        "mask": MASK,
        "deterministic": True,
        "rngs": 1,
        "sow_weights": True,
        "decode": True,
        "is_causal": True,
        "input_positions": jnp.arange(T),
    },
}


def run_attention_fn(**arguments):
    operands = {name: arguments.pop(name, HEADS) for name in ("query", "key", "value")}
    return attention_fn(**operands, **arguments)


def run_linen(fields, arguments):
    layer = OURS.linen.MultiHeadAttention(**{"num_heads": N, **fields})
    rngs = {"params": KEY, "dropout": jax.random.key(2)}
    return layer.init_with_output(rngs, **{"inputs_q": X, **arguments})


def run_nnx(settings, arguments):
    settings = {"num_heads": N, "in_features": N * H, "rngs": 0, **settings}
    layer = OURS.nnx.MultiHeadAttention(**{**settings, "rngs": nnx.Rngs(settings["rngs"])})
    if "rngs" in arguments:
        arguments = {**arguments, "rngs": nnx.Rngs(dropout=arguments["rngs"])}
    return layer(**{"inputs_q": X, **arguments}), nnx.to_pure_dict(nnx.state(layer))


RUN: dict[str, Any] = {
    "attention_fn": run_attention_fn,
    "linen fields": lambda **fields: run_linen(fields, {}),
    "linen call": lambda **arguments: run_linen({"dropout_rate": 0.5}, arguments),
    "nnx constructor": lambda **settings: run_nnx(settings, {}),
    "nnx call": lambda **arguments: run_nnx({**DROPOUT, "decode": False}, arguments),
}
ORIGINALS: dict[str, tuple[Any, ...]] = {
    "attention_fn": (linen.dot_product_attention, nnx.dot_product_attention),
    "linen fields": (linen.MultiHeadDotProductAttention,),
    "linen call": (linen.MultiHeadDotProductAttention.__call__,),
    "nnx constructor": (nnx.MultiHeadAttention.__init__,),
    "nnx call": (nnx.MultiHeadAttention.__call__,),
}
ELSEWHERE = {"self", "parent", "name", "out_sharding", "qkv_sharding", "ln_promote_dtype"}
"""Sharding has tests of its own (test_flax_sharding.py); Flax's constructor uses the last one."""


def arguments_of_flax(door):
    """The arguments of the installed Flax; its constructor stores metadata with its parameters."""
    names = [name for call in ORIGINALS[door] for name in inspect.signature(call).parameters]
    return {name for name in names if not name.endswith("_metadata")} - ELSEWHERE


@pytest.mark.quick
@pytest.mark.parametrize("door", CHANGES)
def test_every_argument_of_flax_has_a_case(door):
    missing = arguments_of_flax(door) - set(CHANGES[door])
    assert not missing, f"add a changed value of {missing} to CHANGES"


def program(door, arguments):
    """The program of a call, and its constants."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # inputs_kv
        made = jax.make_jaxpr(lambda: RUN[door](**arguments))()
    text = re.sub(r" at 0x\w+", "", str(made))
    keys = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in made.consts]
    arrays = [
        jax.random.key_data(x) if is_key else x for x, is_key in zip(made.consts, keys, strict=True)
    ]
    return text, [np.asarray(x).tobytes() for x in arrays]


@functools.cache
def unchanged(door):
    """The program of ``BASE``, which two calls give alike."""
    first, second = (program(door, BASE[door]) for _ in range(2))
    assert first == second
    return first


@pytest.mark.rotating(3)
@pytest.mark.parametrize("door, name", [(door, name) for door in CHANGES for name in CHANGES[door]])
def test_no_argument_of_flax_is_ignored(door, name):
    try:
        changed = program(door, {**BASE[door], name: CHANGES[door][name]})
    except (UnsupportedError, TypeError, ValueError) as error:
        assert name in str(error)
    else:
        assert (changed == unchanged(door)) == (name in NO_EFFECT)
