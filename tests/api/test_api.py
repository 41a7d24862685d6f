"""The public surface: what importing costs, transformations of a call, sizes of zero."""

import functools
import inspect
import pydoc
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal

import jax_memeff
from jax_memeff import Mask, Offsets
from jax_memeff._op.primitives import attention_fwd_p

attention: Any = jax_memeff.dot_product_attention
B, T, S, N, K, H = 2, 5, 7, 4, 2, 8


QUERY, KEY, VALUE = normal(0, B, T, N, H), normal(1, B, S, K, H), normal(2, B, S, K, H)
EVERYTHING = {
    "bias": normal(3, 1, N, T, S),
    "mask": Mask.causal("bottom_right") & Mask.lengths(query=jnp.array([5, 4])),
    "key_value_seq_lengths": jnp.array([7, 6]),
    "local_window_size": (6, 3),
    "logits_soft_cap": 5.0,
    "dropout_rate": 0.25,
    "dropout_key": jax.random.key(9),
    "scale": 0.3,
    "precision": "default",
    "return_residual": True,
}


@pytest.mark.quick
def test_import_is_light():
    """Flax, the code generator's compiler and plotting are imported on demand."""
    heavy = ("jax", "flax", "cuda", "matplotlib", "rich", "jax_memeff._cuda", "jax_memeff.codegen")
    script = (
        "import sys; before = set(sys.modules); import jax_memeff; "
        f"print([name for name in {heavy!r} if name in set(sys.modules) - before])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.quick
def test_public_names():
    public = {name for name in dir(jax_memeff) if not name.startswith("_")}
    star: dict[str, object] = {}
    exec("from jax_memeff import *", star)
    assert star.keys() - {"__builtins__"} == public
    assert public == {
        "CompileError",
        "Mask",
        "Offsets",
        "OutOfPagesError",
        "PagePool",
        "Picture",
        "UnsupportedError",
        "append_to_pages",
        "check",
        "dot_product_attention",
        "dot_product_attention_packed",
        "dropout",
        "export_disabled_checks",
        "forward_mode",
        "merge_attention",
        "paged_attention",
        "patch_jax_nn",
        "picture",
        "register_targets",
        "ring_attention",
        "unzigzag",
        "varlen_attention",
        "zigzag",
    }
    with pytest.raises(AttributeError, match="no attribute 'colour'"):
        _ = jax_memeff.colour  # type: ignore[attr-defined]


@pytest.mark.quick
def test_jit_equals_eager(assert_close):
    eager = attention(QUERY, KEY, VALUE, **EVERYTHING)
    jitted = jax.jit(functools.partial(attention, **EVERYTHING))(QUERY, KEY, VALUE)
    assert_close(jitted, eager, 1e-6)


def test_arrays_of_a_call_may_be_traced(assert_close):
    arrays = ("bias", "mask", "key_value_seq_lengths", "dropout_key")
    static = {name: value for name, value in EVERYTHING.items() if name not in arrays}

    @jax.jit
    def call(query, key, value, traced):
        return attention(query, key, value, **static, **traced)

    assert_close(
        call(QUERY, KEY, VALUE, {name: EVERYTHING[name] for name in arrays}),
        attention(QUERY, KEY, VALUE, **EVERYTHING),
        1e-6,
    )


def test_arrays_of_the_other_byte_order():
    swapped = [np.asarray(x).astype(x.dtype.newbyteorder()) for x in (QUERY, KEY, VALUE)]
    lengths = np.array([4, 7], ">i4")
    got = attention(*swapped, key_value_seq_lengths=lengths, sinks=np.zeros(N, ">f4"))
    want = attention(QUERY, KEY, VALUE, key_value_seq_lengths=[4, 7], sinks=np.zeros(N))
    np.testing.assert_array_equal(got, want)


def test_mask_arguments_are_combined(assert_close):
    by_arguments = attention(
        QUERY,
        KEY,
        VALUE,
        mask=EVERYTHING["mask"],
        is_causal=True,
        local_window_size=3,
        query_seq_lengths=[5, 3],
        key_value_seq_lengths=np.array([4, 7], np.uint8),
    )
    # The bottom-right diagonal is aligned to the lengths, so each of them matters.
    lengths = Mask.lengths(query=jnp.array([5, 3]), key=jnp.array([4, 7]))
    mask = (EVERYTHING["mask"] & lengths).as_array(B, N, T, S)
    rows, columns = jnp.arange(T)[:, None], jnp.arange(S)[None]
    mask &= (columns <= rows) & (columns >= rows - 3)
    assert_close(by_arguments, attention(QUERY, KEY, VALUE, mask=mask), 1e-6)


def test_legacy_and_typed_keys_drop_the_same():
    typed, legacy = (
        attention(QUERY, KEY, VALUE, dropout_rate=0.5, dropout_key=key)
        for key in (jax.random.key(3), jax.random.PRNGKey(3))
    )
    np.testing.assert_array_equal(typed, legacy)
    other = attention(QUERY, KEY, VALUE, dropout_rate=0.5, dropout_key=jax.random.key(4))
    assert not np.array_equal(typed, other)


def test_unused_dropout_key_changes_nothing():
    with_key = attention(QUERY, KEY, VALUE, dropout_key=jax.random.key(0))
    np.testing.assert_array_equal(with_key, attention(QUERY, KEY, VALUE))


def test_offsets_give_a_part_of_the_whole(assert_close):
    arguments = {"is_causal": True, "dropout_rate": 0.5, "dropout_key": jax.random.key(0)}
    whole = attention(QUERY, KEY, VALUE, **arguments)
    heads = slice(2, 4)
    part = jax.jit(
        lambda row: attention(
            QUERY[1:, 3:, heads],
            KEY[1:, :, 1:],
            VALUE[1:, :, 1:],
            **arguments,
            offsets=Offsets(batch=1, head=2, num_heads=N, query=row),
        )
    )(3)
    assert_close(part, whole[1:, 3:, heads], 1e-6)


@pytest.mark.parametrize(
    ("batch", "rows", "columns", "heads", "dim", "value_dim"),
    [
        (0, T, S, N, H, H),
        (B, 0, S, N, H, H),
        (B, T, 0, N, H, H),
        (B, T, S, 0, H, H),
        (B, T, S, N, 0, H),
        (B, T, S, N, H, 0),
        (B, 0, 0, N, H, H),
    ],
    ids=["B", "T", "S", "N", "H", "Hv", "T-S"],
)
def test_zero_sizes(batch, rows, columns, heads, dim, value_dim, assert_close):
    query = normal(0, batch, rows, heads, dim)
    key = normal(1, batch, columns, heads // 2, dim)
    value = normal(2, batch, columns, heads // 2, value_dim)
    (out, lse), vjp = jax.vjp(
        lambda *x: attention(*x, scale=0.5, is_causal=True, return_residual=True),
        query,
        key,
        value,
    )
    assert out.shape == (batch, rows, heads, value_dim)
    assert lse.shape == (batch, rows, heads)
    gradients = vjp((jnp.ones_like(out), jnp.ones_like(lse)))
    assert [x.shape for x in gradients] == [x.shape for x in (query, key, value)]
    assert all(np.isfinite(x).all() for x in (out, *gradients))
    if columns == 0:
        assert not np.any(out)
        assert np.all(np.isneginf(lse))
    if dim == 0:
        in_row = jnp.arange(1, rows + 1).reshape(1, rows, 1)
        assert_close(lse, jnp.broadcast_to(jnp.log(in_row), lse.shape))


def test_values_beyond_the_lengths_reach_no_result(assert_close):
    lengths = {"query_seq_lengths": [3, 5], "key_value_seq_lengths": [7, 2]}
    rows = (np.arange(T) < np.array([[3], [5]]))[:, :, None, None]
    columns = (np.arange(S) < np.array([[7], [2]]))[:, :, None, None]
    inside = np.swapaxes(rows, 1, 2) & np.swapaxes(columns, 1, 3)
    clean = (QUERY, KEY, VALUE, jnp.broadcast_to(EVERYTHING["bias"], (B, N, T, S)))
    dirty = [
        jnp.where(where, x, jnp.nan)
        for where, x in zip((rows, columns, columns, inside), clean, strict=True)
    ]

    def run(*operands):
        results, vjp = jax.vjp(lambda *x: attention(*x, **lengths, return_residual=True), *operands)
        cotangents = (jnp.ones((B, T, N, H)), jnp.ones((B, T, N)))
        return results, vjp(
            tuple(
                jnp.where(rows[..., : x.ndim - 2] if x.ndim == 4 else rows[..., 0], x, jnp.nan)
                for x in cotangents
            )
        )

    assert_close(run(*dirty), run(*clean))


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_blockwise_path_lowers_everywhere(platform):
    traced = jax.jit(functools.partial(attention, implementation="xla")).trace(QUERY, KEY, VALUE)
    assert "custom_call" not in traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.quick
def test_one_primitive_serves_a_call():
    jaxpr = jax.make_jaxpr(functools.partial(attention, is_causal=True))(QUERY, KEY, VALUE)
    assert attention_fwd_p.name in str(jaxpr)


@pytest.mark.parametrize("is_packed", [False, True])
def test_positions_of_each_batch_index(is_packed, assert_close):
    """``Offsets`` of shape [B] equal B calls with scalars: results, gradients and dropout."""
    batch, length = 3, 32
    rng = np.random.default_rng(5)
    query, key, value = rng.standard_normal((3, batch, length, 2, 8), np.float32)
    rows, columns = np.array([48, 0, 21]), np.array([32, 5, 0])
    features = {"dropout_rate": 0.25, "dropout_key": jax.random.key(1), "implementation": "xla"}
    mask = jax_memeff.Mask.window(9, 3) & jax_memeff.Mask.window(None, 4, "bottom_right")

    def together(query, key, value):
        offsets = jax_memeff.Offsets(query=rows, key=jnp.asarray(columns))
        arguments = {"mask": mask, "offsets": offsets, **features}
        if not is_packed:
            return jax_memeff.dot_product_attention(query, key, value, **arguments)
        tokens = (x.reshape(-1, *x.shape[2:]) for x in (query, key, value))
        bounds = np.arange(0, batch * length + 1, length)
        out = jax_memeff.varlen_attention(
            *tokens,
            cu_seqlens_q=bounds,
            cu_seqlens_k=bounds,
            max_seqlen_q=length,
            max_seqlen_k=length,
            **arguments,
        )
        return out.reshape(value.shape)

    def apart(query, key, value):
        outs = []
        for index in range(batch):
            offsets = jax_memeff.Offsets(
                batch=index, query=int(rows[index]), key=int(columns[index])
            )
            own = (x[index : index + 1] for x in (query, key, value))
            outs.append(
                jax_memeff.dot_product_attention(*own, mask=mask, offsets=offsets, **features)
            )
        return jnp.concatenate(outs)

    def results(function):
        def loss(*operands):
            out = function(*operands)
            return jnp.sum(out * jnp.cos(out)), out

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(query, key, value)

    assert_close(results(together), results(apart))


def test_positions_are_scalars_or_one_for_each_batch_index():
    query = jnp.ones((2, 4, 1, 8))
    with pytest.raises(
        TypeError, match=r"offsets.query must be .* shape \(\) or \(2,\), .* \(3,\)"
    ):
        jax_memeff.dot_product_attention(query, query, query, offsets=Offsets(query=np.arange(3)))
    with pytest.raises(TypeError, match=r"offsets.batch must be .* shape \(\), "):
        jax_memeff.dot_product_attention(query, query, query, offsets=Offsets(batch=np.arange(2)))


def test_16_bit_bias_of_a_float32_query(assert_close):
    """Accepted as in jax.nn; the gradient has the bias's own dtype."""
    for dtype in (jnp.bfloat16, jnp.float16):
        bias = EVERYTHING["bias"].astype(dtype)
        run: Any = lambda f, bias: jax.value_and_grad(  # noqa: E731
            lambda bias: jnp.sum(f(QUERY, KEY, VALUE, bias) ** 2)
        )(bias)
        ours, theirs = run(attention, bias), run(jax.nn.dot_product_attention, bias)
        assert ours[1].dtype == dtype
        assert_close(ours, theirs, 2 ** -(jnp.finfo(dtype).nmant))
        assert_close(ours[0], run(attention, bias.astype(jnp.float32))[0], 1e-6)


def test_float16_bias_of_a_bfloat16_query():
    arrays = [x.astype(jnp.bfloat16) for x in (QUERY, KEY, VALUE)]
    bias = EVERYTHING["bias"].astype(jnp.float16)
    np.testing.assert_array_equal(
        attention(*arrays, bias), attention(*arrays, bias.astype(jnp.float32))
    )


@pytest.mark.parametrize("form", ["batched", "single", "packed"])
def test_latent_values_are_the_first_columns_of_the_keys(form, assert_close):
    query, key = (QUERY, KEY) if form == "batched" else (QUERY[0], KEY[0])

    def call(query, key, value, **settings):
        if form != "packed":
            return attention(query, key, value, is_causal=True, **settings)
        starts = np.array([0, 2, 5]), np.array([0, 3, 7]), 3, 4
        return jax_memeff.varlen_attention(query, key, value, *starts, is_causal=True, **settings)

    def latent(query, key):
        return call(query, key, None, value_dim=5)

    def separate(query, key):
        return call(query, key, key[..., :5])

    (out, of_latent), (want, of_separate) = (
        jax.vjp(function, query, key) for function in (latent, separate)
    )
    assert out.shape == (*query.shape[:-1], 5)
    assert_close(out, want, 1e-6)
    cotangent = jnp.cos(jnp.arange(out.size)).reshape(out.shape)
    assert_close(of_latent(cotangent), of_separate(cotangent), 1e-6)


FUNCTIONS = {
    "dot_product_attention": ["query", "key", "value", "bias", "mask"],
    "dot_product_attention_packed": ["qkv", "bias", "mask"],
    "ring_attention": ["query", "key", "value", "bias", "mask"],
    "varlen_attention": [
        *["query", "key", "value", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"],
        *["bias", "mask"],
    ],
}
COMMON = {
    "scale": None,
    "is_causal": False,
    "local_window_size": None,
    "logits_soft_cap": None,
    "score_mod": None,
    "sinks": None,
    "dropout_rate": 0.0,
    "dropout_key": None,
    "offsets": None,
    "precision": None,
    "deterministic_backward": False,
    "implementation": None,
    "residual_checkpoint_name": None,
    "return_residual": False,
    "return_max_logits": False,
}
LENGTHS = {"query_seq_lengths": None, "key_value_seq_lengths": None}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_are_shown_in_full(name):
    """The arguments are written once, and every function shows names, types and defaults."""
    function = getattr(jax_memeff, name)
    parameters = inspect.signature(function).parameters
    positional = [x for x in parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
    assert [x.name for x in positional] == FUNCTIONS[name]
    keywords = {x.name: x.default for x in parameters.values() if x.kind is x.KEYWORD_ONLY}
    ring = {"axis_name": inspect.Parameter.empty, "layout": "contiguous", "method": "ring"}
    own = {"dot_product_attention": {"value_dim": None}, "ring_attention": ring}
    own["varlen_attention"] = own["dot_product_attention"]
    expected = COMMON | ({} if name == "varlen_attention" else LENGTHS)
    assert keywords == expected | own.get(name, {})
    assert len(parameters) == len(positional) + len(keywords)
    assert all(x.annotation is not inspect.Parameter.empty for x in parameters.values())
    shown = pydoc.plain(pydoc.render_doc(function))
    assert "dropout_rate: 'float' = 0.0" in shown and "Unpack" not in shown


@pytest.mark.quick
def test_every_argument_is_documented():
    documented = inspect.getdoc(attention) or ""
    for name in inspect.signature(attention).parameters:
        assert re.search(rf"^    {name}: ", documented, re.MULTILINE), name


def test_arguments_by_name_may_be_static_in_jit():
    jitted = jax.jit(attention, static_argnames=("is_causal", "local_window_size"))
    expected = attention(QUERY, KEY, VALUE, is_causal=True, local_window_size=2)
    got = jitted(QUERY, KEY, VALUE, is_causal=True, local_window_size=2)
    np.testing.assert_allclose(got, expected, atol=1e-6)
