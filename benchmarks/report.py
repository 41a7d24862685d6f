"""Pages, tables and pictures from results.

    python benchmarks/report.py                # writes all that benchmarks/results determine
    python benchmarks/report.py RESULTS.json   # prints the tables of one file

The first command writes the pages of docs/benchmarks, two pictures, and what stands between
``<!-- benchmarks:begin NAME -->`` and ``<!-- benchmarks:end -->`` in docs/benchmarks.md, README.md
and docs/guide/precision.md. The results are facts: the tables have all of them, and every loss.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import overview
from overview.comparison import Group, Result
from reporting import precision_table
from reporting.markdown_table import table
from reporting.results import DIRECTIONS, architecture, device_title, read, source, time
from server import table as server_table
from user_functions import errors
from user_functions import table as function_table

_ROOT = Path(__file__).parent.parent
RESULTS = _ROOT / "benchmarks" / "results"
_DOCS = _ROOT / "docs"
_BLOCK = re.compile(
    r"(<!-- benchmarks:begin (?P<name>\w+) -->\n).*?(<!-- benchmarks:end -->)", re.DOTALL
)
_FIRST_RESULTS = {"cold": "empty cache", "warm": "filled cache", "archive": "archive"}
_WITH_MEMORY = ("memory", "cpu")
_MISSING = "n/a"

PAGES = {
    "dense": (
        "Dense attention on Hopper",
        "The main grid has 64 MiB in every operand. Above head dim 256 the peers are PyTorch's "
        "mem-efficient kernel and plain XLA, which stores all scores and skips no masked ones. A "
        "peer whose results are wrong has no figure: the gradients of FlashAttention-4 4.0.0b36 at "
        "head dims 40, 48, 72 and 80. Products of float32 have its precision on both sides.",
    ),
    "features": (
        "Features on Hopper",
        "A bias has the shape `[1, N, T, S]` and a gradient. With a mask, only valid pairs count.",
    ),
    "serving": (
        "Serving on Hopper",
        "The first tables compare calls with contiguous keys, because of the peers only FlashMLA "
        "reads pages.",
    ),
    "sm80": (
        "GPUs without wgmma",
        "A100, A10, L4, L40S, RTX and, until they have kernels of their own, Blackwell GPUs run "
        "the kernels with `mma.sync`. Kernels for compute_80 on an H200 run with as many CTAs on "
        "an SM as on an A100. Clock, tensor cores, L2 and DRAM are those of an H200: the tables "
        "compare code ([what carries over](../../benchmarks/README.md#other-architectures)). "
        "Above head dim 128 FlashAttention-2 has tiles for which an A100 has too little shared "
        "memory.",
    ),
    "cpu": (
        "Plain JAX on CPUs",
        "Everything but an NVIDIA GPU runs the path in plain JAX. The peer is the path of `jax.nn` "
        "that runs there. Both compute products in float32.",
    ),
    "losses": (
        "Where a peer is faster",
        "All figures with a ratio (the time of the fastest peer divided by ours) below 1, the "
        "lowest first. Calls from pages are not among them: [Serving](serving.md) compares them "
        "with peers that read contiguous keys, and with FlashMLA.",
    ),
    "system": (
        "Determinism, several devices, host",
        "These tables compare calls of jax-memeff with each other.",
    ),
}


def files(documents: Iterable[dict[str, Any]]) -> dict[Path, str]:
    """The text of each file that is generated from the documents, by its path."""
    documents = list(documents)
    groups = overview.groups(documents)
    found = {_DOCS / "benchmarks" / f"{name}.md": _page(name, groups, documents) for name in PAGES}
    pictures, blocks = {}, _blocks(groups, documents)
    missing = overview.picture.unmeasured(groups)
    note = f"not measured: {', '.join(missing)}" if missing else ""
    for name, caption, parts, below in (
        ("architectures", "by architecture", overview.picture.by_architecture(groups), note),
        ("tasks", "by task", overview.picture.by_task(groups), ""),
    ):
        pictures[_DOCS / "images" / f"{name}.svg"] = overview.picture.drawn(parts, below)
        numbers = overview.picture.spoken(parts)
        blocks[name] = f"![Mean ratios {caption}. {numbers}](images/{name}.svg)"
    for path in (_DOCS / "benchmarks.md", _DOCS / "guide" / "precision.md", _ROOT / "README.md"):
        found[path] = insert(path.read_text(), blocks)
    return found | pictures


def _blocks(groups: Sequence[Group], documents: Sequence[dict[str, Any]]) -> dict[str, str]:
    measured = [_precision(d) for d in documents if "precision" in d]
    return {
        "index": f"{overview.text.counted(groups)}\n\n{overview.text.index(groups)}",
        "extract": overview.text.extract(groups),
        "training": training(documents),
        "precision": "\n\n".join(measured),
    }


def _precision(document: dict[str, Any]) -> str:
    return f"{precision_table.text(document)}\n\n{source(document)}"


def _page(name: str, groups: Sequence[Group], documents: Sequence[dict[str, Any]]) -> str:
    title, introduction = PAGES[name]
    parts = [f"# {title}", f"{introduction} [All benchmarks](../benchmarks.md)."]
    own = [group for group in groups if overview.text.page(group) == name]
    if own:
        parts.append(overview.text.LEGEND)
    parts += map(overview.text.section, own)
    if name == "losses":
        parts.append(overview.text.losses(groups))
    for document in documents:
        kind = architecture(document)
        for own_page, tables_of in _OTHERS:
            if name == (own_page if kind == "hopper" else kind):
                parts.append(tables_of(document))
    return "\n\n".join(filter(None, parts)) + "\n"


def functions(document: dict[str, Any]) -> str:
    """Functions compared with the plain call, and the errors of the gallery's functions."""
    parts = []
    if any(cell["group"] == "functions" for cell in document.get("cells", ())):
        parts += [
            "## Functions compared with the plain call",
            "The time of the plain call divided by that with the function. If an argument has the "
            "same meaning (segment ids, window, soft cap), the plain call uses it.",
            table(*function_table.of_plain(document)),
            *function_table.compilation(document),
            *_listed("Block masks", function_table.block_masks(document)),
            source(document),
        ]
    if "gallery_errors" in document:
        records = document["gallery_errors"]
        parts += [
            "## Errors of functions",
            "The largest error of the [gallery](../gallery/README.md)'s functions, divided by that "
            "of dense JAX in the same precision (`tests/gallery/gallery_errors.py`). Gradients of "
            "captured arrays are apart: kernels compute `rowsum(dO * O)` from the rounded output, "
            "so all scores of a row have the same error and a sum does not average it out.",
            table(*errors.rows(records)),
            *_listed("Beyond the limit", errors.failures(records)),
            source(document),
        ]
    return "\n\n".join(parts)


