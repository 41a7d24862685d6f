"""What MaxText and Levanter call, with every argument, against dense attention."""

import warnings
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal

from jax_memeff.clients import levanter
from jax_memeff.clients import maxtext as maxtext_client

B, T, K, G, H = 2, 12, 2, 3, 8
QUERY, KEY, VALUE = normal(0, B, T, K * G, H), normal(1, B, T, K, H), normal(2, B, T, K, H)
IDS = np.array([[1] * 5 + [2] * 5 + [0] * 2, [1] * 12], np.int32)
DISTANCE = np.arange(T)[:, None] - np.arange(T)


def dense(valid, *, scale=1.0, soft_cap=None, sinks=None, bias: Any = 0.0):
    """The output [B, T, N, H] and the logsumexp [B, N, T], with all scores in memory.

    ``valid`` and ``bias`` broadcast to [B, N, T, S].
    """
    key, value = np.repeat(KEY, G, 2), np.repeat(VALUE, G, 2)
    scores = np.einsum("btnh,bsnh->bnts", QUERY, key).astype(np.float64) * scale
    if soft_cap:
        scores = soft_cap * np.tanh(scores / soft_cap)
    exponentials = np.where(valid, np.exp(scores + bias), 0)
    total = exponentials.sum(-1, keepdims=True)
    if sinks is not None:
        total += np.exp(np.float64(sinks)).reshape(-1, 1, 1)
    out = np.einsum("bnts,bsnh->btnh", exponentials / np.where(total == 0, 1, total), value)
    with np.errstate(divide="ignore"):
        return out, np.log(total)[..., 0]


def attention_op(kind="global", **settings):
    """The attributes of MaxText's ``AttentionOp`` that the method reads."""
    defaults = {
        "attention_type": SimpleNamespace(value=kind),
        "attn_logits_soft_cap": None,
        "causal_block_size": None,
        "chunk_attn_window_size": None,
        "config": SimpleNamespace(moba=False, enable_dropout=True),
        "dropout_rate": 0.0,
        "rngs": None,
        "sliding_window_size": None,
        "_load_balanced_context_parallel": lambda: False,
    }
    return SimpleNamespace(**defaults | settings)


def maxtext(op, *arrays, mode="train", **arguments):
    """The output and the logsumexp of a call as ``AttentionOp`` makes it."""
    method: Any = maxtext_client.apply_attention_dot
    einsums: dict[str, Any] = dict.fromkeys(("qk_product_einsum", "wv_product_einsum"), jnp.einsum)
    out, largest, total = method(op, *arrays, mode, **arguments, **einsums)
    assert largest.shape == total.shape == (*out.shape[:-1], 1)
    return out / total, (largest + jnp.log(total))[..., 0].transpose(0, 2, 1)


