"""Inconsistent attributes, shapes and buffers are errors, never signals or launches.

Hazard: an exported program is a file that anyone may change, so the host library checks its custom
calls. Here it runs in a separate process under sanitizers, on the buffers that XLA would pass.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import os
import shutil
from typing import Any

import handlers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_memeff
from jax_memeff import Mask

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
        assert error == "", call.attributes["operand_types"]
        assert blocks > 0


def edited(**attributes):
    def edit(call):
        call.attributes.update(attributes)

    return edit


def buffers(kind, position, dtype=None, **sizes):
    """An edit that changes the type of a buffer and announces it in the attributes."""

    def edit(call):
        own, dims = getattr(call, kind)[position]
        dims = tuple(sizes.get(f"d{dim}", size) for dim, size in enumerate(dims))
        getattr(call, kind)[position] = dtype or own, dims
        call.announce()

    return edit


def described(pattern, new):
    return lambda call: call.redescribe(pattern, new)


def dropped(kind, position):
    def edit(call):
        del getattr(call, kind)[position]
        names = call.attributes[kind].split(",")
        call.attributes[kind] = ",".join(names[:position] + names[position + 1 :])
        call.announce()

    return edit


def swapped_images(call):
    call.attributes["kernels"] |= {"archs": "sm_80"} | {
        "sm_80": call.attributes["kernels"]["sm_90a"]
    }


SCALE = np.array([1, 1, 1, 1], np.float32)
FORGED = {
    "no arrays": (edited(operands="", operand_types=""), "no array 'query'"),
    "scale is NaN": (edited(scale=SCALE * np.float32("nan")), "scale has nan, expected finite"),
    "scale is negative": (edited(scale=-SCALE), "expected positive"),
    "three scales": (edited(scale=SCALE[:3]), "scale has 3 elements, expected 4"),
    "a window that overflows": (
        edited(windows=np.array([-(2**31)] * 4, np.int32)),
        "windows has -2147483648",
    ),
    "a number for numbers": (edited(numbers=np.int32(9)), "no attribute numbers"),
    "a field of no array": (described(r"\Z", "field 200 key_words\n"), "the array 'key_words'"),
    "a field of no number": (described(r"\Z", "field 224 #9\n"), "a field's number = '9'"),
    "a field beyond the parameters": (described(r"\Z", "field 584 query\n"), "offset = '584'"),
    "a field across the end": (described(r"\Z", "field 580 query\n"), "offset = '580'"),
    "an odd field": (described(r"\Z", "field 204 query\n"), "expected a multiple of 8"),
    "lengths of no sequences": (edited(longest=np.array([5, 5], np.int32)), "longest has 5"),
    "no alignment": (edited(bias_alignment=np.int32(0)), "bias_alignment is 0"),
    "a number for a text": (edited(results=np.int32(1)), "no attribute results"),
    "no architectures": (edited(kernels={"archs": ""}), "no architectures"),
    "no image": (edited(kernels={"archs": "sm_90a"}), "no attribute sm_90a"),
    "an architecture of another image": (swapped_images, "a description of 'sm_90a'"),
    "a name twice": (edited(operands="query,query,value"), "'query', which the call has twice"),
    "swapped names": (
        edited(operands="key,query,value"),
        "N = 2 query heads, expected a multiple of K",
    ),
    "a divisor of 0": (edited(operands="query,key/0,value"), "the divisor of 'key/0'"),
    "a large divisor": (edited(operands="query,key/2147483647,value"), "product of its divisor"),
    "no type": (edited(operand_types="bf16[2] f32[-1] s32[]"), "has 'f32[-1]'"),
    "too large a type": (
        edited(operand_types=f"bf16[{2**62},2] f32[] s32[]"),
        "expected a type like",
    ),
    "float32 in a bf16 kernel": (buffers("operands", 0, "float32"), "array 'query'"),
    "H = 512 in a d64 kernel": (buffers("operands", 0, d3=512), "H = 512, expected at most 64"),
    "H of the key": (buffers("operands", 1, d3=32), "array 'key'"),
    "no key heads": (buffers("operands", 1, d2=0), "expected a multiple of K = 0"),
    "K = 3 of N = 4": (buffers("operands", 1, d2=3), "expected a multiple of K = 3"),
    "a small out": (buffers("results", 0, d0=1), "array 'out'"),
    "a small logsumexp": (buffers("results", 1, d1=3), "array 'logsumexp'"),
    "too many rows": (buffers("operands", 0, d1=2**28 + 1), "T = 268435457, expected at most"),
    "too large a batch": (buffers("operands", 0, d0=2**31), "B = 2147483648, expected at most"),
    "no key": (dropped("operands", 1), "no array 'key'"),
    "no logsumexp": (dropped("results", 1), "no array 'logsumexp'"),
    "a wrong direction": (described("direction forward", "direction backward"), "direction"),
    "no tile": (described(r"^tile \d+", "tile 0"), "tile = '0', expected 1 to"),
    "an alignment of 0": (described("alignment 16", "alignment 0"), "alignment = '0'"),
    "an odd alignment": (described("alignment 16", "alignment 12"), "a power of two"),
    "no blocks": (described("blocks_per_sm 1", "blocks_per_sm 0"), "blocks_per_sm = '0'"),
    "no entry points": (described("^entry .*\n", ""), "expected 1 to 8"),
    "an unknown line": (described("^entry ", "entries "), "the line 'entries'"),
    "an unknown dim": (described(r"N\*T/", "N*Q/"), "' is unknown"),
    "a tile of 0": (described(r"N\*T/\d+", "N*T/0"), "'T/0' is unknown"),
    "a huge grid": (described(r"N\*T/\d+ 1", f"N*T*{2**50} 0"), "a grid has at most 2147483647"),
    "a grid of no sequences": (described(r"B\*N\*T/", "N*all_queries/"), "is unknown"),
    "a grid that overflows": (described(r"N\*T/\d+", f"N*T*{2**61}"), "makes too many blocks"),
    "a map of nothing known": (described("map query 64 64", "map query 64 7"), "map columns"),
    "an array of the kernel alone": (described("^array query", "array q"), "an array 'q'"),
    "a line twice": (described("alignment 16", "alignment 16\nalignment 16"), "'blocks_per_sm'"),
}


def test_a_latent_call_has_slots_for_its_partial_results(corpus):
    def names(call):
        return call.attributes["results"].split(",")

    call = copy.deepcopy(next(call for call in corpus if "tile_parts" in names(call)))
    assert error_of(call) == ""
    dropped("results", names(call).index("partial_out"))(call)
    assert "partial_out" in error_of(call)


@pytest.mark.parametrize("name", FORGED)
def test_forged_calls_raise_errors_that_name_the_mistake(corpus, name):
    """The digests match, because anyone can compute them for a forged program."""
    call = first(corpus)
    edit, message = FORGED[name]
    edit(call)
    # Attributes of the wrong type have no digest.
    with contextlib.suppress(AttributeError, TypeError, KeyError):
        call.seal()
    assert message in error_of(call)


NAMES = {
    "escapes": "bf16\x1b[31m",
    "not ASCII": "bf16\u00e9\u202e",
    "longer than a message": "bf16" + "x" * 100_000,
}


@pytest.mark.parametrize("name", NAMES)
def test_names_in_errors_are_short_and_printable(corpus, name):
    """They come from the file. A terminal must not act on them, and Python must decode them."""
    for edit in (
        described("^array query bf16", f"array query {NAMES[name]}"),
        edited(kernels={"archs": f"sm_90a,{NAMES[name]}"}),
    ):
        call = first(corpus)
        edit(call)
        error = error_of(call)
        assert error.isascii() and error.isprintable() and len(error) < 2500
        assert "export it again with the installed version" in error


@pytest.mark.parametrize("dims", [(), (B - 1,), (B + 1,), (B, 1)], ids=str)
def test_positions_are_one_for_each_batch_index(corpus, dims):
    call = copy.deepcopy(next(call for call in corpus if positions_of(call)))
    (place,) = positions_of(call)
    call.operands[place] = "int32", dims
    call.announce()
    call.seal()
    error = error_of(call)
    assert "array 'query_position' of the kernel of sm_90a: expected s32[B] with B=2" in error


def positions_of(call):
    """The indices of the query positions among the operands."""
    names = call.attributes["operands"].split(",")
    return [place for place, name in enumerate(names) if name == "query_position"]


def test_a_changed_attribute_has_another_digest(corpus):
    for name, value in (
        ("scale", SCALE),
        ("windows", np.array([1, 1, 1, 1], np.int32)),
        ("bias_alignment", np.int32(8)),
    ):
        call = first(corpus)
        call.attributes[name] = value
        assert "the attribute seal is not the digest of the others" in error_of(call)
    call = first(corpus, "jax_memeff_backward")
    (workspace,) = [i for i, (_, sizes) in enumerate(call.results) if len(sizes) == 1][:1]
    buffers("results", workspace, d0=1)(call)
    assert "the attribute seal is not the digest of the others" in error_of(call)


def test_a_truncated_or_damaged_image_is_an_error(corpus):
    image = first(corpus).attributes["kernels"]["sm_90a"]
    for size in (*range(70), len(image) // 2, len(image) - 1):
        call = first(corpus)
        call.attributes["kernels"]["sm_90a"] = image[:size]
        error = error_of(call)
        assert "image of sm_90a" in error and "kernels" in error
    for position in range(0, len(image), 37):
        call = first(corpus)
        damaged = bytearray(image)
        damaged[position] ^= 4
        call.attributes["kernels"]["sm_90a"] = bytes(damaged)
        assert "image of sm_90a" in error_of(call)


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
    assert "got bf16[1,1,1,1,1,1,1,1,1]" in error_of(call)


def test_digests_are_those_of_hashlib():
    data = np.random.default_rng(0).bytes(1 << 16)
    for size in (0, 1, 55, 56, 57, 63, 64, 65, 119, 120, 128, 1000, len(data)):
        assert handlers.sha256(data[:size]) == hashlib.sha256(data[:size]).hexdigest()


def test_changed_calls_never_end_the_process(corpus):
    count = int(os.environ.get("JAX_MEMEFF_FUZZ", "4000"))
    outcome = handlers.fuzz(corpus, count, seed=count)
    print(outcome)
    refused, launched = (int(words.split()[0]) for words in outcome.split(":")[1].split(","))
    assert refused > count / 2 and launched > count / 200, outcome