def _listed(title: str, lines: Sequence[str]) -> list[str]:
    return [f"{title}:\n\n" + "\n".join(f"- {line}" for line in lines)] if lines else []


def server(document: dict[str, Any]) -> str:
    """The steps of a server from pages."""
    if "steps" not in document:
        return ""
    return f"{server_table.text(document)}\n\n{source(document)}"


def system(document: dict[str, Any]) -> str:
    """The deterministic backward, ring attention and the host's cost."""
    parts = [deterministic(document), ring(document), host(document)]
    return "\n\n".join(filter(None, parts))


def deterministic(document: dict[str, Any]) -> str:
    """The time of the default divided by that with ``deterministic_backward=True``."""
    rows = []
    for cell in document.get("cells", ()):
        if cell["group"] == "deterministic":
            pairs = [
                [cell["results"][d][name]["seconds"] for name in ("memeff_cuda", _DETERMINISTIC)]
                for d in DIRECTIONS
            ]
            rows.append([cell["name"], *(f"{own / other:.2f}" for own, other in pairs)])
    if not rows:
        return ""
    header = ["speed relative to the default", *DIRECTIONS.values()]
    return f"## Deterministic backward\n\n{table(header, rows)}\n\n{source(document)}"


_DETERMINISTIC = "memeff_deterministic"


def ring(document: dict[str, Any]) -> str:
    """The results of ring.py: times, and throughput per device relative to a single device."""
    if "ring" not in document:
        return ""
    measured = document["ring"]
    rows = []
    for direction, title in DIRECTIONS.items():
        for name, record in measured["results"][direction].items():
            label = f"{title}, {name}"
            if "error" in record:
                rows.append([label, f"`{record['error']}`", _MISSING, _MISSING])
                continue
            share = f"{record['of_one_device']:.1%}" if "of_one_device" in record else ""
            rate = f"{record['tflops_per_device']:.3g}"
            rows.append([label, time(record["seconds"]), rate, share])
    header = [measured["name"], "µs", "TFLOP/s of a device", "of one device on its share"]
    title = f"## Ring attention on {measured['devices']} devices"
    return f"{title}\n\n{table(header, rows)}\n\n{source(document)}"


def host(document: dict[str, Any]) -> str:
    """The host's cost: calls, first result, kernels compiled."""
    rows = document.get("host", {})
    parts = []
    if "dispatch" in rows:
        dispatch = rows["dispatch"]
        labels = {"bare": "`x + 1`", **document["peers"]}
        names = [n for n in labels if n in dispatch["forward"] or n in dispatch["forward_backward"]]
        cells = [
            [labels[name]]
            + [
                f"{record['us']:.1f}" if "us" in record else record.get("error", _MISSING)
                for record in (dispatch[direction].get(name, {}) for direction in DIRECTIONS)
            ]
            for name in names
        ]
        header = [f"host time of a jitted call, µs ({dispatch['cell']})", *DIRECTIONS.values()]
        parts.append(table(header, cells))
    if "first_result" in rows:
        states = rows["first_result"]
        steps = list(dict.fromkeys(step for state in states.values() for step in state))
        cells = [
            [step.replace("_", " ")]
            + [
                f"{value:.2f}" if isinstance(value, float) else str(value)
                for value in (state.get(step, _MISSING) for state in states.values())
            ]
            for step in steps
        ]
        header = ["seconds to the first forward + backward", *map(_FIRST_RESULTS.get, states)]
        parts.append(table(header, cells))
    if "kernel_count" in rows:
        count = rows["kernel_count"]
        parts.append(
            f"Kernels compiled for random shapes: {count['error']}"
            if "error" in count
            else f"{count['shapes']} random shapes of one feature set compile "
            f"{len(count['kernels'])} kernels."
        )
    if not parts:
        return ""
    title = f"## Host cost ({device_title(document)})"
    return "\n\n".join([title, *parts, source(document)])


