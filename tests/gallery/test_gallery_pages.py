"""The pages and pictures of the gallery agree with its code."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

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


@pytest.mark.parametrize("name", ["prefix_lm", "head_windows", "swin_bias"])
def test_a_picture_draws_every_valid_element(pages, name):
    entry = ENTRIES[name]
    text = pages.picture(entry)
    ((width, height),) = re.findall(r'viewBox="0 0 (\d+) (\d+)"', text)
    drawn = np.full((int(height), int(width)), -1)
    for color, path in re.findall(r'<path stroke="([^"]+)" d="([^"]+)"', text):
        level = 0 if entry.is_mask else pages._LEVELS.index(color)
        for left, row, count in re.findall(r"M(\d+) (\d+)\.5h(\d+)", path):
            drawn[int(row), int(left) : int(left) + int(count)] = level
    shape = pages._MASK_SHAPE if entry.is_mask else pages._SCORE_SHAPE
    levels = pages._levels(entry, shape)
    np.testing.assert_array_equal(drawn[:, : shape.length], levels[0])
    if name != "prefix_lm":  # heads differ, so there is a second picture
        np.testing.assert_array_equal(drawn[:, -shape.length :], levels[1])


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
