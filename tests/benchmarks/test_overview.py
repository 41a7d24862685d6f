"""The pages of benchmarks: every figure counts, every loss is listed, CPUs stay apart."""

from __future__ import annotations

import json
import re
import statistics
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from harness import modules

__all__ = ["modules"]

WAYS = {"pages64", "pages16", "float8", "invariant", "tree", "steps", "prompts"}
ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGE = ROOT / "docs/benchmarks.md"
LOSSES = ROOT / "docs/benchmarks/losses.md"


@pytest.fixture
def overview(modules):
    return modules("overview")


@pytest.fixture
def documents(modules):
    """The results of the repository."""
    read = modules("reporting.results").read
    return [read(path) for path in sorted((ROOT / "benchmarks/results").glob("*.json"))]


def block(name: str, page: Path) -> str:
    (found,) = re.findall(
        rf"<!-- benchmarks:begin {name} -->\n(.*?)\n<!-- benchmarks:end -->",
        page.read_text(),
        re.DOTALL,
    )
    return found


def document(date, group, cells, peers=("fa4", "cudnn"), platform="gpu", device="H100"):
    """Results whose cells are (name, {direction: seconds of ours and of the peers})."""
    return {
        "device": {"name": device, "platform": platform},
        "date": date,
        "versions": {},
        "peers": {"memeff_cuda": "ours", **{name: name.upper() for name in peers}},
        "cells": [
            {
                "name": name,
                "group": group,
                "results": {
                    direction: {
                        peer: {"error": "no"} if time is None else {"seconds": time}
                        for peer, time in zip(("memeff_cuda", *peers), times, strict=True)
                    }
                    for direction, times in results.items()
                },
            }
            for name, results in cells
        ],
    }


DOCUMENTS = (
    document("2026-01-01", "decode", [("T1", {"forward": (1.0, 0.9)})], peers=("fa4",)),
    document(
        "2026-02-01",
        "main",
        [
            ("hd128", {"forward": (1.0, 1.2, 0.5), "forward_backward": (1.0, 2.0, 3.0)}),
            ("hd64", {"forward": (1.0, None, 4.0), "forward_backward": (1.0, None, None)}),
        ],
    ),
    document("2026-03-01", "gallery", [("alibi", {"forward": (1.0, 0.1)})], peers=("fa4",)),
    {"date": "2026-03-01", "device": {"name": "H100"}, "ring": {}},
)
CPU = document(
    "2026-04-01", "main", [("T8", {"forward": (1.0, 0.25)})], ("xla",), "cpu", "EPYC on 2 threads"
)


def test_each_cell_is_compared_with_its_fastest_peer(overview):
    groups = overview.groups(DOCUMENTS)
    assert [group.title for group in groups] == ["main grid", "few queries, long keys"]
    assert [(r.name, r.direction, r.ratio, r.peer) for r in groups[0].compared()] == [
        ("hd128", "forward", 0.5, "CUDNN"),
        ("hd128", "forward_backward", 2.0, "FA4"),
        ("hd64", "forward", 4.0, "CUDNN"),
    ]


def test_the_index_has_means_and_the_lowest_ratios(overview):
    groups = overview.groups(DOCUMENTS)
    assert overview.text.counted(groups) == (
        "On GPUs jax-memeff is slower than the fastest peer in 2 of 4 "
        "(measured 2026-01-01 to 2026-02-01)."
    )
    text = overview.text.index(groups)
    assert "main-grid)|1.41|2.00|1 of 3|**0.50**|hd128, forward: CUDNN|" in text
    assert "few-queries-long-keys)|0.90||1 of 1|**0.90**|T1, forward: FA4|" in text
    losses = overview.text.losses(groups).splitlines()
    assert losses[0] == "## H100: 2 of 4 figures"
    assert losses[-2:] == ["|hd128|forward|0.50|CUDNN|", "|T1|forward|0.90|FA4|"]


def test_results_of_a_cpu_never_count_among_those_of_gpus(overview, monkeypatch):
    """Also if they have a group of the GPUs."""
    groups = overview.groups((CPU, *DOCUMENTS))
    assert [group.architecture for group in groups] == ["hopper", "hopper", "cpu"]
    assert [overview.text.page(group) for group in groups] == ["dense", "serving", "cpu"]
    assert overview.text.counted(groups).startswith(
        "On GPUs jax-memeff is slower than the fastest peer in 2 of 4 figures, on CPUs in 1 of 1 "
    )
    tasks = overview.picture.by_task(groups)
    found = [r.name for _, strips in tasks for results in strips.values() for r in results]
    assert found and "T8" not in found
    monkeypatch.setattr(overview.text, "EXTRACT", {})
    assert "|main grid (EPYC on 2 threads)|0.25|" in overview.text.extract(groups)
    *gpus, (title, strips) = overview.picture.by_architecture(groups)
    assert title == "CPU: EPYC on 2 threads"
    assert [r.name for r in strips["forward"]] == ["T8"]
    assert all("T8" not in [r.name for r in own] for _, x in gpus for own in x.values())


