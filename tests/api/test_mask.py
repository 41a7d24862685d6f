"""Masks: what is valid, how they combine, and what their constructors refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_memeff._call.mask import Mask, Window, tiles
from jax_memeff._call.offsets import Position

pytestmark = pytest.mark.quick

B, N, T, S = 2, 3, 7, 10
RNG = np.random.default_rng(0)
BOOLEAN = RNG.random((B, N, T, S)) < 0.6
QUERY_IDS = np.array([[0, 0, 1, 1, 2, 2, -1], [3, 1, 1, 0, 0, -1, -1]])
KEY_IDS = np.array([[0, 0, 0, 1, 1, 2, 2, 2, -1, -1], [3, 3, 1, 1, 0, 0, 2, 2, 2, -1]])

MASKS = {
    "none": Mask(),
    "causal": Mask.causal(),
    "causal_bottom_right": Mask.causal("bottom_right"),
    "window": Mask.window(2, 1),
    "window_right_only": Mask.window(None, 2),
    "window_left_only": Mask.window(3, None, "bottom_right"),
    "window_of_the_past": Mask.window(4, -2),
    "window_unbounded": Mask.window(2**62, 2**62),
    "lengths": Mask.lengths(query=np.array([7, 3]), key=np.array([4, 10])),
    "lengths_clamp": Mask.lengths(query=np.array([99, -5]), key=np.array([2**40, 3])),
    "lengths_bottom_right": Mask.lengths(query=np.array([5, 7]), key=np.array([10, 4]))
    & Mask.window(2, 0, "bottom_right"),
    "segments": Mask.segments(QUERY_IDS, KEY_IDS),
    "segments_shared": Mask.segments(QUERY_IDS[0], KEY_IDS[0]),
    "boolean": Mask.boolean(BOOLEAN),
    "boolean_rank_2": Mask.boolean(BOOLEAN[0, 0]),
    "boolean_broadcast": Mask.boolean(BOOLEAN[:, :1, :1]),
    "all": Mask.causal()
    & Mask.window(6, 3, "bottom_right")
    & Mask.lengths(query=np.array([7, 6]), key=np.array([9, 10]))
    & Mask.segments(QUERY_IDS, KEY_IDS)
    & Mask.segments(QUERY_IDS * 0, KEY_IDS * 0)
    & Mask.boolean(BOOLEAN)
    & Mask.boolean(BOOLEAN[1, 2]),
}


@pytest.mark.parametrize("position", [None, (5, 2), (0, 4)])
@pytest.mark.parametrize("name", MASKS)
def test_as_array_is_the_definition(name, position):
    if position is not None:
        position = Position(*(jnp.int32(x) for x in position))
    got = MASKS[name].as_array(B, N, T, S, position)
    assert got.shape == (B, N, T, S) and got.dtype == bool
    np.testing.assert_array_equal(
        got, oracle.valid_elements(MASKS[name], B, N, T, S, position), err_msg=name
    )


@pytest.mark.parametrize("name", MASKS)
def test_tiles_are_slices_and_skipped_tiles_are_empty(name):
    mask = MASKS[name].canonical(B, T, S)
    whole = np.asarray(MASKS[name].as_array(B, N, T, S))
    shape = (3, 4)
    for row in range(0, T - shape[0] + 1, 2):
        for col in range(0, S - shape[1] + 1, 3):
            part = whole[:, :, row : row + shape[0], col : col + shape[1]]
            tile = tiles.valid_elements(mask, (T, S), (row, col), shape, None)
            tile = True if tile is None else tile
            np.testing.assert_array_equal(np.broadcast_to(tile, part.shape), part)
            possible = tiles.may_attend(mask, (T, S), (row, col), shape, None)
            assert possible is None or bool(possible) or not part.any()


def test_causal_and_lengths_skip_every_empty_tile():
    for mask in (
        Mask.causal(),
        Mask.causal("bottom_right"),
        Mask.window(1, 1),
        Mask.lengths(query=np.array([2, 4]), key=np.array([3, 5])),
        Mask.segments(np.array([0, 0, 0, 1, 1, 1, 2]), np.array([0, 0, 0, 1, 1, 1, 1, 1, 2, 2])),
    ):
        whole = np.asarray(mask.as_array(B, 1, T, S))
        mask = mask.canonical(B, T, S)
        for row in range(T):
            for col in range(S - 1):
                possible = tiles.may_attend(mask, (T, S), (row, col), (1, 2), None)
                assert bool(possible) == whole[:, :, row : row + 1, col : col + 2].any()


def test_and_intersects():
    a = Mask.window(3, None) & Mask.window(5, 1)
    assert a.top_left == Window(3, 1) and a.bottom_right is None
    lengths = Mask.lengths(key=np.array([3, 9])) & Mask.lengths(key=np.array([5, 2]))
    canonical = lengths.canonical(B, T, S)
    assert canonical.key_lengths is not None and canonical.more_lengths == ()
    np.testing.assert_array_equal(canonical.key_lengths, [3, 2])
    assert (Mask() & Mask()).kinds() == frozenset()
    with pytest.raises(TypeError):
        Mask() & BOOLEAN  # type: ignore[operator]


def test_kinds_name_the_conditions():
    assert MASKS["all"].kinds() == {
        "top_left",
        "bottom_right",
        "query_lengths",
        "key_lengths",
        "segments",
        "boolean",
    }
    assert Mask.lengths(key=np.array([1])).kinds() == {"key_lengths"}


def test_canonical_form():
    mask = Mask.lengths(query=np.array([300, 2], np.uint16), key=np.array([-1, 2**40]))
    mask = (mask & Mask.segments(QUERY_IDS[0], KEY_IDS) & Mask.boolean(BOOLEAN[0, 0])).canonical(
        B, T, S
    )
    assert mask.query_lengths is not None and mask.key_lengths is not None
    assert mask.query_lengths.dtype == mask.key_lengths.dtype == jnp.int32
    np.testing.assert_array_equal(mask.query_lengths, [T, 2])
    np.testing.assert_array_equal(mask.key_lengths, [0, S])
    assert mask.segment_ids[0][0].shape == (B, T) and mask.segment_ids[0][1].shape == (B, S)
    assert mask.booleans[0].shape == (1, 1, T, S)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int32"])
def test_lengths_of_any_integer_dtype(dtype):
    lengths = jnp.asarray([100, 2], dtype)
    mask = Mask.lengths(key=lengths).canonical(B, 1, 90)
    assert mask.key_lengths is not None
    np.testing.assert_array_equal(mask.key_lengths, [90, 2])


def test_a_mask_is_a_pytree_with_static_windows():
    mask = MASKS["all"]
    assert len(jax.tree.leaves(mask)) == 8
    same = jax.tree.unflatten(jax.tree.structure(mask), jax.tree.leaves(mask))
    assert same.top_left == mask.top_left
    traced = jax.jit(lambda mask: mask.as_array(B, N, T, S))(mask)
    np.testing.assert_array_equal(traced, mask.as_array(B, N, T, S))
    assert jax.tree.structure(Mask.window(1, 0)) != jax.tree.structure(Mask.window(2, 0))


def test_constructors_refuse_bad_arguments():
    with pytest.raises(ValueError, match="'top_left' or 'bottom_right', got 'centre'"):
        Mask.causal("centre")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'top_left' or 'bottom_right', got array\(\[1, 2\]\)"):
        Mask.causal(np.array([1, 2]))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"window left must be a Python integer or None, got 1\.5"):
        Mask.window(1.5, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"window right must be one integer, got .* shape \(2,\)"):
        jax.jit(lambda right: Mask.window(None, right))(np.array([3, 4]))
    with pytest.raises(TypeError, match=r"window left must be integers, got dtype float32"):
        jax.jit(lambda left: Mask.window(left, 0))(1.5)
    with pytest.raises(TypeError, match="key lengths must be integers, got dtype float"):
        Mask.lengths(key=np.ones(2))
    with pytest.raises(ValueError, match=r"query lengths must have rank 1, got shape \(2, 1\)"):
        Mask.lengths(query=np.ones((2, 1), int))
    with pytest.raises(ValueError, match=r"key segment ids must have rank 1 or 2, got shape \(\)"):
        Mask.segments(np.zeros(3, int), np.array(1))
    with pytest.raises(TypeError, match="boolean mask must have dtype bool, got float32"):
        Mask.boolean(jnp.zeros((2, 2)))
    with pytest.raises(ValueError, match="boolean mask must have rank <= 4"):
        Mask.boolean(np.ones((1,) * 5, bool))


def test_a_mask_prints_without_its_arrays():
    mask = Mask.window(4, 0) & Mask.boolean(jnp.ones((64, 64), bool)) | Mask.causal("bottom_right")
    assert repr(mask & Mask.window(9, None)) == "Mask(function, top_left=(9, None))"


def test_masks_of_windows_compare_by_value():
    assert Mask.causal() == Mask.window(None, 0) != Mask.causal("bottom_right")
    assert hash(Mask.causal()) == hash(Mask.window(None, 0))
    assert Mask() != None  # noqa: E711
    assert Mask.causal() in (Mask(), Mask.causal())
    traces = []

    def call(mask):
        traces.append(mask)
        return mask.as_array(1, 1, 3, 3)

    jitted = jax.jit(call, static_argnums=0)
    np.testing.assert_array_equal(jitted(Mask.causal()), jitted(Mask.window(None, 0)))
    assert len(traces) == 1


def test_masks_of_arrays_do_not_compare():
    a, b = (Mask.lengths(key=np.array([3, 4])) for _ in range(2))
    assert a == a
    for action in (lambda: a == b, lambda: a != b, lambda: Mask() == a, lambda: bool(a == Mask())):
        with pytest.raises(TypeError, match=r"cannot compare a Mask that holds arrays"):
            action()
    with pytest.raises(TypeError, match=r"cannot hash a Mask that holds arrays"):
        hash(a)
