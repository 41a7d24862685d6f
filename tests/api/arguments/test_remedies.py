"""Messages about arguments that other libraries take in another form say what to pass instead."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal, zeros
from flax import nnx
from test_bad_input import B, H, N, S, T, attention, good, refuse

import jax_memeff
import jax_memeff.flax
from jax_memeff import Mask, Offsets


class Foreign:
    """An array of another library."""

    def __array__(self) -> np.ndarray:
        return np.zeros(3)


class Exchanged(Foreign):
    def __dlpack__(self) -> Any:
        raise NotImplementedError


PADDING = zeros(B, S, dtype=bool)

# As in test_bad_input.py.
CASES = {
    "flash_causal_window": (
        {"local_window_size": (-1, 0)},
        ValueError,
        r"local_window_size must be >= 0 on both sides, got \(-1, 0\); if -1 means no bound, as in "
        r"FlashAttention, pass mask=jax_memeff.Mask.window\(None, 0\)$",
    ),
    "flash_no_window": (
        {"local_window_size": (-1, -1)},
        ValueError,
        r"got \(-1, -1\); pass None for no window$",
    ),
    "flash_one_number": ({"local_window_size": -1}, ValueError, "got -1; pass None for no window$"),
    "shifted_window": (
        {"local_window_size": (4, -2)},
        ValueError,
        r"got \(4, -2\); pass mask=jax_memeff.Mask.window\(4, -2\), whose bounds may be negative$",
    ),
    "open_window": (
        {"local_window_size": (None, 0)},
        TypeError,
        r"got \(None, 0\); for a side without bound pass mask=jax_memeff.Mask.window\(None, 0\)$",
    ),
    "array_window": (
        {"local_window_size": np.array([3, 0])},
        TypeError,
        r"local_window_size must be .*, got an array of shape \(2,\); pass a tuple$",
    ),
    "mask_of_keys": (
        {"mask": PADDING},
        ValueError,
        r"mask must broadcast to .*, got shape \(2, 7\); if its dims are \[B, S\], pass "
        r"mask\[:, None, None, :\]$",
    ),
    "mask_without_heads": (
        {"mask": zeros(B, T, S, dtype=bool)},
        ValueError,
        r"got shape \(2, 5, 7\); if its dims are \[B, T, S\], pass mask\[:, None\]$",
    ),
    "mask_of_keys_of_rank_3": (
        {"mask": zeros(B, 1, S, dtype=bool)},
        ValueError,
        r"got shape \(2, 1, 7\); if its dims are \[B, T, S\], pass mask\[:, None\]$",
    ),
    "bias_of_keys": (
        {"bias": zeros(B, S)},
        ValueError,
        r"bias must broadcast to .*; if its dims are \[B, S\], pass bias\[:, None, None, :\]$",
    ),
    "bias_without_heads": (
        {"bias": zeros(B, T, S)},
        ValueError,
        r"if its dims are \[B, T, S\], pass bias\[:, None\]$",
    ),
    "mask_of_other_sizes": (
        {"mask": zeros(T, S + 1, dtype=bool)},
        ValueError,
        r"mask must broadcast to .*, got shape \(5, 8\)$",
    ),
    "class_mask": (
        {"mask": Mask},
        TypeError,
        r"mask must be .*, got the class Mask; pass mask=jax_memeff.Mask.causal\(\), for example$",
    ),
    "mask_not_called": (
        {"mask": Mask.causal},
        TypeError,
        r"got Mask.causal, which was not called; pass mask=jax_memeff.Mask.causal\(...\)$",
    ),
    "method_not_called": (
        {"mask": Mask().blocks},
        TypeError,
        r"got Mask.blocks, which was not called; pass mask=jax_memeff.Mask.blocks\(...\)$",
    ),
    "function_mask": (
        {"mask": lambda b, h, q, k: q >= k},
        TypeError,
        r"got a function; pass mask=jax_memeff.Mask.function\(function\)$",
    ),
    "bias_is_a_mask": (
        {"bias": Mask.causal()},
        TypeError,
        "bias must be an array to add to the scores, got a Mask; pass it as mask$",
    ),
    "bias_is_a_function": (
        {"bias": lambda s, b, h, q, k: s},
        TypeError,
        "bias must be an array to add to the scores, got a function; pass it as score_mod$",
    ),
    "bias_is_a_rate": (
        {"bias": 0.1},
        TypeError,
        "got the number 0.1; pass it as dropout_rate, if it is one$",
    ),
    "seed_as_key": (
        {"dropout_key": 0, "dropout_rate": 0.5},
        TypeError,
        r"dropout_key must be a jax.random key, got int; pass jax.random.key\(0\)$",
    ),
    "streams_as_key": (
        {"dropout_key": nnx.Rngs(0), "dropout_rate": 0.5},
        TypeError,
        r"dropout_key must be a jax.random key, got Rngs; pass jax.random.key\(seed\)$",
    ),
    "rate_1": (
        {"dropout_rate": 1.0},
        ValueError,
        r"dropout_rate must be in \[0, 1\), got 1.0; the largest rate is 0.99609375, and 0.0 drops "
        "nothing$",
    ),
    "negative_rate": ({"dropout_rate": -0.5}, ValueError, "got -0.5; the largest rate is"),
    "number_as_offsets": (
        {"offsets": 3},
        TypeError,
        r"offsets must be jax_memeff.Offsets or None, got 3 of type int; pass "
        r"jax_memeff.Offsets\(query=..., key=...\)$",
    ),
    "query_of_rank_5": (
        {"query": zeros(1, B, T, N, H)},
        ValueError,
        r"query must have shape .* got shape \(1, 2, 5, 4, 8\); merge its leading dims with "
        r"query.reshape, or map over them with jax.vmap$",
    ),
    "bias_of_rank_5": (
        {"bias": zeros(1, B, N, T, S)},
        ValueError,
        r"bias must have rank <= 4, got rank 5: shape \(1, 2, 4, 5, 7\); merge its leading dims "
        r"with bias.reshape\(-1, 4, 5, 7\)$",
    ),
    "array_scale": (
        {"scale": np.ones(N)},
        TypeError,
        r"scale must be one number, got an array of shape \(4,\); .*one scale per head use score_m",
    ),
    "padding_as_lengths": (
        {"key_value_seq_lengths": PADDING},
        TypeError,
        r"key_value_seq_lengths must be integers, got dtype bool; .*, pass it as mask, of shape",
    ),
    "lengths_of_rank_2": (
        {"key_value_seq_lengths": np.ones((B, 1), int)},
        ValueError,
        r"must have shape \[B\] = \[2\], got shape \(2, 1\); reshape it to \[2\]$",
    ),
    "one_length": (
        {"query_seq_lengths": 3},
        ValueError,
        r"got shape \(\); pass jnp.full\(2, length\)$",
    ),
    "starts_as_lengths": (
        {"query_seq_lengths": np.array([0, 3, 5])},
        ValueError,
        r"got shape \(3,\); starts of packed sequences are arguments of varlen_attention and",
    ),
    "array_of_another_library": (
        {"key": Foreign()},
        TypeError,
        r"key must be an array, got Foreign; pass jnp.asarray\(key\)$",
    ),
    "tensor_of_another_library": (
        {"bias": Exchanged()},
        TypeError,
        r"bias must be an array, got Exchanged; pass jax.dlpack.from_dlpack\(bias\)$",
    ),
    "shape": (
        {"query": jax.ShapeDtypeStruct((B, T, N, H), "float32")},
        TypeError,
        "query must be an array, got ShapeDtypeStruct; trace the call with jax.eval_shape",
    ),
    "number_as_flag": ({"is_causal": 1}, TypeError, r"got 1; pass bool\(is_causal\)$"),
    "array_as_flag": ({"is_causal": jnp.array(True)}, TypeError, r"; pass bool\(is_causal\)$"),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", CASES)
def test_a_remedy(name):
    refuse(*CASES[name])


def test_padded_tokens():
    x, starts = zeros(B, T, N, H), np.array([0, T])
    message = r"query must have shape \[total_q, N, H\].*; padded sequences need dot_product_atten"
    with pytest.raises(ValueError, match=message):
        jax_memeff.varlen_attention(x, x, x, starts, starts, T, T)


def test_traced_flags():
    def call(name, value):
        return attention(**good(), **{name: value})

    for name, remedy in (
        ("is_causal", r"make it static.*or pass mask=jax_memeff.Mask.window\(None, bound\), whose"),
        ("deterministic_backward", r"make it static \(jax.jit's static_argnames helps\)"),
    ):
        with pytest.raises(TypeError, match=f"{name} must be True or False, .*traced.*; {remedy}"):
            jax.jit(call, static_argnums=0)(name, True)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_remedy_for_a_traced_flag(is_causal, assert_close):
    @jax.jit
    def call(is_causal):
        return attention(
            **{name: x + 1 for name, x in good().items()},
            mask=Mask.window(None, jnp.where(is_causal, 0, 2**30)),
        )

    wanted = attention(**{name: x + 1 for name, x in good().items()}, is_causal=is_causal)
    assert_close(call(is_causal), wanted)


IN_PYTORCH = "if yours are [B, N, T, H], as in PyTorch, pass jnp.swapaxes(x, 1, 2) of each"


def test_the_layout_of_pytorch():
    """Named in messages about shapes that would fit there, and in no others."""

    def message(query, key, **arguments):
        with pytest.raises(ValueError, match=r"got") as raised:
            attention(zeros(*query), zeros(*key), zeros(*key), **arguments)
        return str(raised.value)

    query, key = (2, 4, 5, 8), (2, 2, 7, 8)  # [B, N, T, H] and [B, K, S, H]
    assert message(query, key).endswith(IN_PYTORCH)
    same = (2, 4, 5, 8)
    assert message(same, same, mask=zeros(5, 5, dtype=bool)).endswith(IN_PYTORCH)
    assert message(same, same, bias=zeros(2, 4, 5, 5)).endswith(IN_PYTORCH)
    assert IN_PYTORCH not in message((2, 5, 4, 8), (2, 7, 3, 8))
    assert IN_PYTORCH not in message((2, 5, 4, 8), (2, 5, 4, 8), bias=zeros(6, 6))


def test_three_dims_that_fit_two_readings(assert_close):
    """[B, T, S] and [N, T, S] mean different things."""
    same = 3
    query, key = normal(0, same, T, same, H), normal(1, same, S, same, H)
    valid = np.random.default_rng(2).random((same, T, S)) < 0.8

    def call(mask, **arguments):
        return attention(query, key, key, mask=mask, **arguments)

    message = (
        "mask must have four dims if the first of three may be B or N, which are both 3 here, got "
        "shape (3, {}, 7) for [B, N, T, S] = [3, 3, 5, 7]; pass mask[:, None] if it is B, "
        "mask[None] if it is N"
    )
    for rows in (T, 1):
        with pytest.raises(ValueError, match=re.escape(message.format(rows))):
            call(valid[:, :rows])
    by_head, by_batch = call(valid[None]), call(valid[:, None])
    assert_close(by_head[:1], attention(query[:1], key[:1], key[:1], mask=valid))
    own = query[:, :, :1], key[:, :, :1], key[:, :, :1]
    assert_close(by_batch[:, :, :1], attention(*own, mask=valid[:, None]))
    assert_close(call(valid[:1]), call(valid[0]))
    assert_close(call(None, bias=jnp.where(valid, 0.0, -jnp.inf)), by_head)


def test_three_dims_of_other_functions():
    valid, x = np.ones((N, T, T), bool), zeros(N, T, N, H)
    starts = T * np.arange(N + 1)
    tokens = x.reshape(-1, N, H)
    packed = tokens, tokens, tokens, starts, starts
    for call in (
        lambda: jax_memeff.varlen_attention(*packed, T, T, mask=valid),
        lambda: jax_memeff.dot_product_attention_packed(zeros(N, T, 3, N, H), mask=valid),
        lambda: Mask.boolean(valid).as_array(N, N, T, T),
        lambda: attention(x, x, x, mask=Mask.causal() & ~Mask.boolean(valid)),
    ):
        with pytest.raises(ValueError, match="mask must have four dims"):
            call()


def test_jax_nn_reads_three_dims_by_heads(assert_close):
    """Under the patch, so do we."""
    same = 3
    x, bias = normal(0, same, T, same, H), normal(1, same, T, T)
    want = jax.nn.dot_product_attention(x, x, x, bias)
    with jax_memeff.patch_jax_nn():
        assert_close(jax.nn.dot_product_attention(x, x, x, bias), want)


@pytest.mark.parametrize("length", [Mask.lengths, lambda key: Mask.segments(key, key)])
def test_one_number_is_no_array_of_a_mask(length):
    with pytest.raises(ValueError, match=r"got shape \(\); pass one for each batch index or token"):
        length(key=5)


def test_offsets_of_a_ring(assert_close):
    mesh = jax.make_mesh((1,), ("ring",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()

    def call(offset):
        def local(x):
            return jax_memeff.ring_attention(x, x, x, axis_name="ring", offsets=offset)

        return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)(zeros(1, T, N, H))

    with pytest.raises(ValueError, match=r"offsets.query: .*got an array of shape \(\); leave it"):
        call(Offsets(query=jnp.int32(0)))


def test_a_mask_as_the_bias_of_flax():
    x = zeros(B, T, N, H)
    with pytest.raises(TypeError, match=r"bias must be an array .*, got a Mask; pass it as mask"):
        jax_memeff.flax.attention_fn(x, x, x, bias=Mask.causal())  # type: ignore[arg-type]
