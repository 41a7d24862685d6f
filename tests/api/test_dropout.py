"""The dropout contract: known answers, independence of tiles, shards and offsets."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.extend.random import define_prng_impl

import jax_memeff
from jax_memeff._call import dropout
from jax_memeff._call.offsets import Offsets, Position
from jax_memeff._call.operands import DropoutState

KEY = (0x12345678, 0x9ABCDEF0)


def known_state() -> DropoutState:
    zero = jnp.zeros(1, jnp.uint32)
    return DropoutState(jnp.array([KEY], jnp.uint32), zero, zero)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), "5f6fb709 0d893f64 4f121f81 4f730a48"),
        ((1, 2, 3, 0), KEY, "6795de4f 521034cb f132da2f 28f31eb1"),
    ],
)
def test_philox_known_answers(counter, key, words):
    got = dropout.philox4x32_7(
        tuple(jnp.uint32(x) for x in counter), tuple(jnp.uint32(x) for x in key)
    )
    assert " ".join(f"{int(word):08x}" for word in got) == words
    same = oracle.philox4x32_7([np.array(x) for x in counter], [np.array(x) for x in key])
    assert " ".join(f"{int(word):08x}" for word in same) == words


def test_philox_agrees_with_64_bit_arithmetic():
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, (6, 1000), np.uint32)
    got = jax.jit(dropout.philox4x32_7)(tuple(words[:4]), tuple(words[4:]))
    want = oracle.philox4x32_7(list(words[:4]), list(words[4:]))
    np.testing.assert_array_equal(np.stack(got), np.stack(want).astype(np.uint32))


def test_keep_bits_known_answers():
    bits = np.asarray(dropout.keep_mask(known_state(), dropout.threshold(0.5), 0, 0, 2, 16))[0, 0]
    rows = ["".join(str(int(bit)) for bit in row) for row in bits]
    assert rows == ["0111001100011111", "0101001100101110"]


def test_keep_bits_are_the_definition():
    state = dropout.state(jax.random.key(3), 2, 3, Offsets(batch=5, head=7, num_heads=11))
    position = Position(jnp.int32(37), jnp.int32(1000))
    got = dropout.keep_mask(state, 77, 37, 1000, 50, 65)
    np.testing.assert_array_equal(got, oracle.kept_elements(state, 77, 50, 65, position))


@pytest.mark.rotating(5)
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("tile", [(16, 16), (48, 32), (7, 5), (1, 90), (64, 33)])
def test_tiles_of_any_size_have_the_same_bits(tile, traced):
    state = dropout.state(jax.random.key(1), 2, 2)
    rows, cols = 70, 90
    whole = np.asarray(dropout.keep_mask(state, 100, 0, 0, rows, cols))

    def part(row, col):
        return dropout.keep_mask(state, 100, row, col, *tile)

    part = jax.jit(part) if traced else part
    for row in range(0, rows - tile[0] + 1, tile[0]):
        for col in range(0, cols - tile[1] + 1, tile[1]):
            np.testing.assert_array_equal(
                part(row, col), whole[:, :, row : row + tile[0], col : col + tile[1]]
            )


def test_one_call_of_the_generator_serves_16_elements(monkeypatch):
    calls = []
    generator = dropout.philox4x32_7

    def counted(counter, key):
        words = generator(counter, key)
        calls.append(words[0].size)
        return words

    monkeypatch.setattr(dropout, "philox4x32_7", counted)
    dropout.keep_mask(known_state(), 128, 32, 64, 48, 80)
    assert calls == [48 * 80 // 16]


def test_the_realised_rate():
    state = dropout.state(jax.random.key(0), 2, 2)
    for rate in (0.1, 0.5, 0.9):
        realised = dropout.realised_rate(rate)
        assert abs(realised - rate) <= 1 / 512
        dropped = 1 - np.asarray(dropout.keep_mask(state, dropout.threshold(rate), 0, 0, 512, 512))
        spread = (realised * (1 - realised) / dropped.size) ** 0.5
        assert abs(dropped.mean() - realised) < 5 * spread
        # Rows, columns and heads have independent bits.
        for axis in range(4):
            assert abs(np.diff(dropped, axis=axis)).mean() > realised * (1 - realised)


@pytest.mark.quick
def test_threshold():
    assert [dropout.threshold(rate) for rate in (0, 0.1, 0.5, 255 / 256)] == [0, 26, 128, 255]
    with pytest.raises(ValueError, match=r"0\.001 rounds to 0; .* 0\.0 and 0\.00390625"):
        dropout.threshold(0.001)
    with pytest.raises(ValueError, match=r"rounds to 1.*nearest valid rate is 0\.99609375"):
        dropout.threshold(1.0)
    for rate in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"expected a number in \[0, 1\)"):
            dropout.threshold(rate)
    for rate in ("0.1", None, 0.1j):
        with pytest.raises(TypeError, match="rate must be a number, got"):
            dropout.realised_rate(rate)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="dropout_rate must be a number, got"):
            dropout.threshold(rate)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="rate must be a static number, got a traced value"):
        jax.jit(dropout.realised_rate)(0.1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("x", 2), TypeError, "batch must be a Python integer, got 'x'"),
        ((2, 1.5), TypeError, "num_heads must be a Python integer, got 1.5"),
        ((2, -1), ValueError, "num_heads must be at least 0, got -1"),
        ((2, 2**31), ValueError, "num_heads must be at most 2147483647, got 2147483648"),
        ((2, 2, 3), TypeError, "offsets must be .*, got 3; pass jax_memeff.Offsets"),
    ],
)
def test_wrong_arguments_of_state(arguments, error, message):
    with pytest.raises(error, match=message):
        dropout.state(jax.random.key(0), *arguments)


@pytest.mark.parametrize("key", [None, 3, "key", jnp.zeros(2)])
def test_keys_of_state_are_checked(key):
    with pytest.raises(TypeError, match="dropout_key must be a"):
        dropout.state(key, 2, 2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"state": KEY}, TypeError, "state must be the result of jax_memeff.dropout.state, got tu"),
        ({"threshold": 0.5}, TypeError, "threshold must be a Python integer, got 0.5"),
        ({"threshold": 257}, ValueError, "threshold must be at most 256, got 257"),
        ({"row_start": -16}, ValueError, "row_start must be at least 0, got -16"),
        ({"col_start": 1.0}, TypeError, "col_start must be a Python integer, got 1.0"),
        ({"col_start": jnp.zeros(2, int)}, TypeError, "col_start must be one integer, got int32"),
        ({"rows": None}, TypeError, "rows must be a Python integer, got None"),
        ({"cols": -1}, ValueError, "cols must be at least 0, got -1"),
    ],
)
def test_wrong_arguments_of_keep_mask(arguments, error, message):
    right = {"state": known_state(), "threshold": 9, "row_start": 0, "col_start": 0}
    with pytest.raises(error, match=message):
        dropout.keep_mask(**{**right, "rows": 2, "cols": 2, **arguments})


@pytest.mark.parametrize("partitionable", [True, False])
def test_typed_and_legacy_keys(partitionable):
    """``jax.random.bits`` depends on the setting, whose default is True, but no dropped element."""
    want = [2895194379, 4185947648]
    with jax.threefry_partitionable(partitionable):
        for key in (jax.random.key(7), jax.random.PRNGKey(7)):
            is_default = jax.random.bits(key, (2,), "uint32").tolist() == want
            assert is_default == partitionable
            assert dropout.key_words(key).tolist() == want
            assert jax.jit(dropout.key_words)(key).tolist() == want
            assert jax.vmap(dropout.key_words)(jnp.stack([key, key])).tolist() == [want, want]


def test_keys_of_a_generator_that_jax_does_not_have():
    """Then the contract is that of ``jax.random.bits``."""
    generator = define_prng_impl(
        key_shape=(3,),
        seed=lambda seed: jnp.stack([seed, seed, seed]).astype(jnp.uint32),
        split=lambda key, shape: jnp.broadcast_to(key, (*shape, 3)),
        random_bits=lambda key, bit_width, shape: jnp.full(shape, key[0] + 5, jnp.uint32),
        fold_in=lambda key, data: key + data,
        name="constant",
    )
    assert dropout.key_words(jax.random.key(7, impl=generator)).tolist() == [12, 12]


@pytest.mark.parametrize("generator", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_the_checker_of_reused_keys_sees_that_a_call_uses_its_key(generator):
    query = jnp.ones((1, 4, 1, 8))

    @jax.jit
    def call(key):
        return jax_memeff.dot_product_attention(
            query, query, query, dropout_rate=0.5, dropout_key=key
        )

    @jax.jit
    def twice(key):
        return call(key) + call(key)

    with jax.debug_key_reuse(True):
        key = jax.random.key(0, impl=generator)
        call(key)
        with pytest.raises(jax.errors.KeyReuseError):
            call(key)
        with pytest.raises(jax.errors.KeyReuseError):
            twice(jax.random.key(0, impl=generator))


@pytest.mark.parametrize("generator", ["rbg", "unsafe_rbg"])
def test_keys_of_other_generators_are_independent_under_vmap(generator):
    keys = jax.random.split(jax.random.key(7, impl=generator), 3)
    each = np.stack([dropout.key_words(key) for key in keys])
    assert len(np.unique(each)) == each.size
    np.testing.assert_array_equal(jax.vmap(dropout.key_words)(keys), each)
    with jax.default_prng_impl(generator):
        legacy = [dropout.key_words(key) for key in jax.random.key_data(keys)]
    np.testing.assert_array_equal(np.stack(legacy), each)


def test_a_legacy_key_has_the_size_of_the_current_default():
    query = jnp.ones((1, 4, 1, 8))

    def call(key):
        return jax_memeff.dot_product_attention(
            query, query, query, dropout_rate=0.5, dropout_key=key
        )

    call(jax.random.PRNGKey(0))
    with jax.default_prng_impl("rbg"):
        key = jax.random.PRNGKey(0)
        assert key.shape == (4,)
        np.testing.assert_array_equal(call(key), call(jax.random.key(0)))
    with pytest.raises(ValueError, match=r"dropout_key must have shape \(2,\).*got shape \(4,\)"):
        call(key)


def test_offsets_give_the_bits_of_the_whole():
    key = jax.random.key(5)
    whole = np.asarray(dropout.keep_mask(dropout.state(key, 4, 6), 90, 0, 0, 32, 48))

    @jax.jit
    def shard(offsets: Offsets):
        state, position = dropout.state(key, 2, 3, offsets), offsets.position()
        return dropout.keep_mask(state, 90, position.query, position.key, 16, 32)

    got = shard(Offsets(batch=2, head=3, num_heads=6, query=16, key=16))
    np.testing.assert_array_equal(got, whole[2:, 3:, 16:, 16:])


@pytest.mark.quick
def test_offsets_are_a_pytree():
    leaves = jax.tree.leaves(Offsets(batch=1, head=2, num_heads=8, query=16, key=jnp.int32(32)))
    assert [int(leaf) for leaf in leaves] == [1, 2, 8, 16, 32]
    assert jax.tree.leaves(Offsets()) == [0, 0, 0, 0]
