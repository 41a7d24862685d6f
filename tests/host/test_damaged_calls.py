"""Damaged and edited attributes, and other buffers, are errors: never signals or launches.

Hazard: an exported program is a file, which may be damaged, or made by another version. Here the
host library runs in a separate process under sanitizers, on the buffers that XLA would pass.
"""

from __future__ import annotations

import copy
import functools
import os
import shutil
from typing import Any

import handlers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_memeff
from jax_memeff import Mask, _ffi
from jax_memeff._cuda import custom_call

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

B, T, S, N, K, H = 2, 96, 130, 4, 2, 64
ATTENTION: Any = jax_memeff.dot_product_attention
VARLEN: Any = jax_memeff.varlen_attention
PAGED: Any = jax_memeff.paged_attention


def shape(*sizes, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def operands(dtype="bfloat16", H=H, T=T):
    return [shape(B, length, heads, H, dtype=dtype) for length, heads in ((T, N), (S, K), (S, K))]


def loss(*arrays, **options):
    return ATTENTION(*arrays, **options).astype(jnp.float32).sum()


def masked(query, key, value, bias, lengths, ids, key_ids, boolean, dropout_key):
    mask = Mask.lengths(lengths, lengths) & Mask.segments(ids, key_ids) & Mask.boolean(boolean)
    out = ATTENTION(
        query,
        key,
        value,
        bias,
        mask=mask & Mask.causal("bottom_right"),
        dropout_rate=0.2,
        dropout_key=dropout_key,
        logits_soft_cap=3.0,
    )
    return out.astype(jnp.float32).sum()


def packed(query, key, value, starts):
    out = VARLEN(query, key, value, starts, starts, 20, 20, is_causal=True)
    return out.astype(jnp.float32).sum()


def paged(query, *arrays):
    *pages, starts = arrays if query.ndim == 3 else (*arrays, None)
    return PAGED(
        query, *pages, query_starts=starts, max_query_length=None if starts is None else 64
    )


def latent(query, pages, table, lengths):
    return PAGED(query, pages, None, table, lengths, value_dim=512, batch_invariant=True)


def positioned(query, key, value, first):
    return loss(query, key, value, is_causal=True, offsets=jax_memeff.Offsets(query=first))


def qkv_packed(qkv):
    return jax_memeff.dot_product_attention_packed(qkv).astype(jnp.float32).sum()


def mapped(queries, key, value, bias):
    return jax.vmap(lambda query: loss(query, key, value, bias=bias))(queries).sum()


def tangents(query, key, value, *directions):
    """Tangents of the first arguments."""
    moving = (query, key, value)[: len(directions)]
    constants = (query, key, value)[len(directions) :]
    with jax_memeff.forward_mode():
        return jax.jvp(lambda *arrays: ATTENTION(*arrays, *constants), moving, directions)


@pytest.fixture(scope="module")
def corpus():
    """Calls of many kinds, in every direction, for several architectures."""
    with pytest.MonkeyPatch.context() as patch:
        handlers.compile_nothing(patch)
        record = functools.partial(handlers.record, patch)
        plain = jax.grad(loss, (0, 1, 2))
        tokens = [shape(150, heads, H) for heads in (N, K, K)]
        extra = [
            shape(1, N, T, S),
            *(shape(B, dtype="int32"),),
            *(shape(B, length, dtype="int32") for length in (T, S)),
            shape(B, 1, 1, S, dtype="bool"),
            jax.eval_shape(lambda: jax.random.key(0)),
        ]
        pages = [
            *[shape(32, 16, K, H)] * 2,
            *(shape(*sizes, dtype="int32") for sizes in ((6, 8), (6,), (7,))),
        ]
        shared = [shape(3, B, T, N, H), *operands()[1:], shape(B, N, T, S)]
        calls = [
            *record("sm_90a", plain, *operands()),
            *record("sm_80,sm_90a,compute_80", plain, *operands()),
            *record("sm_80", plain, *operands("float32")),
            *record("sm_90a", loss, *operands("float32")),
            *record("sm_80", plain, *operands(H=264)),
            *record("sm_90a", loss, *operands(T=1)),
            *record("sm_80", jax.grad(masked, (0, 1, 2, 3)), *operands(), *extra),
            *record("sm_90a", jax.grad(masked, (0, 1, 2, 3)), *operands(), *extra),
            *record("sm_80", jax.grad(packed, (0, 1, 2)), *tokens, shape(6, dtype="int32")),
            *record("sm_90a", jax.grad(qkv_packed), shape(B, T, 3, N, H)),
            *record("sm_90a,sm_80", paged, shape(9, N, H), *pages),  # two calls
            *record("sm_90a", paged, shape(6, 1, N, H), *pages[:-1]),
            *record("sm_90a", latent, shape(6, 1, 16, 576), shape(32, 16, 1, 576), *pages[2:-1]),
            *record("sm_90a", jax.grad(mapped, (0, 1, 2, 3)), *shared),
            *record("sm_90a", plain, shape(1, 256, 8, H), *[shape(1, 130, 2, H)] * 2),  # split-Q
            *record("sm_90a", positioned, *operands(), shape(B, dtype="int32")),
            *record("sm_90a", tangents, *operands(), *operands()),
            *record("sm_90a", tangents, *operands(), *operands()[:1]),
        ]
    return calls


def first(calls, target="jax_memeff_forward"):
    """A call that a test may change."""
    return copy.deepcopy(next(call for call in calls if call.target == target))


def error_of(call):
    ((error, blocks),) = handlers.run([call])
    assert blocks == 0 or not error
    return error


def test_what_lowering_makes_is_launched(corpus):
    for call, (error, blocks) in zip(corpus, handlers.run(corpus), strict=True):
        assert error == "", call.attributes["operands"]
        assert blocks > 0


NOT_THE_CHECKSUM = "the checksum of the attributes and kernels of the custom call does not match"
EXPORT_AGAIN = "another version of jax_memeff exported it: export it again with the installed"


def changed(value):
    """Another value of the same type."""
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, bytes):
        return value[:-1] + bytes([value[-1] ^ 4])
    if value.ndim and not value.size:
        return np.zeros(3 * 4 * 8, value.dtype)
    return value + value.dtype.type(1) if value.ndim == 0 else np.append(value[1:], value[:1] + 1)