def training(documents: Iterable[dict[str, Any]]) -> str:
    """Tokens per second of training steps, with the fastest path of ``jax.nn`` as the peer."""
    parts = []
    records = [document for document in documents if "training" in document]
    for document in records:
        rows = []
        for model in document["training"]:
            found = {n: r.get("seconds") for n, r in model["results"].items()}
            own = found.pop("memeff", None)
            peers = {document["labels"][name]: time for name, time in found.items() if time}
            rows.append(_step(own, peers, model))
        header = [f"{device_title(document)}: tokens per second", "ours", "fastest peer", "ratio"]
        parts += [table(header, rows), source(document)]
    if all(architecture(document) == "cpu" for document in records):
        parts.append(
            "No GPU has run `benchmarks/training.py` yet, so training steps of whole models are "
            "unmeasured there."
        )
    return "\n\n".join(parts)


def _step(own: float | None, peers: dict[str, float], model: dict[str, Any]) -> list[str]:
    name, tokens = model["name"], model["batch"] * model["length"]
    result = Result(name, "forward_backward", own, peers)
    ours = "failed" if own is None else f"{tokens / own:,.0f}"
    if not peers:
        return [name, ours, "none", ""]
    peer = f"{tokens / peers[result.peer]:,.0f} {result.peer}"
    return [name, ours, peer, overview.text.ratio(result)]


def memory(document: dict[str, Any]) -> str:
    """MiB that XLA plans for a call of each cell of some groups; other peers do not report it."""
    rows = []
    for cell in document.get("cells", ()):
        for direction, results in cell["results"].items() if cell["group"] in _WITH_MEMORY else ():
            sizes = (results[peer].get("temporary_bytes") for peer in document["peers"])
            figures = [_MISSING if size is None else _mebibytes(size) for size in sizes]
            rows.append([f"{cell['name']}, {DIRECTIONS[direction]}", *figures])
    if not rows:
        return ""
    header = ["MiB beyond operands and results", *document["peers"].values()]
    return f"## Memory\n\n{table(header, rows)}"


def _mebibytes(size: int) -> str:
    """
    >>> _mebibytes(3 * 2**19), _mebibytes(3 * 2**30)
    ('1.5', '3072')
    """
    mebibytes = size / 2**20
    return f"{mebibytes:.1f}" if mebibytes < 10 else f"{mebibytes:.0f}"


_OTHERS = (
    ("system", memory),
    ("features", functions),
    ("serving", server),
    ("system", system),
)
"""Tables of one document, and the page that has those of Hopper."""


def tables(document: dict[str, Any]) -> str:
    """All tables of one document, for results that are not in the repository, too."""
    found = overview.of_document(document)
    parts = [overview.text.LEGEND] if any(group.compared() for group in found) else []
    parts += [overview.text.section(group) for group in found if group.results]
    parts += [tables_of(document) for _, tables_of in _OTHERS]
    if "precision" in document:
        parts.append(_precision(document))
    if "training" in document:
        parts.append(training([document]))
    return "\n\n".join(filter(None, parts))


def insert(text: str, blocks: dict[str, str]) -> str:
    """``text``, with the content of each marked block replaced by that of ``blocks``.

    Raises ``ValueError`` if there is no marker, or if a marker has a name that no block has.

    >>> insert("<!-- benchmarks:begin index -->\\n<!-- benchmarks:end -->", {"index": "3 us"})
    '<!-- benchmarks:begin index -->\\n3 us\\n<!-- benchmarks:end -->'
    """
    names = [match["name"] for match in _BLOCK.finditer(text)]
    if not names or (unknown := set(names) - set(blocks)):
        wrong = f"the names {sorted(unknown)}" if names else "none"
        raise ValueError(
            "expected lines '<!-- benchmarks:begin NAME -->' and '<!-- benchmarks:end -->' with "
            f"a NAME out of {', '.join(blocks)}, got {wrong}: add them where the figures belong"
        )
    return _BLOCK.sub(lambda block: f"{block[1]}{blocks[block['name']]}\n{block[3]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, nargs="?", help="a file to print the tables of")
    options = parser.parse_args()
    if options.results is not None:
        print(tables(read(options.results)))
        return
    for path, text in files(map(read, sorted(RESULTS.glob("*.json")))).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(f"wrote {path.relative_to(_ROOT)}")


if __name__ == "__main__":
    main()
