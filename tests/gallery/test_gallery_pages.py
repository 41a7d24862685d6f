"""The pages and pictures of the gallery agree with its code."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from gallery.catalog import ENTRIES

ROOT = Path(__file__).parents[2]
LARGEST = 15_000


@pytest.fixture(scope="module")
def pages():
    spec = importlib.util.spec_from_file_location("gallery_pages", ROOT / "docs/gallery_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gallery_pages"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gallery_pages"]


def test_pages_and_pictures_are_up_to_date(pages):
    files = pages.files()
    there = {path for path in (ROOT / "docs/gallery").rglob("*") if path.is_file()}
    assert there == set(files), "run: python docs/gallery_pages.py"
    for path, text in files.items():
        assert path.read_text() == text, f"{path}: run: python docs/gallery_pages.py"
        assert len(text) <= LARGEST, path


def test_every_function_has_text_picture_and_code(pages):
    text = "".join(path.read_text() for path in pages.FOLDER.glob("*.md"))
    for name, entry in ENTRIES.items():
        assert f"## {entry.title}\n" in text
        assert f"/{name}.svg)" in text
        assert f"def {name}(" in text
    assert '"""' not in re.sub(r"```python\nfrom __future__.*?```", "", text, flags=re.DOTALL)


def drawn(text, colors):
    """The number of the color of each pixel of a picture, int [height, width]; -1 for none."""
    ((width, height),) = re.findall(r'viewBox="0 0 (\d+) (\d+)"', text)
    found = np.full((int(height), int(width)), -1)
    for color, path in re.findall(r'<path stroke="(#\w{6})" d="([^"]+)"', text):
        for left, row, count in re.findall(r"M(\d+) (\d+)\.5h(\d+)", path):
            found[int(row), int(left) : int(left) + int(count)] = colors.index(color)
    return found


def test_a_picture_draws_every_score(pages):
    levels = pages._levels(ENTRIES["swin_bias"])
    found = drawn(pages.picture(ENTRIES["swin_bias"]), pages._LEVELS)
    width = levels.shape[2]
    np.testing.assert_array_equal(found[:, :width], levels[0])
    np.testing.assert_array_equal(found[:, -width:], levels[1])


MASKS = [name for name, entry in ENTRIES.items() if entry.is_mask]


@pytest.mark.rotating(3)
@pytest.mark.parametrize("name", MASKS)
def test_a_picture_draws_every_element_and_the_class_of_its_tile(pages, name):
    """Compared with the dense mask: all elements of a tile that is drawn as skipped are masked."""
    entry, shape, tile = ENTRIES[name], pages._MASK_SHAPE, pages._TILE
    names = list(pages.pictures.COLORS)
    found = drawn(pages.picture(entry), list(pages.pictures.COLORS.values()))
    rows = entry.rows or shape.length
    call = entry.call(*entry.arguments(shape))
    sizes = 1, shape.heads, rows, shape.length
    dense = np.asarray(jax.jit(lambda: call["mask"].as_array(*sizes))())[0]
    assert not call["is_causal"]
    for head, left in enumerate(range(0, found.shape[1], shape.length + 4)):
        kinds = found[:, left : left + shape.length]
        is_valid = kinds >= names.index("valid in a partial tile")
        np.testing.assert_array_equal(is_valid, dense[head])
        for row in range(0, rows, tile):
            for column in range(0, shape.length, tile):
                here = slice(row, row + tile), slice(column, column + tile)
                own = {names[kind].split(" ")[-2] for kind in np.unique(kinds[here])}
                valid = dense[head][here]
                expected = "full" if valid.all() else "partial" if valid.any() else "skipped"
                assert own == {expected}, (head, here)
    counts = re.findall(r"(\d+) skipped, (\d+) partial, (\d+) full", pages._tiles(entry)[0])
    for numbers in counts:
        assert sum(map(int, numbers)) == -(-rows // tile) * shape.length // tile


def test_speeds_come_from_results(pages, tmp_path, monkeypatch):
    assert pages._ratio({"memeff_plain": {"seconds": 1.0}, "memeff_cuda": {"error": "no"}}) == 0
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    records = {"memeff_plain": {"seconds": 3.0}, "memeff_cuda": {"seconds": 4.0}}
    cell = {"function": "gallery alibi", "head_dim": 64, "query_length": 4096}
    results = {"forward": records, "forward_backward": records}
    document = {"device": {"name": "GPU"}, "cells": [{**cell, "results": results}]}
    (folder / "gpu-gallery.json").write_text(pages.json.dumps(document))
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    (sentence,) = pages._speed(ENTRIES["alibi"])
    assert "forward 0.75, forward + backward 0.75" in sentence
    assert pages._speed(ENTRIES["soft_cap"]) == []
