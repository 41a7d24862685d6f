"""The overview of docs/benchmarks.md: every figure counts, and every loss is listed."""

from __future__ import annotations

import itertools
import json
import re
import statistics
import sys
from pathlib import Path

import pytest
from harness import modules

__all__ = ["modules"]

WAYS = {"pages64", "pages16", "float8", "invariant", "tree", "steps", "prompts"}
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/benchmarks.md"


@pytest.fixture
def overview(modules):
    return modules("overview")


README = ROOT / "README.md"


def block(name: str = "overview", page: Path = PAGE) -> str:
    (found,) = re.findall(
        rf"<!-- benchmarks:begin {name} -->\n(.*?)\n<!-- benchmarks:end -->",
        page.read_text(),
        re.DOTALL,
    )
    return found


def document(date, group, cells, peers=("fa4", "cudnn")):
    """Results whose cells are (name, head dim, {direction: seconds of ours and of the peers})."""
    return {
        "device": {"name": "GPU"},
        "date": date,
        "peers": {"memeff_cuda": "ours", **{name: name.upper() for name in peers}},
        "cells": [
            {
                "name": name,
                "group": group,
                "head_dim": head_dim,
                "results": {
                    direction: {
                        peer: {"error": "no"} if time is None else {"seconds": time}
                        for peer, time in zip(("memeff_cuda", *peers), times, strict=True)
                    }
                    for direction, times in results.items()
                },
            }
            for name, head_dim, results in cells
        ],
    }


DOCUMENTS = (
    document(
        "2026-02-01",
        "main",
        [
            ("T512", 128, {"forward": (1.0, 1.2, 0.5), "forward_backward": (1.0, 2.0, 3.0)}),
            ("T512", 64, {"forward": (1.0, None, 4.0), "forward_backward": (1.0, None, None)}),
        ],
    ),
    document("2026-01-01", "decode", [("T1", 64, {"forward": (1.0, 0.9)})], peers=("fa4",)),
    document("2026-03-01", "gallery", [("alibi", 64, {"forward": (1.0, 0.1)})], peers=("fa4",)),
    {"date": "2026-03-01", "device": {"name": "GPU"}, "ring": {}},
)


def test_each_cell_is_compared_with_its_fastest_peer(overview):
    rows = overview.rows(DOCUMENTS)
    assert [row.title for row in rows] == [
        "main grid, head dim 64",
        "main grid, head dim 128",
        "few queries, long keys",
    ]
    assert [(cell.direction, cell.ratio, cell.peer) for cell in rows[1].cells] == [
        ("forward", 0.5, "CUDNN"),
        ("forward_backward", 2.0, "FA4"),
    ]
    assert [row.peers for row in rows] == [("CUDNN",), ("FA4", "CUDNN"), ("FA4",)]
    assert not rows[0].of("forward_backward")


def test_losses_come_first_and_every_date_is_there(overview):
    text = overview.text(overview.rows(DOCUMENTS), "images/overview.svg")
    assert text.startswith("GPU, measured 2026-01-01 to 2026-02-01: 4 figures,")
    assert "as fast or faster in 2, and slower in 2." in text
    assert "](images/overview.svg)" in text
    losses = text.split("### Where a peer is faster\n")[1].splitlines()
    assert losses[-2:] == [
        "| T512 | forward | 0.50 | CUDNN | 2026-02-01 |",
        "| T1 | forward | 0.90 | FA4 | 2026-01-01 |",
    ]
    assert "| few queries, long keys | 0.90 | 0.90 | 1 of 1 |  |  |  | 2026-01-01 |" in text
    assert "- CUDNN, FA4: main grid, head dim 128" in text


def test_without_a_loss_there_is_no_list(overview):
    won = document("2026-01-01", "small", [("T8", 64, {"forward": (1.0, 1.0, 1.2)})])
    text = overview.text(overview.rows([won]), "o.svg")
    assert "slower in 0." in text and "Where a peer is faster" not in text


