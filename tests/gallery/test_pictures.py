"""Pictures of masks and calls: classes of tiles, drawings, and errors."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_memeff
from jax_memeff import Mask, Offsets
from jax_memeff._call.mask import pictures

T, S = 37, 50
TILE = 8, 16
RNG = np.random.default_rng(3)
IDS = np.sort(RNG.integers(0, 4, (2, T)))
KEY_IDS = np.sort(RNG.integers(0, 4, (2, S)))

MASKS = {
    "none": Mask(),
    "causal": Mask.causal(),
    "bottom_right": Mask.causal("bottom_right"),
    "window": Mask.window(5, 3),
    "two_windows": Mask.window(9, 20) & Mask.window(20, 0, "bottom_right"),
    "empty": Mask.window(-60, None),
    "lengths": Mask.lengths(query=np.array([30, 9]), key=np.array([41, 17]))
    & Mask.causal("bottom_right"),
    "segments": Mask.segments(IDS, KEY_IDS),
    "boolean": Mask.boolean(RNG.random((2, 1, T, S)) < 0.02),
    "blocks": Mask.kv_blocks(np.array([[0], [2], [1], [-1], [3]]), block_size=(8, 16)),
    "function": Mask.function(lambda b, h, q, k: (q // 8 + k // 16 + h) % 3 != 0),
    "or": Mask.window(2, 0) | Mask.lengths(key=np.array([3, 20])),
    "not": ~Mask.causal() & Mask.window(None, 30),
}
NOT_A_SIZE: Any = 4.0
SHARD = Offsets(query=16, key=np.array([0, 3]))
CASES = {name: (mask, None) for name, mask in MASKS.items()} | {
    f"{name} of a shard": (MASKS[name], SHARD) for name in ("two_windows", "function")
}


def tiles(array: np.ndarray) -> np.ndarray:
    """The elements as [Q blocks, KV blocks, rows, columns], padded."""
    padding = [(0, -size % own) for size, own in zip(array.shape, TILE, strict=True)]
    padded = np.pad(array.astype(np.int8), padding, constant_values=-1)
    rows, columns = padded.shape
    return padded.reshape(rows // TILE[0], TILE[0], columns // TILE[1], TILE[1]).swapaxes(1, 2)


@pytest.mark.rotating(3)
@pytest.mark.quick("causal", "function", "lengths", "segments")
@pytest.mark.parametrize("name", CASES)
def test_classes_agree_with_the_elements(name):
    """A skipped tile has no valid element, a full one no invalid element. A partial tile has both,
    except at the end of the arrays and at bounds of ids, where kernels test more than necessary.
    Rows beyond the lengths do not count, because their results are never read.
    """
    mask, offsets = CASES[name]
    position = None if offsets is None else offsets.position()
    batches = 2 if name in ("lengths", "segments", "boolean", "or") or offsets else 1
    wanted = np.asarray(jax.jit(lambda: mask.as_array(batches, 1, T, S, position))())[:, 0]
    for batch, want in enumerate(wanted):
        picture = mask.picture(T, S, tile=TILE, batch=batch, offsets=offsets)
        np.testing.assert_array_equal(picture.valid, want)
        found = tiles(want[: (30, 9)[batch]] if name == "lengths" else want)
        classes = picture.classes[: len(found)]
        assert not picture.classes[len(found) :].any()
        some, every = (found == 1).any((2, 3)), (found == 1).all((2, 3))
        assert not some[classes == 0].any()
        assert (found != 0).all((2, 3))[classes == 1].all()
        if name not in ("segments", "empty"):
            assert (classes == 0)[~some].all()
            assert (classes[every] == 1).all()


@pytest.mark.quick
def test_tiles_are_those_that_a_block_mask_has():
    mask = MASKS["segments"]
    picture = mask.picture(T, S, tile=(64, 64))
    blocks = mask.blocks(jnp.ones((2, T, 1, 8)), jnp.ones((2, S, 1, 8))).block_masks[0]
    assert picture.classes[0, 0] == blocks[0, 0, 0, 0] == 2


@pytest.mark.quick
def test_a_large_mask_is_drawn_by_tiles():
    drawn = str(Mask.causal().picture(128 * 100))
    header, legend, *lines = drawn.splitlines()
    assert "4950 skipped, 100 partial, 4950 full; 50% computed" in header
    assert "3 x 3 tiles" in legend
    assert len(lines) == 34
    assert lines[2] == "████▒▒" + ("· " * 31).rstrip()


@pytest.mark.quick
def test_a_call_draws_bias_and_function(capsys):
    x = jnp.ones((2, 16, 2, 8))
    bias = jnp.where(jnp.arange(16) < 4, -jnp.inf, jnp.arange(16.0))[None]
    picture = jax_memeff.picture(
        x, x, x, bias, score_mod=lambda s, b, h, q, k: s + 100 * h - q, batch=1, head=1
    )
    assert picture.values is not None
    rows, columns = np.ogrid[:16, :16]
    np.testing.assert_array_equal(
        picture.values, np.where(columns < 4, -np.inf, 100 - rows + columns)
    )
    picture.show()
    out = capsys.readouterr().out
    assert "a score of 0 becomes 89 (▁) to 115 (█)" in out
    assert out.splitlines()[2].startswith("· · · · ▅")
    moved = jax_memeff.picture(
        x, x, x, score_mod=lambda s, b, h, q, k: s + 100 * b + q, offsets=Offsets(batch=3, query=7)
    )
    assert moved.values is not None
    np.testing.assert_array_equal(moved.values[:, 0], 307 + np.arange(16))


@pytest.mark.quick
def test_a_call_has_the_tiles_of_its_kernel():
    x = jnp.ones((1, 4096, 16, 128), jnp.bfloat16)
    found = jax_memeff.picture(x, x, x, is_causal=True, arch="sm_90a")
    assert found.tile == (128, 128) and "d128_128x128_causal" in found.title
    assert jax_memeff.picture(x, x, x, arch="sm_80").tile != (128, 128)
    assert str(found).startswith(found.title + "\n")


@pytest.mark.quick
def test_values_that_are_all_masked_or_equal():
    x = jnp.ones((1, 4, 1, 8))
    nothing = jax_memeff.picture(x, x, x, bias=jnp.full((4, 4), -jnp.inf))
    assert "all elements are masked" in str(nothing)
    assert "0 (▁) to 0 (█)" in str(jax_memeff.picture(x, x, x, bias=jnp.zeros((4, 4))))


@pytest.mark.quick
def test_values_that_mask_or_are_not_finite():
    """The call masks scores below -1e37, and its output is NaN where a score is NaN or +inf."""
    x = jnp.ones((1, 4, 1, 8))
    lowest = jnp.finfo("float32").min
    bias = jnp.array([[0, 1, 2, -1e38], [lowest, 0, 2, 2], [jnp.nan, 0, 2, 2], [jnp.inf, 0, 2, 2]])
    picture = jax_memeff.picture(x, x, x, bias, is_causal=True)
    _, legend, *lines = str(picture).splitlines()
    assert legend == "a score of 0 becomes 0 (▁) to 2 (█), · masked, ! NaN or inf"
    assert lines == ["▁▁· · ·", "· ▁▁· ·", "! ▁▁██·", "! ▁▁████"]
    np.testing.assert_array_equal(picture.valid, np.tri(4, dtype=bool) & (bias != lowest))
    out = jax_memeff.dot_product_attention(x, x, x, bias, is_causal=True)[0, :, 0, 0]
    np.testing.assert_array_equal(np.isnan(out), [False, False, True, True])
    below = jax_memeff.picture(x, x, x, score_mod=lambda s, b, h, q, k: jnp.where(k < q, -1e38, s))
    np.testing.assert_array_equal(below.valid, ~np.tri(4, k=-1, dtype=bool))
    nothing = jax_memeff.picture(x, x, x, jnp.full((4, 4), jnp.nan))
    assert "no element has a finite score, · masked, ! NaN or inf\n! ! ! !" in str(nothing)


def test_values_whose_difference_overflows():
    x = jnp.ones((1, 4, 1, 8))
    bias = jnp.where(jnp.arange(4) < 2, 3e38, -1e37)
    assert str(jax_memeff.picture(x, x, x, bias)).endswith("████▁▁▁▁")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Mask().picture(0), ValueError, "T must be at least 1, got 0"),
        (
            lambda: Mask().picture(10**8),
            ValueError,
            "at most 67108864 tiles, got 610351562500 tiles",
        ),
        (lambda: Mask().picture(4, tile=(8, 0)), ValueError, "columns of tile must be at least 1"),
        (lambda: Mask().picture(NOT_A_SIZE), TypeError, "T must be a Python integer, got 4.0"),
        (lambda: MASKS["lengths"].show(T, S, batch=2), ValueError, r"batch must be in \[0, 2\)"),
        (lambda: Mask().show(4, head=-1), ValueError, r"head must be in \[0, 1\), .* got -1"),
        (
            lambda: jax.jit(lambda ids: Mask.segments(ids, ids).show(4))(jnp.arange(4)),
            TypeError,
            "draw it outside jax.jit",
        ),
        (
            lambda: jax.jit(lambda x: jax_memeff.picture(x, x, x))(jnp.ones((1, 4, 1, 8))),
            TypeError,
            "query must hold concrete values",
        ),
        (
            lambda: jax_memeff.picture(*[jnp.ones((1, 4, 1, 8))] * 3, head=1),
            ValueError,
            r"head must be in \[0, 1\), got 1",
        ),
        (
            lambda: jax_memeff.picture(*[jnp.ones((1, 0, 1, 8))] * 3),
            ValueError,
            r"at least one .* row and column, got scores \[B, N, T, S\] = \[1, 1, 0, 0\]",
        ),
        (
            lambda: jax_memeff.picture(*[jnp.ones((1, 4, 1, 8))] * 3, batch=NOT_A_SIZE),
            TypeError,
            "batch must be a Python integer, got 4.0",
        ),
        (
            lambda: jax_memeff.picture(*[jnp.ones((1, 4, 1, 8))] * 3, arch=NOT_A_SIZE),
            TypeError,
            "arch must be a name such as 'sm_90a', or None, got 4.0",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.quick
def test_plots():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    picture = MASKS["causal"].picture(T, S, tile=TILE)
    axes = picture.plot()
    (image,) = axes.images
    kinds = np.asarray(image.get_array())
    np.testing.assert_array_equal(kinds >= 2, picture.valid)
    assert pictures.summary(picture).split(": ")[1] in axes.get_title()
    _, given = pyplot.subplots()
    x = jnp.ones((1, 8, 1, 8))
    drawn = jax_memeff.picture(x, x, x, bias=jnp.ones((8, 8)), is_causal=True)
    assert drawn.plot(given) is given
    assert np.ma.getmaskarray(given.images[1].get_array()).sum() == 28
    bias = jnp.zeros((8, 8)).at[:, 0].set(jnp.nan).at[:, 1].set(-jnp.inf)
    kinds = pictures.kinds_of(jax_memeff.picture(x, x, x, bias=bias))
    assert [list(pictures.COLORS_WITHOUT_VALUE)[kind] for kind in kinds[3, :2]] == [
        "NaN or inf",
        "masked",
    ]
    assert np.ma.getmaskarray(kinds)[:, 2:].all()
    with pytest.raises(TypeError, match=r"axes must be a matplotlib\.axes\.Axes .* got <Figure"):
        drawn.plot(given.figure)
    assert Mask.causal().plot(8, axes=pyplot.subplots()[1]).get_xlabel() == "key column"
    pyplot.close("all")


@pytest.mark.quick
def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.colors", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        Mask().picture(4).plot()