def numbers_of(attributes):
    """The dictionary of each attribute, and its name."""
    for name, value in attributes.items():
        if isinstance(value, dict):
            yield from numbers_of(value)
        else:
            yield attributes, name


def test_every_changed_attribute_is_an_error(corpus):
    count = len([*numbers_of(first(corpus).attributes)])
    assert count > 15
    for place in range(count):
        call = first(corpus)
        owner, name = [*numbers_of(call.attributes)][place]
        owner[name] = changed(owner[name])
        error = error_of(call)
        assert EXPORT_AGAIN in error, name
        expected = {
            "version": "attributes of version 3, expected 2",
            "archs": "the custom call lacks a kernel that it lists",
        }
        by_sizes = "elements, expected" in error or "has unnamed entries" in error
        assert expected.get(name, NOT_THE_CHECKSUM) in error or by_sizes, name


def test_every_missing_attribute_is_an_error(corpus):
    for place in range(len([*numbers_of(first(corpus).attributes)])):
        call = first(corpus)
        owner, name = [*numbers_of(call.attributes)][place]
        del owner[name]
        assert EXPORT_AGAIN in error_of(call), name


def test_programs_of_other_versions_are_errors(corpus):
    """The first version had texts instead of numbers, a digest and no version."""
    call = first(corpus)
    call.attributes = {
        "operands": "query,key,value",
        "operand_types": "bf16[2,96,4,64] bf16[2,130,2,64] bf16[2,130,2,64]",
        "kernels": {"archs": "sm_90a", "sm_90a": b"\x89MEMEFF\n"},
        "seal": bytes(32),
    }
    assert f"attributes of version none, expected {custom_call.VERSION} (" in error_of(call)
    assert EXPORT_AGAIN in error_of(call)