def test_the_picture_names_every_row_and_its_losses(overview, tmp_path):
    rows = overview.rows(DOCUMENTS)
    path = tmp_path / "images" / "overview.svg"
    overview.draw(rows, path)
    drawn = path.read_text()
    for title, count in (("head dim 64", "0 of 1"), ("head dim 128", "1 of 2"), ("keys", "1 of 1")):
        assert f"{title}</text>" in drawn and f": {count} slower</text>" in drawn
    overview.draw(rows, path)
    assert path.read_text() == drawn


def test_every_word_of_the_picture_can_be_read(overview, modules):
    """The results of the repository are from several devices, whose names are long."""
    documents = map(modules("report").read, sorted((ROOT / "benchmarks/results").glob("*.json")))
    rows = overview.rows(documents)
    figure = modules("overview.picture").drawn(rows)
    figure.draw_without_rendering()
    devices = list(dict.fromkeys(row.device for row in rows))
    assert [axis.get_title("left") for axis in figure.axes] == devices
    ticks = [label for axis in figure.axes for label in axis.get_yticklabels()]
    last = figure.axes[-1]
    for words in (*ticks, last.xaxis.label, *last.get_xticklabels()):
        box = words.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= figure.bbox.x1, words.get_text()
        assert 0 <= box.y0 < box.y1 <= figure.bbox.y1, words.get_text()
    numbers = [label.get_window_extent() for label in last.get_xticklabels()]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(numbers))


def test_the_page_has_all_results_of_the_repository(overview, modules):
    """Counted here once more, from the files."""
    device_title = modules("reporting.results").device_title
    losses, figures = [], 0
    for path in sorted((ROOT / "benchmarks/results").glob("*.json")):
        results = json.loads(path.read_text())
        cells = [(cell["name"], cell["results"]) for cell in results.get("cells", ())]
        steps = [(step["name"], {"forward": step["results"]}) for step in results.get("steps", ())]
        for name, directions in cells + steps:
            for direction, records in directions.items():
                # A peer whose results are wrong counts as one without a figure. Ways to store the
                # keys of a server are no peers.
                seconds = {
                    peer: record["seconds"]
                    for peer, record in records.items()
                    if "seconds" in record
                    and record.get("difference", 0) < 0.05
                    and peer not in WAYS
                }
                own = seconds.get("memeff_cuda", seconds.get("memeff_xla"))  # on a CPU
                others = [time for peer, time in seconds.items() if not peer.startswith("memeff")]
                if own is not None and others:
                    figures += 1
                    if round(min(others) / own, 2) < 1:
                        losses.append(
                            (
                                f"{name} ({device_title(results)})",
                                direction.replace("_", " + "),
                                min(others) / own,
                            )
                        )
    text = block()
    assert f": {figures} figures, each compared with" in text, (
        "run: benchmarks/report.py RESULTS.json"
    )
    assert f"slower in {len(losses)}." in text
    for name, direction, ratio in losses:
        assert f"| {name} | {direction} | {ratio:.2f} |" in text


def test_the_page_is_up_to_date(overview, modules):
    read = modules("reporting.results").read
    files = sorted((ROOT / "benchmarks/results").glob("*.json"))
    text = overview.text(overview.rows(map(read, files)), "images/overview.svg")
    assert block() == text, "run: python benchmarks/report.py benchmarks/results/<device>-main.json"
    assert (ROOT / "docs/images/overview.svg").exists()


def test_the_extract_of_the_readme_is_up_to_date(overview, modules):
    read = modules("reporting.results").read
    rows = overview.rows(map(read, sorted((ROOT / "benchmarks/results").glob("*.json"))))
    assert block("extract", README) == overview.extract(rows), (
        "run: python benchmarks/report.py benchmarks/results/<device>-main.json"
    )


def test_the_extract_merges_head_dims_and_counts_all_figures(overview, modules, monkeypatch):
    rows = overview.rows(DOCUMENTS)
    monkeypatch.setattr(modules("overview.text"), "EXTRACT", {"GPU": ("main grid",)})
    text = overview.extract(rows)
    assert ": 4 figures," in text and "slower in 2." in text
    assert text.endswith("| main grid | 1.41 | 0.50 | 2.00 | 2.00 | 1 of 3 | CUDNN, FA4 |")
    monkeypatch.setattr(modules("overview.text"), "EXTRACT", {"GPU": ("float32",)})
    with pytest.raises(ValueError, match=r"expected results for \[\('GPU', 'float32'\)\]"):
        overview.extract(rows)


