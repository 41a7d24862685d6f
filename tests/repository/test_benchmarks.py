"""The benchmark harness on the CPU, and the report of its results."""

import copy
import doctest
import importlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def modules(monkeypatch):
    """Imports a module of the harness, a folder of scripts that is not a package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    """The command's results for small cells and two peers that run on the CPU."""
    path = tmp_path_factory.mktemp("results") / "results.json"
    command = [sys.executable, str(BENCHMARKS / "attention.py"), "--cells", "tiny"]
    command += ["--peers", "memeff_xla,jax_xla,torch_flash", "--host", "dispatch"]
    command += ["--rounds", "2", "--batch-ms", "1", "--output", str(path)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    "name",
    [
        "attention",
        "cells",
        "first_minutes",
        "host_cost",
        "jax_programs",
        "markdown_table",
        "overview.comparison",
        "peers",
        "report",
        "ring",
        "server.calls",
        "server.steps",
        "server.table",
        "timing",
        "user_functions.in_jax",
        "user_functions.table",
    ],
)
def test_examples_in_docstrings(modules, name):
    failed, attempted = doctest.testmod(modules(name))
    assert attempted > 0
    assert failed == 0


def test_every_peer_has_a_figure_or_a_reason(document):
    assert len(document["cells"]) == 3
    for cell in document["cells"]:
        directions = ["forward", "forward_backward"] if cell["gradients"] else ["forward"]
        assert list(cell["results"]) == directions
        for results in cell["results"].values():
            assert list(results) == ["memeff_xla", "jax_xla", "torch_flash"]
            for name in ("memeff_xla", "jax_xla"):
                assert results[name]["seconds"] > 0, results[name]
            # On the CPU torch has no figure, installed or not.
            assert "torch" in results["torch_flash"]["error"]
            assert results["jax_xla"]["difference"] < 1e-5


def test_the_timed_program_holds_every_call(document):
    for cell in document["cells"]:
        for results in cell["results"].values():
            record = results["jax_xla"]
            assert record["calls_per_launch"] > 1
            # At least scores, softmax and output: XLA merged or dropped no call.
            assert sum(record["operations"].values()) > 3, record["operations"]


def test_dispatch_is_timed_for_both_directions(document):
    rows = document["host"]["dispatch"]
    for direction in ("forward", "forward_backward"):
        assert set(rows[direction]) == {"bare", "memeff_xla", "jax_xla"}
        assert all(row["us"] > 0 for row in rows[direction].values())