SAME = IDS[:, None, :, None] == IDS[:, None, None, :]
AT = np.arange(T)
MAXTEXT: dict[str, tuple[dict[str, Any], np.ndarray]] = {
    "global": ({}, DISTANCE >= 0),
    "mla": ({}, DISTANCE >= 0),
    "local_sliding": ({"sliding_window_size": 4}, (DISTANCE >= 0) & (DISTANCE < 4)),
    "chunk": (
        {"chunk_attn_window_size": 5},
        (DISTANCE >= 0) & (AT[:, None] // 5 == AT // 5),
    ),
    "full": ({}, DISTANCE < T),
    "block_diffusion": ({"causal_block_size": 4}, AT[:, None] // 4 >= AT // 4),
}


@pytest.mark.parametrize("kind", MAXTEXT)
def test_maxtext_training(kind, assert_close):
    settings, valid = MAXTEXT[kind]
    op = attention_op(kind, attn_logits_soft_cap=5.0, **settings)
    got = jax.jit(lambda *arrays: maxtext(op, *arrays))(QUERY, KEY, VALUE, IDS)
    assert_close(got, dense(valid & SAME, soft_cap=5.0))


@pytest.mark.parametrize("dtype", [bool, np.int32])
def test_maxtext_images_sinks_and_recorded_scores(dtype, assert_close):
    """Tokens of one image attend to each other, across documents, too, as in MaxText."""
    images = np.array([[0, 1, 1, 1, 0, 0, 2, 2, 0, 0, 3, 0], [1, 1, 0, 2, 2, 2, 2, 0, 0, 0, 0, 3]])
    same = (images[:, :, None] == images[:, None]) & (images[:, None] > 0)
    sinks = np.linspace(-1, 2, K * G, dtype=np.float32)
    op = attention_op()
    got = maxtext(
        op,
        *(QUERY, KEY, VALUE, IDS),
        bidirectional_mask=(images > 0).astype(dtype),
        sinks=sinks,
        record_max_logits=True,
    )
    valid = (DISTANCE >= 0) & SAME | same[:, None]
    assert_close(got, dense(valid, sinks=sinks))
    scores = np.einsum("btnh,bsnh->bnts", QUERY, np.repeat(KEY, G, 2))
    largest = np.where(valid, scores, -np.inf).max((2, 3))
    assert_close(op.max_logits.get_value(), largest)


@pytest.mark.parametrize("kind", ["global", "local_sliding", "chunk", "block_diffusion"])
def test_maxtext_prefill_in_chunks(kind, assert_close):
    settings, valid = MAXTEXT[kind]
    chunk = (QUERY[:, 7:], KEY, VALUE, IDS)
    out, lse = maxtext(
        attention_op(kind, **settings), *chunk, mode="prefill", previous_chunk=KEY[:, :7]
    )
    expected, statistics = dense(valid & SAME)
    assert_close((out, lse), (expected[:, 7:], statistics[..., 7:]))


def test_maxtext_ids_of_the_keys_and_a_sparse_indexer(assert_close):
    key_ids, kept = np.roll(IDS, 1, 1), DISTANCE % 3 != 2
    indexer = np.where(kept, 0, np.finfo(np.float32).min).astype(np.float32)[None].repeat(B, 0)
    got = maxtext(
        attention_op("full"),
        *(QUERY, KEY, VALUE, IDS),
        decoder_segment_ids_kv=key_ids,
        indexer_mask=indexer,
    )
    assert_close(got, dense(kept & (IDS[:, None, :, None] == key_ids[:, None, None])))


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "compressed": ({"kind": "compressed"}, {}, "known attention type, got 'compressed'"),
    "compressed mask": ({}, {"compressed_mask": KEY}, "compressed_mask"),
    "moba": ({"config": SimpleNamespace(moba=True)}, {}, "moba"),
    "context parallelism": (
        {"_load_balanced_context_parallel": lambda: True},
        {"segment_positions": AT},
        "segment_positions of load-balanced context parallelism",
    ),
    "image in a chunk": ({}, {"bidirectional_mask": np.ones((B, 5), int)}, "bidirectional_mask in"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_maxtext_has_and_the_adapter_has_not_is_refused(case):
    settings, arguments, message = REFUSED[case]
    with pytest.raises(NotImplementedError, match=message):
        maxtext(attention_op(**settings), QUERY, KEY, VALUE, IDS, **arguments)


def test_maxtext_without_documents(assert_close):
    positions = np.broadcast_to(AT, (B, T))  # plain positions change nothing
    got = maxtext(attention_op(), QUERY, KEY, VALUE, None, segment_positions=positions)
    assert_close(got, dense(DISTANCE >= 0))


@pytest.mark.parametrize("kind", MAXTEXT)
def test_maxtext_decoding(kind, assert_close):
    """Ids of 1 mark the used slots; the row is at the last slot; an empty cache gives nothing."""
    settings, valid = MAXTEXT[kind]
    decoded = {"local_sliding", "chunk"}
    used = np.array([[1] * 11 + [0], [0] * 12], np.int32)
    out, lse = maxtext(
        attention_op(kind, **settings), QUERY[:, :1], KEY, VALUE, used, mode="autoregressive"
    )
    seen = (AT < 11) & (valid[-1:] if kind in decoded else True)
    expected, statistics = dense(seen)
    assert_close(out[0], expected[0, :1])
    assert_close(lse[0], statistics[0, :, :1])
    assert np.isneginf(lse[1]).all() and not out[1].any()


def test_maxtext_dropout_draws_a_key(assert_close):
    drawn = []
    op = attention_op(
        dropout_rate=0.5, rngs=SimpleNamespace(dropout=lambda: drawn.append(1) or jax.random.key(0))
    )
    dropped, kept = (
        maxtext(op, QUERY, KEY, VALUE, IDS, mode=mode)[0] for mode in ("train", "prefill")
    )
    assert len(drawn) == 1 and not np.allclose(dropped, kept)
    op.config.enable_dropout = False
    assert_close(maxtext(op, QUERY, KEY, VALUE, IDS)[0], kept)


def test_maxtext_quantized_caches_are_read_as_numbers(assert_close):
    class Quantized:
        """A ``KVTensor`` of MaxText: whole numbers and their scale."""

        def dequant(self):
            return VALUE

    got = maxtext(attention_op(), QUERY, KEY, Quantized(), IDS)
    assert_close(got, dense((DISTANCE >= 0) & SAME))


@pytest.mark.rotating(3)
@pytest.mark.parametrize("kind", MAXTEXT)
def test_every_maxtext_call_has_a_kernel(kind, monkeypatch, fake_compiler):
    """Training with images and sinks, a chunk of a prefill, and a step of decoding."""
    monkeypatch.setenv("JAX_MEMEFF_ARCHS", "sm_80,sm_90a")
    query, key, value = (jnp.zeros((B, 256, heads, 64), jnp.bfloat16) for heads in (K * G, K, K))
    ids = jnp.ones((B, 256), jnp.int32)
    op = attention_op(kind, **MAXTEXT[kind][0], attn_logits_soft_cap=5.0)

    def train(query, key, value):
        settings: dict[str, Any] = {"bidirectional_mask": ids, "sinks": jnp.zeros(K * G)}
        return maxtext(op, query, key, value, ids, **settings)[0].astype(jnp.float32).sum()

    def chunk(query, key, value):
        return maxtext(
            op, query[:, 200:], key, value, ids, mode="prefill", previous_chunk=key[:, :200]
        )

    def step(query, key, value):
        return maxtext(op, query[:, :1], key, value, ids, mode="autoregressive")

    for call, kernels in ((jax.grad(train, (0, 1, 2)), 2), (chunk, 1), (step, 1)):
        traced = jax.jit(call).trace(query, key, value)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("custom_call @jax_memeff_") >= kernels


@pytest.fixture
def haliax():
    """The named arrays of Levanter, which use names that Equinox deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("haliax", reason="needs the extra clients")


def levanter_mask(**fields):
    """Levanter's ``AttentionMask``: conditions that must all hold."""
    defaults = dict.fromkeys(("causal_offset", "explicit_mask", "segment_ids", "sliding_window"))
    return SimpleNamespace(**{"is_causal": False} | defaults | fields)


def test_levanter(haliax, assert_close):
    sizes = {"batch": B, "position": T, "kv_head": K, "q_heads_per_group": G, "head_size": H}
    axes = {name: haliax.Axis(name, size) for name, size in sizes.items()}
    batch, position, kv_head, group, depth = axes.values()
    key_position = haliax.Axis("key_position", T)

    def named(array, *axes):
        return haliax.named(np.reshape(array, [axis.size for axis in axes]), axes)

    query = named(QUERY, batch, position, kv_head, group, depth)
    # The keys have another order, as a cache may.
    key = named(KEY, batch, key_position, kv_head, depth).rearrange(("batch", "kv_head", ...))
    value = named(VALUE, batch, key_position, kv_head, depth)
    attention = levanter.dot_product_attention

    def run(mask=None, **arguments):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = attention(
                "position", "key_position", "head_size", query, key, value, mask, **arguments
            )
        assert [axis.name for axis in out.axes] == list(sizes)
        return out.array.reshape(B, T, K * G, H)

    scale = H**-0.5
    sinks = np.linspace(-1, 2, K * G, dtype=np.float32)
    mask = levanter_mask(is_causal=True, sliding_window=6, segment_ids=named(IDS, batch, position))
    got = run(mask, logits_soft_cap=4.0, scaling_factor=0.5, attn_sink=named(sinks, kv_head, group))
    want, _ = dense((DISTANCE >= 0) & (DISTANCE < 6) & SAME, scale=0.5, soft_cap=4.0, sinks=sinks)
    assert_close(got, want)

    keys = np.arange(T) % 3 != 1
    pair = (named(IDS[0], position), named(IDS[0] * 0 + 1, position))
    mask = levanter_mask(
        is_causal=True,
        causal_offset=haliax.named(2, ()),
        explicit_mask=named(keys, key_position),
        segment_ids=pair,
    )
    want, _ = dense(keys & (DISTANCE >= -2) & (IDS[0][:, None] == 1), scale=scale)
    assert_close(run(mask), want)
    assert not want[:, 5:].any()

    # Fields that only some versions have: prefixes and a window on both sides.
    lengths, flags = np.array([3, 5], np.int32), np.arange(T) % 5 == 0
    mask = levanter_mask(
        is_causal=True,
        sliding_window=4,
        prefix_length=2,
        prefix_lengths=named(lengths, batch),
        prefix_mask=named(flags, position),
    )
    prefix = (np.arange(T) < np.maximum(lengths, 2)[:, None, None, None]) | flags
    want, _ = dense((DISTANCE >= 0) & (DISTANCE < 4) | prefix, scale=scale)
    assert_close(run(mask), want)
    mask = levanter_mask(prefix_length=3)
    assert_close(run(mask), dense(np.arange(T) < 3, scale=scale)[0])
    assert_close(
        run(levanter_mask(bidirectional_window=2)), dense(abs(DISTANCE) <= 2, scale=scale)[0]
    )
    offsets = np.array([1, -3], np.int32)
    mask = levanter_mask(is_causal=True, causal_offset=named(offsets, batch))
    want, _ = dense(DISTANCE + offsets[:, None, None, None] >= 0, scale=scale)
    assert_close(run(mask), want)

    for unknown in ({"alibi": 1}, {"alibi": 1, "prefix_length": 3}):
        with pytest.raises(NotImplementedError, match=r"known fields, got \['alibi'\]"):
            run(levanter_mask(**unknown))
    numbers = named((DISTANCE >= 0).astype(np.float32) * 0.5, position, key_position)
    for mask in (numbers, levanter_mask(explicit_mask=numbers)):
        assert_close(run(mask), dense(DISTANCE >= 0, scale=scale)[0])

    bias = normal(5, K, T, T)
    got = run(
        named(DISTANCE >= 0, position, key_position),
        bias=named(bias, kv_head, position, key_position),
    )
    assert_close(got, dense(DISTANCE >= 0, scale=scale, bias=np.repeat(bias, G, 0))[0])

    prng = jax.random.key(0)
    assert not np.allclose(run(dropout=0.5, inference=False, prng=prng), run())
    assert_close(run(dropout=0.5, prng=prng), run())
    with pytest.raises(ValueError, match="dropout needs prng, got None"):
        run(dropout=0.5, inference=False)
    assert run().dtype == jnp.float32
