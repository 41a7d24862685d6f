"""The tables of the results of the benchmark harness."""

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
            results["memeff_xla"] |= {"seconds": 1e-3}
            results["jax_xla"] |= {"seconds": 1e-3 * factor}
        made["cells"].append(cell)
    return made


def test_report_prints_the_tables_of_one_file(document, modules, tmp_path, monkeypatch, capsys):
    results = tmp_path / "r.json"
    results.write_text(json.dumps(_synthetic(document)))
    monkeypatch.setattr(sys, "argv", ["report.py", str(results)])
    modules("report").main()
    text = capsys.readouterr().out
    assert "jax.nn XLA 1.41 (2) and 1.41 (2)." in text
    assert "|T512|1000|2000|2.00|1000|2000|2.00|\n" in text
    assert "torch FlashAttention-2" not in text  # it has no figure here
    assert "200 random shapes of one feature set compile 2 kernels." in text
    assert "(`r.json`)." in text


def test_a_call_of_ours_that_failed_is_a_loss(document, modules):
    made = _synthetic(document)
    for results in made["cells"][0]["results"].values():
        results["memeff_xla"] = {"error": "no kernel"}
    (group,) = modules("overview").of_document(made)
    assert [result.is_slower for result in group.compared()] == [True, True, False, False]
    assert "|T512|failed|2000|**0.00**|" in modules("overview").text.section(group)


def test_a_cell_that_no_peer_computes_is_in_the_table(document, modules):
    made = _synthetic(document)
    for results in made["cells"][0]["results"].values():
        results["jax_xla"] = {"error": "has no argument for documents"}
    (group,) = modules("overview").of_document(made)
    assert len(group.compared()) == 2
    assert "|T512|1000|none||1000|none||" in modules("overview").text.section(group)


def test_the_fastest_peer_of_each_cell_counts(document, modules):
    made = _synthetic(document)
    made["cells"][1]["group"] = "features"
    for results in made["cells"][0]["results"].values():
        results["torch_flash"] = {"seconds": 5e-4}
    text = modules("report").tables(made)
    assert "|main grid|forward: ours|torch FlashAttention-2|ratio|" in text
    assert "|T512|1000|500|**0.50**|1000|500|**0.50**|" in text
    assert "|T2048|1000|1000|1.00|1000|1000|1.00|" in text
    made["cells"][1]["group"] = "main"
    text = modules("report").tables(made)
    own = "500 torch FlashAttention-2|**0.50**"
    assert f"|T512|1000|{own}|1000|{own}|" in text
    assert "|T2048|1000|1000 jax.nn XLA|1.00|1000|1000 jax.nn XLA|1.00|" in text


def test_ours_is_the_first_of_ours_among_the_peers(document, modules):
    made = _synthetic(document)
    for cell in made["cells"]:
        for results in cell["results"].values():
            results["memeff_deterministic"] = {"seconds": 2e-3}
    made["peers"] = {"memeff_deterministic": "a", "memeff_xla": "b", "jax_xla": "jax.nn XLA"}
    (group,) = modules("overview").of_document(made)
    assert [result.seconds for result in group.results] == [2e-3] * 4
    assert {label for result in group.results for label in result.peers} == {"jax.nn XLA"}


def test_memory_is_reported_in_a_table_of_its_own(document, modules):
    made = copy.deepcopy(document)
    cell = made["cells"][0]
    assert all(cell["results"]["forward"][name]["temporary_bytes"] > 0 for name in ("jax_xla",))
    assert "## Memory" not in modules("report").tables(made)
    cell |= {"group": "memory", "name": "wide"}
    cell["results"]["forward"]["memeff_xla"]["temporary_bytes"] = 3 * 2**20
    cell["results"]["forward"]["jax_xla"]["temporary_bytes"] = None
    text = modules("report").tables(made)
    assert "|wide, forward|3.0|n/a|" in text


def test_report_names_a_missing_marker(modules):
    with pytest.raises(ValueError, match="benchmarks:begin NAME"):
        modules("report").insert("no marker here", {"index": ""})
    with pytest.raises(ValueError, match=r"the names \['other'\]"):
        marked = "<!-- benchmarks:begin other -->\n<!-- benchmarks:end -->"
        modules("report").insert(marked, {"index": ""})


@pytest.mark.parametrize("other, is_wrong", [(0.003, True), (0.8, False)])
def test_a_peer_with_wrong_results_has_no_figure(other, is_wrong, modules, tmp_path):
    """If no peer agrees with ours, it is unknown which results are wrong."""
    records = {
        "memeff_cuda": {"seconds": 2.0},
        "fa4": {"seconds": 1.0, "difference": 1.31},
        "torch_cudnn": {"seconds": 3.0, "difference": other},
    }
    document = {
        "date": "2026-01-01",
        "device": {"name": "GPU"},
        "versions": {},
        "peers": {"memeff_cuda": "ours", "fa4": "FA4", "torch_cudnn": "cuDNN"},
        "cells": [{"name": "T512", "group": "main", "results": {"forward": records}}],
    }
    path = tmp_path / "r.json"
    path.write_text(json.dumps(document))
    read = modules("reporting.results").read(path)
    ((result,),) = (group.compared() for group in modules("overview").of_document(read))
    assert result.ratio == (1.5 if is_wrong else 0.5)
    assert ("error" in read["cells"][0]["results"]["forward"]["fa4"]) == is_wrong