def test_steps_of_a_server_on_a_cpu_are_on_its_page(modules):
    times = {"pages64": {"seconds": 3e-6}, "steps": {"seconds": 2e-6}, "prompts": {"seconds": 2e-6}}
    step = {"name": "8 and 1", "group": "ragged", "results": times}
    steps = {"steps": [step], "labels": {}, "host": {}}
    report = modules("report")
    for kind, page in ((CPU, "cpu"), (DOCUMENTS[0], "serving")):
        own = {**{name: kind[name] for name in ("device", "date", "versions")}, **steps}
        found = {name for name in report.PAGES if "|8 and 1|" in report._page(name, [], [own])}
        assert found == {page}


def test_without_a_loss_there_is_no_table_of_losses(overview):
    won = document("2026-01-01", "small", [("T8", {"forward": (1.0, 1.0, 1.2)})])
    assert overview.text.losses(overview.groups([won])) == "## H100: 0 of 1 figures"


def test_a_picture_has_a_point_for_each_figure(overview, documents):
    parts = overview.picture.by_architecture(overview.groups(documents))
    drawn = overview.picture.drawn(parts, "not measured: B200")
    figures = sum(len(own) for _, strips in parts for own in strips.values())
    assert drawn.count("<circle ") == figures
    slower = sum(r.is_slower for _, x in parts for own in x.values() for r in own)
    red = re.findall(rf'<g fill="{overview.picture.SLOWER}".*', drawn)
    assert sum(line.count("<circle ") for line in red) == slower > 0
    assert "not measured: B200</text>" in drawn


def test_pictures_fit_a_phone_and_both_themes(overview, documents):
    """A letter is at most 0.62 of the font's size wide, and a phone shows 358 pixels."""
    groups = overview.groups(documents)
    makers = (overview.picture.by_architecture, overview.picture.by_task)
    for parts in (make(groups) for make in makers):
        root = ElementTree.fromstring(overview.picture.drawn(parts))
        left, top, width, height = map(float, root.attrib["viewBox"].split())
        size = float(root.attrib["font-size"])
        assert (left, top) == (0, 0) and size * 358 / width >= 11
        assert root.attrib["fill"] == "currentColor"
        assert not any(float(r.attrib.get("x", 0)) == 0 for r in root.iter(f"{{{SVG}}}rect"))
        lines: dict[float, float] = {}
        for text in root.iter(f"{{{SVG}}}text"):
            long = 0.62 * size * len(text.text or "")
            assert float(text.attrib["y"]) <= height
            if text.attrib["text-anchor"] != "middle":
                line = float(text.attrib["y"])
                lines[line] = lines.get(line, 0) + long
        assert all(long <= width for long in lines.values()), lines
        for circle in root.iter(f"{{{SVG}}}circle"):
            assert 0 < float(circle.attrib["cx"]) < width


SVG = "http://www.w3.org/2000/svg"


def test_gpus_that_nobody_measured_are_named(overview):
    groups = overview.groups(DOCUMENTS)
    assert {"A100", "B200"} <= set(overview.picture.unmeasured(groups))
    measured = document("2026-01-01", "main", [("T8", {"forward": (1.0, 1.1, 2)})], device="A100")
    missing = overview.picture.unmeasured(overview.groups([measured]))
    assert "A100" not in missing and "A10" in missing


def test_the_pages_have_all_results_of_the_repository(modules):
    """Counted here once more, from the files."""
    device_title = modules("reporting.results").device_title
    losses, figures = {}, {True: 0, False: 0}
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
                    figures[results["device"]["platform"] == "cpu"] += 1
                    if round(min(others) / own, 2) < 1:
                        ratio = f"{min(others) / own:.2f}"
                        line = f"|{name}|{direction.replace('_', ' + ')}|{ratio}|"
                        losses.setdefault(device_title(results), []).append(line)
    hint = "run: python benchmarks/report.py"
    sections = re.split(r"^## ", LOSSES.read_text(), flags=re.MULTILINE)[1:]
    found = {section.split(": ")[0]: section for section in sections}
    text = block("index", PAGE)
    counted = text.partition("\n")[0]
    gpus, cpus = (
        re.search(rf"{kind} .*?in (\d+) of (\d+)", counted) for kind in ("GPUs", "on CPUs")
    )
    assert gpus and cpus and int(gpus[2]) == figures[False] and int(cpus[2]) == figures[True], hint
    assert int(gpus[1]) + int(cpus[1]) == sum(map(len, losses.values()))
    for device, lines in losses.items():
        assert all(line in found[device] for line in lines), hint
        assert found[device].count("\n|") == len(lines) + 2  # a header and a line below it