def test_the_ring_is_timed_beside_the_share_of_a_device(modules, tmp_path, monkeypatch):
    path = tmp_path / "ring.json"
    command = [sys.executable, str(BENCHMARKS / "ring.py"), "--devices", "2", "--tokens", "64"]
    command += ["--heads", "4", "--key-heads", "2", "--head-dim", "8", "--dtype", "float32"]
    command += ["--implementation", "xla", "--rounds", "1", "--batch-ms", "1"]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    result = subprocess.run(
        [*command, "--output", str(path)], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    document = json.loads(path.read_text())
    assert document["ring"]["devices"] == 2 and document["ring"]["heads"] == 4
    # Two of the four heads, with 4 H operations for each pair of query and key, half of them
    # masked.
    share = {"forward": 4 * 2 * 64**2 / 2 * 8}
    share["forward_backward"] = 3.5 * share["forward"]
    for direction, results in document["ring"]["results"].items():
        for record in results.values():
            flops = record["tflops_per_device"] * 1e12 * record["seconds"]
            assert flops == pytest.approx(share[direction])
        ratio = results["share"]["seconds"] / results["ring"]["seconds"]
        assert results["ring"]["of_one_device"] == pytest.approx(ratio)
        assert results["ring"]["difference"] < 1e-5
        assert results["ring"]["transfers"] > 0

    page = tmp_path / "page.md"
    page.write_text(
        "<!-- benchmarks:begin tables -->\nkept\n<!-- benchmarks:end -->\n"
        "<!-- benchmarks:begin ring -->\nstale\n<!-- benchmarks:end -->\n"
    )
    monkeypatch.setattr(sys, "argv", ["report.py", str(path), "--into", str(page)])
    modules("report").main()
    text = page.read_text()
    assert "kept" in text and "stale" not in text
    assert f"| forward + backward, ring | {1e3 * results['ring']['seconds']:.1f} |" in text
    assert "| hd8 B1 N4/2 T64 float32 causal, 2 devices | ms |" in text


def test_the_steps_of_a_server_are_timed(modules, tmp_path, monkeypatch):
    path = tmp_path / "paged.json"
    command = [sys.executable, str(BENCHMARKS / "paged.py"), "--steps", "tiny"]
    command += ["--implementation", "xla", "--rounds", "1", "--batch-ms", "1"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [*command, "--output", str(path)], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    document = json.loads(path.read_text())
    assert [step["group"] for step in document["steps"]] == [
        "decode",
        "prompts",
        "ragged",
        "latent",
    ]
    for step in document["steps"]:
        assert list(step["results"]) == list(step["calls"])
        for name, record in step["results"].items():
            if name == "torch_flash":
                assert "error" in record
                continue
            assert record["seconds"] > 0, record
            # Pages hold the same tokens in another order, and float8 rounds them.
            limit = 0.06 if name == "float8" else 0.01
            assert record.get("difference", 0.0) < limit, (step["name"], name)
    assert all(row["us"] > 0 for row in document["host"].values())

    page = tmp_path / "page.md"
    page.write_text("<!-- benchmarks:begin paged -->\nstale\n<!-- benchmarks:end -->\n")
    monkeypatch.setattr(sys, "argv", ["report.py", str(path), "--into", str(page)])
    modules("report").main()
    text = page.read_text()
    assert "stale" not in text
    assert all(f"| {step['name']} |" in text for step in document["steps"])


def test_steps_and_their_calls(modules):
    """The goals of the project are stated for these steps."""
    steps, calls = modules("server.steps"), modules("server.calls").CALLS
    found = steps.steps("decode,prompts,ragged,latent")
    assert len({(step.group, step.name) for step in found}) == len(found) == 24
    assert set().union(*(step.calls for step in found)) >= set(calls)
    with pytest.raises(ValueError, match="expected some of decode, prompts, ragged, latent"):
        steps.steps("decode,huge")
    ragged = steps.ragged()[0]
    with pytest.raises(ValueError, match="one token per sequence"):
        calls["tree"].arrays(ragged, None)
    assert calls["steps"].sequences(ragged) == range(128)
    assert calls["prompts"].rows(ragged) == slice(128, 128 + 4 * 2048)


def test_measure_keeps_going_without_a_failing_program(modules):
    timing = modules("timing")

    class Fails:
        calls = 1

        def __init__(self, after):
            self.left = after

        def launch(self):
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("out of memory\nat length")

        def wait(self):
            pass

    endless = 10**9
    programs = {
        "good": Fails(endless),
        "early": Fails(0),
        "late": Fails(timing.WARM_UP_LAUNCHES + 3),
    }
    outcomes = timing.measure(programs, rounds=3, batch_seconds=1e-9)
    assert len(outcomes["good"].samples) == 3
    assert outcomes["early"] == outcomes["late"] == timing.Failure("RuntimeError: out of memory")


def test_no_program_always_follows_the_same_one(modules):
    launched = []

    class Records:
        calls = 1

        def __init__(self, name):
            self.name = name

        def launch(self):
            launched.append(self.name)

        def wait(self):
            pass

    timing = modules("timing")
    programs = {name: Records(name) for name in "abcdef"}

    def orders(seed):
        outcomes = timing.measure(programs, rounds=5, batch_seconds=1e-12, seed=seed)
        assert all(len(outcomes[name].samples) == 5 for name in programs)
        return np.reshape(launched[-5 * len(programs) :], (5, len(programs)))

    rounds = orders("a cell")
    assert (np.sort(rounds) == list(programs)).all()
    before = {name: set() for name in programs}
    for first, second in itertools.pairwise(rounds.ravel()):
        before[second].add(first)
    assert min(len(names) for names in before.values()) > 1
    assert (orders("a cell") == rounds).all()
    assert (orders("another cell") != rounds).any()


def _synthetic(document):
    """A grid of the main group: we are twice as fast as a peer at T = 512 and equal at 2048."""
    made = copy.deepcopy(document)
    template = made["cells"][0]
    made["cells"] = []
    made["host"]["first_result"] = {
        "cold": {"trace_and_lower": 6.5, "total": 9.0},
        "warm": {"error": "ValueError: no"},
    }
    made["host"]["kernel_count"] = {"shapes": 200, "kernels": ["a", "b"]}
    for length, factor in ((512, 2.0), (2048, 1.0)):
        cell = copy.deepcopy(template)
        cell |= {"group": "main", "name": f"T{length}", "query_length": length}
        for results in cell["results"].values():
            results["memeff_xla"] |= {"seconds": 1e-3, "tflops": 400.0, "ratio_to_best": 1}
            results["jax_xla"] |= {
                "seconds": 1e-3 * factor,
                "tflops": 400.0 / factor,
                "ratio_to_best": 1 / factor,
            }
        made["cells"].append(cell)
    return made


def test_report_writes_between_the_markers(document, modules, tmp_path, monkeypatch):
    report = modules("report")
    results, page, image = (tmp_path / name for name in ("r.json", "page.md", "plot.svg"))
    results.write_text(json.dumps(_synthetic(document)))
    page.write_text(
        "before\n<!-- benchmarks:begin tables -->\nstale\n<!-- benchmarks:end -->\n"
        "<!-- benchmarks:begin host -->\n<!-- benchmarks:end -->\nafter\n"
    )
    arguments = ["report.py", str(results), "--into", str(page), "--plot", str(image)]
    monkeypatch.setattr(sys, "argv", arguments)
    report.main()
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "stale" not in text
    assert "| jax.nn XLA | 2 | 1.41 | 1.00 (T2048) | 2 | 1.41 | 1.00 (T2048) |" in text
    assert "n/a" not in text.partition("benchmarks:end")[0]
    assert "- torch FlashAttention-2: `" in text
    fastest = "| the fastest of all, `main` cells |"
    assert f"{fastest} 2 | 1.41 | 1.00 (T2048) | 2 | 1.41 | 1.00 (T2048) |" in text
    assert "| T512 | **400** | 200 |\n" in text
    assert "![TFLOP/s over the sequence length](plot.svg)" in text
    assert "200 random shapes of one feature set compile 2 kernels." in text
    drawn = image.read_bytes()
    assert drawn.startswith(b"<?xml")

    report.main()
    assert page.read_text() == text
    assert image.read_bytes() == drawn


def test_results_beside_the_grid_have_a_plot_of_ratios(document, modules, tmp_path, monkeypatch):
    made = _synthetic(document)
    for cell in made["cells"]:
        cell["group"] = "masks"
    results, page, image = (tmp_path / name for name in ("r.json", "page.md", "plot.svg"))
    results.write_text(json.dumps(made))
    page.write_text("<!-- benchmarks:begin masks -->\n<!-- benchmarks:end -->\n")
    arguments = ["report.py", str(results), "--into", str(page), "--plot", str(image)]
    monkeypatch.setattr(sys, "argv", arguments)
    modules("report").main()
    assert "we are faster](masks.svg)" in page.read_text()
    drawn = (tmp_path / "masks.svg").read_text()
    assert not image.exists()
    for text in ("T512", "T2048", "jax.nn XLA", "Forward + backward: time of a peer / ours"):
        assert f">{text}<" in drawn
    assert "torch FlashAttention-2" not in drawn  # it has no figure here
    for other in ({"cells": [{"group": "functions"}]}, {"gallery_errors": []}, {"ring": {}}):
        assert modules("report").plot_path(other, image) is None
    made["peers"] = {"memeff_xla": "alone"}
    results.write_text(json.dumps(made))
    modules("report").main()
    assert "masks.svg" not in page.read_text()


def test_few_queries_are_reported_as_bandwidth(document, modules):
    made = copy.deepcopy(document)
    cell = made["cells"][0]
    cell |= {"group": "decode", "name": "few"}
    del cell["results"]["forward_backward"]
    for record, rate in zip(cell["results"]["forward"].values(), (3e12, 2e12), strict=False):
        record |= {"bytes_per_second": rate, "ratio_to_best": rate / 3e12}
    made["device"]["copy_bytes_per_second"] = 4.3e12
    text = modules("report").tables(made, None)
    assert "Negating an array reads and writes 4.3 TB/s." in text
    assert "| few | **3** | 2 |\n" in text
    assert text.count("| few |") == 1
    assert document["device"]["copy_bytes_per_second"] > 0


def test_the_fastest_peer_of_each_cell_counts(document, modules):
    made = _synthetic(document)
    made["cells"][1]["group"] = "features"
    for results in made["cells"][0]["results"].values():
        results["torch_flash"] = {"seconds": 5e-4}
    text = modules("report").summary(made)
    assert "`main` cells | 1 | 0.50 | 0.50 (T512) | 1 | 0.50 | 0.50 (T512) |" in text
    assert "`features` cells | 1 | 1.00 | 1.00 (T2048) |" in text


def test_ours_is_the_first_of_ours_among_the_peers(document, modules):
    report, made = modules("report"), _synthetic(document)
    slower = {"seconds": 1.1e-3}
    for cell in made["cells"]:
        for results in cell["results"].values():
            results["memeff_deterministic"] = slower
    made["peers"] = {"memeff_deterministic": "deterministic", "memeff_xla": "default"}
    text = report.summary(made)
    assert "speed of deterministic / peer" in text
    assert "| default | 2 | 0.91 | 0.91 (T512) |" in text
    assert "`main` cells | 0 | n/a |" in text


def test_memory_is_reported_in_a_table_of_its_own(document, modules):
    made = copy.deepcopy(document)
    cell = made["cells"][0]
    assert all(cell["results"]["forward"][name]["temporary_bytes"] > 0 for name in ("jax_xla",))
    assert "### Memory" not in modules("report").tables(made, None)
    cell |= {"group": "memory", "name": "wide"}
    cell["results"]["forward"]["memeff_xla"]["temporary_bytes"] = 3 * 2**20
    cell["results"]["forward"]["jax_xla"]["temporary_bytes"] = None
    text = modules("report").tables(made, None)
    assert "| wide, forward | 3 | n/a |\n" in text


def test_every_table_has_its_cells(modules):
    """The project promises figures for these cells: their sizes, features and number."""
    sets = modules("cells").SETS
    for name, number in (("main", 24), ("features", 18), ("float32", 4), ("deterministic", 14)):
        cells = sets[name]()
        assert len({cell.name for cell in cells}) == len(cells) == number
        for cell in cells:
            assert cell.batch * cell.query_length == 16384
            assert cell.heads * cell.head_dim == 2048
            assert cell.group == name and cell.gradients
    grid = {(c.head_dim, c.query_length, c.causal) for c in sets["main"]()}
    assert {dim for dim, _, _ in grid} == {64, 128, 256}
    assert {length for _, length, _ in grid} == {512, 2048, 8192, 16384}
    modified = {(c.query_length, c.bias, c.dropout) for c in sets["features"]()}
    assert modified == {
        (length, *modifier)
        for length in (2048, 4096)
        for modifier in ((True, 0), (False, 0.1), (True, 0.1))
    }
    capped = {c.soft_cap for c in sets["softcap"]()}
    assert capped == {None, 30.0}
    assert {c.heads // c.key_heads for c in sets["gqa"]()} == {8, 4}
    assert any((c.head_dim, c.value_dim) == (192, 128) for c in sets["dims"]())
    assert {(c.window, c.query_length) for c in sets["window"]()} == {(1024, 16384), (128, 16384)}
    shared, wide = sets["memory"]()
    assert shared.batch == 32 and shared.bias
    assert (wide.head_dim, wide.query_length) == (4096, 2048)


def test_peers_say_what_they_have_no_argument_for(modules):
    peers, sets = modules("peers").PEERS, modules("cells").SETS
    capped = next(cell for cell in sets["softcap"]() if cell.soft_cap)
    able = {name for name, peer in peers.items() if not peer.missing(capped)}
    assert able == {"memeff_cuda", "memeff_xla", "memeff_deterministic", "fa4"}
    function = sets["functions"]()[0]
    able = {name for name, peer in peers.items() if not peer.missing(function)}
    assert able == {"memeff_cuda", "memeff_xla", "memeff_deterministic", "memeff_plain", "flex"}
    everyone = {peer.name for peer in modules("peers").peers("all")}
    assert set(peers) - everyone == {"memeff_xla", "memeff_deterministic", "memeff_plain", "flex"}


def test_report_names_a_missing_marker(modules):
    with pytest.raises(ValueError, match="benchmarks:begin NAME"):
        modules("report").insert("no marker here", {"tables": ""})


def test_unknown_names_are_refused_with_the_known_ones(modules):
    with pytest.raises(ValueError, match="expected some of tiny, small, quick, main"):
        modules("cells").cells("tiny,huge")
    with pytest.raises(ValueError, match="expected 'all' or some of memeff_cuda"):
        modules("peers").peers("memeff")


def test_the_time_of_code_generation_has_the_lowering_and_the_generator(modules):
    generates_code = modules("first_result")._generates_code
    lowering = importlib.import_module("jax_memeff._cuda.lowering")
    select = importlib.import_module("jax_memeff.codegen.select")
    assert generates_code(lowering.__file__) and generates_code(select.__file__)
    assert not generates_code(importlib.import_module("jax_memeff._api.attention").__file__)
