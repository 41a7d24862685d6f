"""An object that holds an array stands for that array: in every argument of every function.

A call with the object must trace to the program of the call with the array, or raise its error.
"""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal, zeros
from flax import nnx
from jax.sharding import PartitionSpec

import jax_memeff
import jax_memeff.dropout
import jax_memeff.flax
import jax_memeff.flax.linen
import jax_memeff.flax.nnx
from jax_memeff import Mask, Offsets

B, T, N, H = 2, 16, 2, 8


class Holder:
    """The least that JAX asks of an object that stands for an array."""

    def __init__(self, array: Any):
        self.array = array

    def __jax_array__(self) -> Any:
        return self.array


class Case(NamedTuple):
    function: Callable[..., Any]
    arguments: dict[str, Any]
    """Those that may be arrays, or hold some."""
    constants: Mapping[str, Any] = MappingProxyType({})
    run: Callable[[Callable[..., Any], tuple[Any, ...]], Any] = lambda call, arrays: call(*arrays)
    """Calls with the traced arrays, in the context that the function needs."""


def on_a_ring(call: Callable[..., Any], arrays: tuple[Any, ...]) -> Any:
    mesh = jax.make_mesh((1,), ("ring",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec()
    return jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(*arrays)


def patched(**arguments: Any) -> Any:
    with jax_memeff.patch_jax_nn():
        return jax.nn.dot_product_attention(**arguments)


def classes(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **arguments: np.asarray(function(**arguments).classes)


TOKENS = normal(0, B, T, N, H)
LENGTHS = np.array([9, 16], np.int32)
IDS = np.arange(T, dtype=np.int32) // 7
BOOLEAN = np.tri(T, dtype=bool)
POSITIONS = Offsets(
    **{name: jnp.int32(0) for name in ("batch", "head", "query", "key")}, num_heads=jnp.int32(N)
)
COMMON: dict[str, Any] = {
    "bias": normal(1, N, T, T),
    "mask": BOOLEAN,
    "scale": np.float32(0.5),
    "is_causal": np.True_,
    "local_window_size": (np.int32(3), np.int32(2)),
    "logits_soft_cap": np.float32(9),
    "sinks": normal(2, N),
    "dropout_rate": np.float32(0.5),
    "dropout_key": jax.random.key(0),
    "offsets": POSITIONS,
    "deterministic_backward": np.False_,
    "return_residual": np.True_,
    "return_max_logits": np.True_,
}
PADDED = COMMON | {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS}
ATTENTION = {"query": TOKENS, "key": TOKENS, "value": TOKENS} | PADDED
POOL = zeros(4, 16, 1, H)
FLOAT8_POOL = zeros(4, 16, 1, H, dtype=jnp.float8_e4m3fn)
TABLE = np.array([[0, 1], [2, 3]], np.int32)
NEW = normal(3, B, 3, 1, H)
STARTS = np.array([0, 7, 16], np.int32)
PART = (TOKENS, normal(4, B, T, N))
LAYER = jax_memeff.flax.nnx.MultiHeadAttention(
    2, 16, decode=False, rotary_base=100.0, rngs=nnx.Rngs(0)
)
LAYER.init_pages(4, 16)
LINEN = jax_memeff.flax.linen.MultiHeadAttention(2, dropout_rate=0.5)
INPUTS = normal(5, B, T, 16)
VARIABLES = jax.jit(functools.partial(LINEN.init, deterministic=True))(jax.random.key(0), INPUTS)
OF_LAYERS = {
    "inputs_q": INPUTS,
    "inputs_k": INPUTS,
    "inputs_v": INPUTS,
    "bias": COMMON["bias"],
    "mask": BOOLEAN,
    "segment_ids": np.stack([IDS] * B),
}


def paged_layer(pages: Any) -> Any:
    # A layer that was made before a trace cannot write to its pages there.
    layer = nnx.merge(*nnx.split(LAYER), copy=True)
    return layer(INPUTS[:, :3], pages=pages)


def linen_layer(**arguments: Any) -> Any:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return LINEN.apply(VARIABLES, **arguments)


def paged_linen_layer(pages: Any) -> Any:
    layer = jax_memeff.flax.linen.MultiHeadAttention(2, pool_shape=(4, 16))
    return layer.apply(VARIABLES, INPUTS[:, :3], pages=pages, mutable="cache")


CASES = {
    "dot_product_attention": Case(jax_memeff.dot_product_attention, ATTENTION),
    "dot_product_attention:latent": Case(
        jax_memeff.dot_product_attention,
        {"query": TOKENS, "key": TOKENS, "value_dim": np.int32(4)},
        {"value": None},
    ),
    "dot_product_attention_packed": Case(
        jax_memeff.dot_product_attention_packed, {"qkv": normal(6, B, T, 3, N, H)} | PADDED
    ),
    "varlen_attention": Case(
        jax_memeff.varlen_attention,
        dict.fromkeys(("query", "key", "value"), TOKENS[0])
        | {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS}
        | {"max_seqlen_q": np.int32(T), "max_seqlen_k": np.int32(T)}
        | COMMON,
    ),
    "ring_attention": Case(
        jax_memeff.ring_attention,
        ATTENTION | {"offsets": Offsets(batch=jnp.int32(0), head=jnp.int32(0))},
        {"axis_name": "ring"},
        run=on_a_ring,
    ),
    "paged_attention": Case(
        jax_memeff.paged_attention,
        {"query": TOKENS[:, :3], "key_pages": FLOAT8_POOL, "value_pages": FLOAT8_POOL}
        | {"page_table": TABLE, "kv_lengths": LENGTHS, "mask": BOOLEAN[:3, :1]}
        | {"key_scale": normal(7, 1), "value_scale": normal(8, 4, 1)}
        | {"batch_invariant": np.False_, "return_residual": np.True_, "is_causal": np.True_}
        | {name: COMMON[name] for name in ("scale", "local_window_size", "logits_soft_cap")}
        | {"sinks": COMMON["sinks"], "offsets": Offsets(query=LENGTHS, key=np.int32(3))},
    ),
    "paged_attention:tokens": Case(
        jax_memeff.paged_attention,
        {"query": TOKENS[0], "query_starts": STARTS, "max_query_length": np.int32(T)},
        {"key_pages": POOL, "value_pages": POOL, "page_table": TABLE, "kv_lengths": LENGTHS},
    ),
    "paged_attention:latent": Case(
        jax_memeff.paged_attention,
        {"key_pages": POOL, "value_dim": np.int32(4)},
        {"query": TOKENS, "value_pages": None, "page_table": TABLE, "kv_lengths": LENGTHS},
    ),
    "append_to_pages": Case(
        jax_memeff.append_to_pages,
        {"key_pages": FLOAT8_POOL, "value_pages": FLOAT8_POOL, "key": NEW, "value": NEW}
        | {"page_table": TABLE, "kv_lengths": LENGTHS}
        | {"key_scale": normal(7, 1), "value_scale": normal(8, 4, 1)},
    ),
    "append_to_pages:tokens": Case(
        jax_memeff.append_to_pages,
        {"query_starts": STARTS},
        {"key_pages": POOL, "value_pages": POOL, "key": TOKENS[0, :, :1]}
        | {"value": TOKENS[0, :, :1], "page_table": TABLE, "kv_lengths": LENGTHS},
    ),
    "merge_attention": Case(jax_memeff.merge_attention, {"parts": [PART, PART]}),
    "merge_attention:iterator": Case(
        lambda parts: jax_memeff.merge_attention(iter(parts)), {"parts": [PART, PART]}
    ),
    "zigzag": Case(jax_memeff.zigzag, {"x": TOKENS}, {"axis": 1, "n": 2}),
    "unzigzag": Case(jax_memeff.unzigzag, {"x": TOKENS}, {"axis": 1, "n": 2}),
    "patch_jax_nn": Case(
        patched,
        {
            name: ATTENTION[name]
            for name in inspect.signature(jax.nn.dot_product_attention).parameters
            if name in ATTENTION
        },
    ),
    "Mask.window": Case(Mask.window, {"left": np.int32(3), "right": np.int32(0)}),
    "Mask.lengths": Case(Mask.lengths, {"query": LENGTHS, "key": LENGTHS}),
    "Mask.segments": Case(Mask.segments, {"query_ids": IDS, "key_ids": IDS}),
    "Mask.boolean": Case(Mask.boolean, {"array": BOOLEAN}),
    "Mask.kv_blocks": Case(
        Mask.kv_blocks,
        {"indices": np.array([[0, 1]]), "counts": np.array([2])}
        | {"block_size": (np.int32(16), np.int32(16))},
    ),
    "Mask.keys": Case(Mask.keys, {"indices": np.array([[0, 1]]), "unique_indices": np.True_}),
    "Mask.blocks": Case(
        Mask.segments(IDS, IDS).blocks, {"query": TOKENS, "key": TOKENS, "offsets": POSITIONS}
    ),
    "Mask.as_array": Case(
        Mask.causal().as_array,
        {"position": Offsets(query=3).position()}
        | {name: np.int32(size) for name, size in zip("BNTS", (B, N, T, T), strict=True)},
    ),
    "Offsets.position": Case(lambda offsets: offsets.position(), {"offsets": POSITIONS}),
    "dropout.state": Case(
        jax_memeff.dropout.state,
        {"dropout_key": jax.random.key(0), "offsets": POSITIONS}
        | {"batch": np.int32(B), "num_heads": np.int32(N)},
    ),
    "dropout.keep_mask": Case(
        jax_memeff.dropout.keep_mask,
        {"state": jax_memeff.dropout.state(jax.random.key(0), B, N)}
        | {"row_start": np.int32(0), "col_start": np.int32(16)}
        | {"threshold": np.int32(26), "rows": np.int32(5), "cols": np.int32(6)},
    ),
    "dropout.threshold": Case(jax_memeff.dropout.threshold, {"rate": np.float32(0.5)}),
    "dropout.realised_rate": Case(jax_memeff.dropout.realised_rate, {"rate": np.float32(0.5)}),
    "flax.attention_fn": Case(
        jax_memeff.flax.attention_fn,
        {name: ATTENTION[name] for name in ("query", "key", "value", "bias", "mask", "sinks")}
        | {"dropout_rng": jax.random.key(0), "dropout_rate": np.float32(0.5)},
    ),
    "flax.rotary_embedding": Case(
        jax_memeff.flax.rotary_embedding,
        {"x": TOKENS, "positions": np.arange(T), "base": np.float32(100)},
    ),
    "flax.nnx.MultiHeadAttention": Case(LAYER, OF_LAYERS | {"input_positions": np.arange(T)}),
    "flax.nnx.MultiHeadAttention:pages": Case(
        paged_layer, {"pages": jax_memeff.flax.Pages(TABLE, LENGTHS)}
    ),
    "flax.linen.MultiHeadAttention": Case(
        linen_layer, OF_LAYERS | {"dropout_rng": jax.random.key(0)}, {"deterministic": False}
    ),
    "flax.linen.MultiHeadAttention:inputs_kv": Case(
        linen_layer, {"inputs_kv": INPUTS}, {"inputs_q": INPUTS, "deterministic": True}
    ),
    "flax.linen.MultiHeadAttention:pages": Case(
        paged_linen_layer, {"pages": jax_memeff.flax.Pages(TABLE, LENGTHS)}
    ),
}
EAGER = {
    "picture": Case(
        classes(jax_memeff.picture),
        {"query": TOKENS, "key": TOKENS, "value": TOKENS, "bias": COMMON["bias"], "mask": BOOLEAN}
        | {"offsets": POSITIONS, "key_value_seq_lengths": LENGTHS, "head": np.int32(1)},
    ),
    "Mask.picture": Case(
        classes(Mask.boolean(np.tri(T, dtype=bool)).picture),
        {"T": np.int32(T), "S": np.int32(T), "offsets": POSITIONS, "head": np.int32(1)},
    ),
    "check": Case(jax_memeff.check, {**ATTENTION, "dropout_key": jax.random.key(0)}),
    "check:paged": Case(
        jax_memeff.check,
        {"query": TOKENS[:, :3], "key": FLOAT8_POOL, "value": FLOAT8_POOL}
        | {"page_table": TABLE, "kv_lengths": LENGTHS, "key_scale": np.ones(1, np.float32)}
        | {"value_scale": np.ones(1, np.float32)},
    ),
}


def outcome(case: Case, name: str, wrap: Callable[[Any], Any], traced: bool) -> str:
    """The program of a call whose argument ``name`` is wrapped and maybe traced, or its error."""
    leaves, tree = jax.tree.flatten(case.arguments[name])

    def call(*arrays: Any) -> Any:
        value = jax.tree.unflatten(tree, map(wrap, arrays))
        return case.function(**{**case.constants, **case.arguments, name: value})

    def whole(*arrays: Any) -> Any:
        return case.run(call, arrays) if traced else case.run(lambda: call(*leaves), ())

    try:
        program, shapes = jax.make_jaxpr(whole, return_shape=True)(*(leaves if traced else ()))
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return re.sub("0x[0-9a-f]+", "", f"{program}\n{shapes}")


def arguments_of(cases: dict[str, Case]) -> list[tuple[str, str]]:
    return [(case, name) for case in cases for name in cases[case].arguments]


@pytest.mark.rotating(5)
@pytest.mark.parametrize(("case", "name"), arguments_of(CASES))
def test_an_object_stands_for_its_array(case, name):
    for traced in (False, True):
        expected = outcome(CASES[case], name, lambda array: array, traced)
        assert traced or "Error" not in expected
        assert outcome(CASES[case], name, Holder, traced) == expected


@pytest.mark.parametrize(("case", "name"), arguments_of(EAGER))
def test_an_object_on_the_host(case, name):
    function, arguments, *_ = EAGER[case]
    np.testing.assert_equal(
        function(**{**arguments, name: jax.tree.map(Holder, arguments[name])}),
        function(**arguments),
    )


@pytest.mark.parametrize("kind", [nnx.Param, nnx.Variable])
@pytest.mark.parametrize("name", ATTENTION)
def test_variables_of_flax(name, kind):
    case = CASES["dot_product_attention"]
    expected = outcome(case, name, lambda array: array, traced=False)
    assert outcome(case, name, kind, traced=False) == expected


def test_variables_in_functions():
    """A user's function reads their elements."""
    slopes = normal(9, N)

    def program(slopes: Any) -> str:
        def score_mod(score, b, h, q, k):
            return score + slopes[h] * (k - q)

        def attention():
            return jax_memeff.dot_product_attention(TOKENS, TOKENS, TOKENS, score_mod=score_mod)

        return re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(attention)()))

    assert program(nnx.Param(slopes)) == program(slopes)


class Slope(nnx.Module):
    """A function with a parameter, which is a pytree."""

    def __init__(self, slopes: jax.Array):
        self.slopes = nnx.Param(slopes)

    def __call__(self, score, b, h, q, k):
        return score + self.slopes[...][h] * (k - q)


def test_a_module_is_a_function_and_no_array():
    def program(slopes: jax.Array, score_mod: Any) -> str:
        def attention(slopes):
            return jax_memeff.dot_product_attention(
                TOKENS, TOKENS, TOKENS, score_mod=score_mod(slopes)
            )

        return re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(attention)(slopes)))

    def plain(slopes):
        return lambda score, b, h, q, k: score + slopes[h] * (k - q)

    slopes = normal(9, N)
    assert program(slopes, Slope) == program(slopes, plain)


