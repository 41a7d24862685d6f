"""The report of the results of the benchmark harness."""

import copy
import json
import sys

import pytest
from harness import document, modules

__all__ = ["document", "modules"]


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


def test_results_of_another_architecture_have_a_block_of_their_own(document, modules):
    report, made = modules("report"), _synthetic(document)
    made["residency"] = {"arch": "compute_86", "kernels": {}}
    blocks = report.blocks(made, None)
    assert set(blocks) == {"compute_86"}
    marked = "<!-- benchmarks:begin compute_86 -->\n<!-- benchmarks:end -->"
    assert "with kernels for compute_86" in report.insert(marked, blocks)


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
    assert "| wide, forward | 3.0 | n/a |\n" in text


def test_report_names_a_missing_marker(modules):
    with pytest.raises(ValueError, match="benchmarks:begin NAME"):
        modules("report").insert("no marker here", {"tables": ""})


@pytest.mark.parametrize("other, is_wrong", [(0.003, True), (0.8, False)])
def test_a_peer_with_wrong_results_has_no_figure(other, is_wrong, modules, tmp_path):
    """If no peer agrees with ours, it is unknown which results are wrong."""
    results = modules("reporting.results")
    records = {
        "memeff_cuda": {"seconds": 2.0},
        "fa4": {"seconds": 1.0, "difference": 1.31},
        "torch_cudnn": {"seconds": 3.0, "difference": other},
    }
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"cells": [{"name": "T512", "results": {"forward": records}}]}))
    (cell,) = results.read(path)["cells"]
    ratios = modules("reporting.ratios").ratios
    (ratio,) = ratios([cell], "forward", "memeff_cuda", ["fa4", "torch_cudnn"]).values()
    assert ratio == (1.5 if is_wrong else 0.5)
    assert ("error" in cell["results"]["forward"]["fa4"]) == is_wrong
