"""The benchmark harness on the CPU, and the report that is made of its results."""

import copy
import doctest
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def modules(monkeypatch):
    """Imports a module of the harness, which is a folder of scripts and no package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    """What the command writes for small cells and two peers that run on the CPU."""
    path = tmp_path_factory.mktemp("results") / "results.json"
    command = [sys.executable, str(BENCHMARKS / "attention.py"), "--cells", "tiny"]
    command += ["--peers", "memeff_xla,jax_xla,torch_flash", "--host", "dispatch"]
    command += ["--rounds", "2", "--batch-ms", "1", "--output", str(path)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    "name", ["attention", "cells", "host_cost", "jax_programs", "peers", "report", "timing"]
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
            # On the CPU torch has no figure, whether it is installed or not.
            assert "torch" in results["torch_flash"]["error"]
            assert results["jax_xla"]["difference"] < 1e-5


def test_the_timed_loop_holds_the_calls(document):
    for cell in document["cells"]:
        for results in cell["results"].values():
            loop = results["jax_xla"]["loop_body"]
            # Scores, softmax and output at least: nothing was hoisted out of the loop.
            assert sum(loop.values()) > 3, loop


def test_dispatch_is_timed_for_both_directions(document):
    rows = document["host"]["dispatch"]
    for direction in ("forward", "forward_backward"):
        assert set(rows[direction]) == {"bare", "memeff_xla", "jax_xla"}
        assert all(row["us"] > 0 for row in rows[direction].values())


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
    programs = {"good": Fails(endless), "early": Fails(0), "late": Fails(3)}
    outcomes = timing.measure(programs, rounds=3, batch_seconds=1e-9)
    assert len(outcomes["good"].samples) == 3
    assert outcomes["early"] == outcomes["late"] == timing.Failure("RuntimeError: out of memory")


def _synthetic(document):
    """A grid of the main group, ours twice as fast as one peer at T = 512 and equal at 2048."""
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
    assert "| torch FlashAttention-2 | 0 | n/a | n/a | 0 | n/a | n/a |" in text
    assert "| T512 | **400** | 200 | [1] |" in text
    assert "![TFLOP/s over the sequence length](plot.svg)" in text
    assert "200 random shapes of one feature set compile 2 kernels." in text
    drawn = image.read_bytes()
    assert drawn.startswith(b"<?xml")

    report.main()
    assert page.read_text() == text
    assert image.read_bytes() == drawn


def test_few_queries_are_reported_as_bandwidth(document, modules):
    made = copy.deepcopy(document)
    cell = made["cells"][0]
    cell |= {"group": "decode", "name": "few"}
    del cell["results"]["forward_backward"]
    for record, rate in zip(cell["results"]["forward"].values(), (3e12, 2e12), strict=False):
        record |= {"bytes_per_second": rate, "ratio_to_best": rate / 3e12}
    made["device"]["copy_bytes_per_second"] = 4.3e12
    text = modules("report").tables(made, None)
    assert "The device copies 4.3 TB/s, read and written." in text
    assert "| few | **3** | 2 | [1] |" in text
    assert text.count("| few |") == 1
    assert document["device"]["copy_bytes_per_second"] > 0


def test_report_names_a_missing_marker(modules):
    with pytest.raises(ValueError, match="benchmarks:begin NAME"):
        modules("report").insert("no marker here", {"tables": ""})


def test_unknown_names_are_refused_with_the_known_ones(modules):
    with pytest.raises(ValueError, match="expected some of tiny, small, quick, main"):
        modules("cells").cells("tiny,huge")
    with pytest.raises(ValueError, match="expected 'all' or some of memeff_cuda"):
        modules("peers").peers("memeff")