RATIO = r"(\d\.\d\d)"


def test_figures_in_the_prose_of_the_readme_are_those_of_the_results(overview, modules):
    """Each is computed here from the seconds in the files."""

    prose = " ".join(README.read_text().split())

    def stated(pattern: str) -> list[float]:
        (found,) = re.findall(pattern, prose)
        return [float(figure) for figure in ((found,) if isinstance(found, str) else found)]

    def ratios(results: str, peer: str, name: str = "", direction: str = "forward_backward"):
        read = json.loads((ROOT / f"benchmarks/results/{results}.json").read_text())
        records = [
            cell["results"].get(direction, {}) for cell in read["cells"] if name in cell["name"]
        ]
        own = "memeff_cuda" if "memeff_cuda" in read["peers"] else "memeff_xla"
        return [
            each[peer]["seconds"] / each[own]["seconds"]
            for each in records
            if "seconds" in each.get(peer, {}) and "seconds" in each.get(own, {})
        ]

    def mean(values):
        return round(statistics.geometric_mean(values), 2)

    features = "nvidia-h200-features"
    for pattern, name in (
        (
            rf"4,096 tokens.{{,60}} at {RATIO} times .{{,60}} {RATIO} times that",
            "hd128 B8 N32/8 T4096 causal",
        ),
        (rf"32,768 tokens at {RATIO} and {RATIO} times", "hd128 B1 N32/8 T32768 causal"),
    ):
        figures = [ratios(features, peer, name) for peer in ("jax_cudnn", "fa4")]
        assert stated(pattern) == [round(each[0], 2) for each in figures]

    both = ratios("nvidia-h200-compute_80", "torch_flash", direction="forward")
    pair = [both, ratios("nvidia-h200-compute_80", "torch_flash")]
    assert stated(rf"are at {RATIO} and {RATIO} times FlashAttention-2 \({RATIO} at worst\)") == [
        *map(mean, pair),
        round(min(pair[0] + pair[1]), 2),
    ]
    assert stated(rf"head dim 1024 {RATIO} of plain XLA") == [
        round(min(ratios("nvidia-h200-large_dims", "jax_xla", "hd1024")), 2)
    ]
    # Those with several peers are in the extract, which another test compares with the results.
    lines = {
        line.split(" | ")[0][2:]: line.split(" | ")
        for line in block("extract", README).splitlines()
    }

    def cells(title: str, *columns: int) -> list[float]:
        return [float(lines[title][column]) for column in columns]

    assert stated(rf"{RATIO} of the fastest peer \({RATIO} at worst, H100\)") == cells(
        "steps of a server (NVIDIA H100 80GB HBM3)", 1, 2
    )
    assert stated(rf"it is {RATIO} or more times") == [
        min(cells("bias, dropout, both (NVIDIA H200)", 2, 4))
    ]
    assert stated(
        rf"{RATIO} times as fast as `jax.nn` .{{,40}} {RATIO} times .{{,40}} "
        rf"\({RATIO} at worst, two threads"
    ) == cells("plain JAX on a CPU (Intel(R) Xeon(R) Processor on 2 threads)", 1, 3, 2)


def test_the_report_writes_the_overview_beside_the_block_of_its_results(
    modules, overview, tmp_path, monkeypatch
):
    page, image = tmp_path / "page.md", tmp_path / "benchmarks.svg"
    page.write_text(f"{overview.MARKER}\nold\n<!-- benchmarks:end -->\n")
    results = next((ROOT / "benchmarks/results").glob("*-gallery_errors.json"))
    report = modules("report")
    arguments = ["report.py", str(results), "--into", str(page), "--plot", str(image)]
    monkeypatch.setattr(sys, "argv", arguments)
    report.main()
    assert "](overview.svg)" in page.read_text() and "old" not in page.read_text()
    assert (tmp_path / "overview.svg").read_text().startswith("<?xml")