def test_the_pages_are_up_to_date(modules, documents):
    files = modules("report").files(documents)
    assert {PAGE, README, LOSSES} < set(files)
    for path, text in files.items():
        assert path.exists() and path.read_text() == text, "run: python benchmarks/report.py"
    pages = {path for path in files if path.parent == LOSSES.parent}
    assert set(LOSSES.parent.glob("*.md")) == pages
    assert {path.name for path in (ROOT / "docs/images").glob("*")} == {
        "architectures.svg",
        "tasks.svg",
    }


def test_the_page_is_short():
    prose = re.sub(
        r"<!-- benchmarks:begin.*?benchmarks:end -->", "", PAGE.read_text(), flags=re.DOTALL
    )
    assert len(prose.split()) <= 600


def test_the_page_names_the_versions_of_the_results(documents):
    names = {"jax": "JAX", "nvidia-cudnn-cu13": "cuDNN", "torch": "PyTorch"}
    names["flash-attn-4"] = "FlashAttention-4"
    page = " ".join(PAGE.read_text().split())
    for versions in (x["versions"] for x in documents if x["device"]["platform"] == "gpu"):
        for package, name in names.items():
            if package in versions:
                named = re.search(rf"{name} (\d\S*\d)[ ,.]", page)
                assert named and versions[package].startswith(named[1]), (package, named)


def test_the_extract_has_its_rows_and_counts_all_figures(overview, monkeypatch):
    groups = overview.groups(DOCUMENTS)
    monkeypatch.setattr(overview.text, "EXTRACT", {"H100": ("main grid",)})
    text = overview.text.extract(groups)
    assert "in 2 of 4 (measured" in text
    assert text.endswith("|main grid (H100)|1.41|0.50|2.00|2.00|1 of 3|FA4, CUDNN|")
    monkeypatch.setattr(overview.text, "EXTRACT", {"H100": ("float32",)})
    with pytest.raises(ValueError, match=r"expected results for \[\('H100', 'float32'\)\]"):
        overview.text.extract(groups)


RATIO = r"(\d\.\d\d)"


def test_figures_in_the_prose_of_the_readme_are_those_of_the_results():
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

    kinds = ("compute_80", "compute_80-dims", "compute_80-small")
    records = [f"nvidia-h200-{kind}" for kind in kinds]
    pair = [
        [x for record in records for x in ratios(record, "torch_flash", direction=direction)]
        for direction in ("forward", "forward_backward")
    ]
    assert stated(rf"are at {RATIO} and {RATIO} times FlashAttention-2 \({RATIO} at worst\)") == [
        *map(mean, pair),
        round(min(pair[0] + pair[1]), 2),
    ]
    assert stated(rf"head dim 1024 {RATIO} of plain XLA") == [
        round(min(ratios("nvidia-h200-large_dims", "jax_xla", "hd1024")), 2)
    ]
    # Those with several peers are in the extract, which another test compares with the results.
    lines = {
        line.split("|")[1]: line.split("|")[1:]
        for line in block("extract", README).splitlines()
        if line.startswith("|")
    }

    def cells(title: str, *columns: int) -> list[float]:
        return [float(lines[title][column]) for column in columns]

    assert stated(rf"{RATIO} of the fastest peer \({RATIO} at worst, H100\)") == cells(
        "decode steps of a server (H100)", 1, 2
    )
    assert stated(rf"it is {RATIO} or more times") == [
        min(cells("bias, dropout, both (H200)", 2, 4))
    ]
    assert stated(
        rf"{RATIO} times as fast as `jax.nn` .{{,40}} {RATIO} times .{{,40}} "
        rf"\({RATIO} at worst, two threads"
    ) == cells("plain JAX (Intel Xeon on 2 threads)", 1, 3, 2)
    *others, best = sorted(ratios("intel-xeon-on-2-threads-cpu", "jax_xla", direction="forward"))
    pattern = rf"(\d+) at best, .{{,20}} padding, without which forwards have {RATIO}\)"
    assert stated(pattern) == [round(best), mean(others)]