HAVE_NO_ARRAYS = {
    *("CompileError", "OutOfPagesError", "UnsupportedError", "Picture", "PagePool", "dropout"),
    *("export_disabled_checks", "forward_mode", "register_targets", "Mask", "Offsets"),
    *("Mask.causal", "Mask.function", "Mask.canonical", "Mask.show", "Mask.plot"),
}
"""Public names without an argument that may be an array. Classes are cases by their methods, and
``show`` and ``plot`` pass their arguments to ``picture``."""


def public(prefix: str, holder: Any) -> dict[str, Any]:
    names = getattr(holder, "__all__", vars(holder))
    return {prefix + name: getattr(holder, name) for name in names if name[0] != "_"}


FUNCTIONS = {
    **public("", jax_memeff),
    **public("dropout.", jax_memeff.dropout),
    **public("Mask.", Mask),
    "patch_jax_nn": jax.nn.dot_product_attention,
    "Offsets.position": Offsets.position,
    "flax.attention_fn": jax_memeff.flax.attention_fn,
    "flax.rotary_embedding": jax_memeff.flax.rotary_embedding,
    "flax.nnx.MultiHeadAttention": jax_memeff.flax.nnx.MultiHeadAttention.__call__,
    "flax.linen.MultiHeadAttention": jax_memeff.flax.linen.MultiHeadAttention.__call__,
}
MAY_BE_ARRAYS = re.compile("^(?!.*Callable).*(Array|Mask|Offsets|Bound|SegmentIds|Position|float)")


@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - HAVE_NO_ARRAYS))
def test_every_argument_is_tried(name):
    cases = CASES | EAGER
    tried = {x for case in cases if case.split(":")[0] == name for x in cases[case].arguments}
    parameters = inspect.signature(FUNCTIONS[name]).parameters.values()
    arrays = {x.name for x in parameters if MAY_BE_ARRAYS.search(str(x.annotation))}
    assert tried and arrays <= tried