def test_a_call_of_another_direction_is_an_error(corpus):
    call = first(corpus)
    call.target = "jax_memeff_backward"
    assert "the custom call is a forward" in error_of(call)


def test_a_truncated_or_damaged_image_is_an_error(corpus):
    image = bytes(range(256)) * 3
    kernels = {"sm_90a": first(corpus).attributes["kernels"]["sm_90a"] | {"image": image}}
    call = first(corpus)
    others = {name: call.attributes[name] for name in call.attributes}
    del others["kernels"], others["version"], others["checksum"]
    call.attributes = custom_call.sealed(others, kernels)
    assert error_of(call) == ""
    for damaged in (
        *(image[:size] for size in (0, 1, 255, len(image) - 1)),
        *(image[:at] + bytes([image[at] ^ 4]) + image[at + 1 :] for at in range(0, 768, 37)),
    ):
        call.attributes["kernels"]["sm_90a"]["image"] = damaged
        assert NOT_THE_CHECKSUM in error_of(call)


@pytest.mark.parametrize("text", ["\x1b[31m", "\u00e9\u202e", "x" * 100_000], ids=ascii)
def test_names_in_errors_are_short_and_printable(corpus, text):
    """They come from the file. A terminal must not act on them, and Python must decode them."""
    call = first(corpus)
    for name in ("direction", "operands"):
        call.attributes[name] += text
    call.attributes["kernels"]["archs"] += text
    error = error_of(call)
    assert error.isascii() and error.isprintable() and len(error) < 2500
    assert EXPORT_AGAIN in error


@pytest.mark.parametrize(
    ("types", "message"),
    [
        ([16, 2, 2**62, 2], "is larger than an address space"),
        ([16, 2, 0, 2**63 - 1], "is larger than an address space"),
        ([16, 2, -1, 2], "is larger than an address space"),
        ([16, 7, *[1] * 7], "is cut off, or has too many dims"),
        ([16, -1], "is cut off, or has too many dims"),
        ([16, 4, 1, 1], "is cut off, or has too many dims"),
        ([16], "is cut off, or has too many dims"),
        ([16, 1, 1], "its arrays are not those of its buffers"),
    ],
    ids=str,
)
def test_sizes_cannot_overflow(corpus, types, message):
    """These come from the library itself, so the checksum is right."""
    call = first(corpus)
    others = dict(call.attributes)
    kernels = others.pop("kernels")
    del others["version"], others["checksum"], kernels["archs"]
    others["operand_types"] = np.array(types, np.int64)
    call.attributes = custom_call.sealed(others, kernels)
    assert message in error_of(call)


def test_the_checksum_is_that_of_fnv_1a():
    for data in (b"", b"a", bytes(range(256))):
        expected = 0xCBF29CE484222325
        for byte in data:
            expected = (expected ^ byte) * 0x100000001B3 % 2**64
        assert _ffi.checksum(data) % 2**64 == expected


def test_buffers_are_those_that_were_announced(corpus):
    call = first(corpus)
    call.operands[1] = "float32", call.operands[1][1]
    assert "operand key: expected bf16[2,130,2,64], got f32[2,130,2,64]" in error_of(call)
    call = first(corpus)
    call.results[1] = "float32", (2, 3, 4)
    assert "result logsumexp: expected f32[2,96,4], got f32[2,3,4]" in error_of(call)
    call = first(corpus)
    del call.operands[2]
    assert "got 2 operands, expected 3" in error_of(call)
    call = first(corpus)
    call.operands[0] = "bfloat16", (1,) * 9
    assert "got bf16[1,1,1,1,1,1] and more dims" in error_of(call)


def test_changed_calls_never_end_the_process(corpus):
    count = int(os.environ.get("JAX_MEMEFF_FUZZ", "4000"))
    outcome = handlers.fuzz(corpus, count, seed=count)
    print(outcome)
    refused, launched = (int(words.split()[0]) for words in outcome.split(":")[1].split(","))
    assert refused > count / 2 and launched > count / 10, outcome
