"""The serving example: every completion equals that of the model without a cache."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def example():
    """The example as a module, beside train_gpt, which it imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module("serve")


@pytest.fixture(scope="module")
def weights(example, tmp_path_factory):
    """A folder with the weights of a few steps."""
    folder = tmp_path_factory.mktemp("serve")
    assert example.main(["--preset", "tiny", "--output", str(folder)]) == 0
    return folder


def test_completions_are_equal_and_files_are_left(example, weights, capsys):
    assert example.main(["--preset", "tiny", "--output", str(weights)]) == 0
    printed = capsys.readouterr().out
    assert "training" not in printed  # there are weights already
    assert "8 of 8 completions equal those without a cache" in printed
    served = json.loads((weights / "served.json").read_text())
    assert served["equal"] == served["requests"] == 8
    assert max(state["shared"] for state in served["history"]) > 0
    assert (weights / "pool.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert (weights / "completions.txt").read_text(encoding="utf-8").count("--- ") >= 8


@pytest.mark.rotating(3)
def test_pages_of_one_token(example, weights, capsys):
    arguments = ["--preset", "tiny", "--page-size", "1", "--output", str(weights)]
    assert example.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "8 of 8 completions equal those without a cache" in printed
    assert "of 224 pages in use" in printed


def test_a_full_pool(example, weights):
    """Requests wait until completions free their pages, and results are still equal."""
    load = dataclasses.replace(example.LOADS["tiny"], pages=6, requests=12, arrivals=3.0)
    preset = example.PRESETS["tiny"]
    path = weights / "weights_tiny_0.npz"
    graph, parameters = example.trained(preset, load.training_steps, 0, path)
    text = example.standard_library_text()[1]
    prefixes, requests = example.random_requests(load, text, seed=1)
    server = example.Server(graph, parameters, preset, load, None)
    result = example.serve(server, prefixes, requests)
    assert max(state["used"] for state in result["history"]) == load.pages
    assert max(state["waiting"] for state in result["history"]) > 3
    assert server.preempted > 0
    assert all(len(request.tokens) == request.prompt + request.completion for request in requests)
    assert all(example.without_cache(graph, parameters, requests, load.longest))
    requests[2].tokens[-1] ^= 1
    same = example.without_cache(graph, parameters, requests, load.longest)
    assert same == [index != 2 for index in range(len(requests))]
    for prefix in prefixes:
        server.pool.free(prefix.sequence)
    assert server.pool.free_pages == load.pages


def test_a_page_size_that_no_pool_has(example, capsys):
    with pytest.raises(SystemExit):
        example.main(["--preset", "tiny", "--page-size", "3"])
    said = "--page-size: page_size must be 1, 2, 4, 8 or a multiple of 16, got 3"
    assert said in capsys.readouterr().err


def test_a_pool_that_is_too_small(example, capsys):
    with pytest.raises(SystemExit):
        example.main(["--preset", "tiny", "--pages", "3"])
    assert "--pages: expected at least 6, got 3" in capsys.readouterr().err
