"""Tables and plots from results: ``python benchmarks/report.py RESULTS.json``.

It writes between ``<!-- benchmarks:begin NAME -->`` and ``<!-- benchmarks:end -->``. ``tables`` has
the results of the main grid, ``host`` the host's cost. Other results go to ``features``, or to a
block of their own if _BLOCKS has their group; those of another architecture go to the block with
its name; those of ring.py go to ``ring``, those of paged.py to ``paged``, those of precision.py to
``precision``, and those of tests/gallery/gallery_errors.py to ``errors``. Blocks that were not
measured are kept. ``overview``, with a picture of its own, and ``extract`` are written each time,
from the results in benchmarks/results.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from pathlib import Path
from typing import Any

import overview
from programs.peers import OURS
from reporting import plots, precision_table
from reporting.markdown_table import table
from reporting.ratios import ours, ratios
from reporting.results import device_title, read
from server import table as server_table
from user_functions import errors
from user_functions import table as function_table

_ROOT = Path(__file__).parent.parent
_RESULTS = _ROOT / "benchmarks" / "results"
_DOCS = _ROOT / "docs"
_TARGETS = (_DOCS / "benchmarks.md", _DOCS / "guide" / "precision.md", _ROOT / "README.md")
_BLOCK = re.compile(
    r"(<!-- benchmarks:begin (?P<name>\w+) -->\n).*?(<!-- benchmarks:end -->)", re.DOTALL
)
# Groups with a block of their own, for results whose cells all belong to one group.
_BLOCKS = ("masks", "deterministic", "decode", "dims", "large_dims", "float32", "functions", "cpu")
# Results of other architectures, attention.py --arch.
_ARCHITECTURES = ("compute_80", "compute_86")
_NAMES = (
    *("tables", "host", "features", "paged", "ring", "errors", "precision"),
    *("overview", "extract"),
    *_ARCHITECTURES,
    *_BLOCKS,
)
_FIRST_RESULTS = {"cold": "empty cache", "warm": "filled cache", "archive": "archive"}
_GRID = frozenset(("main", "small", "tiny"))
_WITH_MEMORY = ("memory", "cpu")
_MISSING = "n/a"
_FEW_QUERIES = "decode"


def summary(document: dict[str, Any]) -> str:
    """Geometric mean and minimum of the ratio to each peer, and by group of cells to the fastest
    peer of each cell.

    Only cells with figures for both count, so the table shows their number.
    """
    document = _with_figures(document)
    own, cells = ours(document), document["cells"]
    compared = {label: (cells, [peer]) for peer, label in document["peers"].items() if peer != own}
    others = [peer for peer in document["peers"] if peer not in OURS]
    for group in dict.fromkeys(cell["group"] for cell in cells):
        members = [cell for cell in cells if cell["group"] == group]
        compared[f"the fastest of all, `{group}` cells"] = (members, others)
    rows = []
    for label, (members, peers) in compared.items():
        row = [label]
        for direction in plots.TITLES:
            if values := ratios(members, direction, own, peers):
                mean = math.exp(math.fsum(map(math.log, values.values())) / len(values))
                slowest = min(values, key=lambda name: values[name])
                least = f"{values[slowest]:.2f} ({slowest})"
                row += [str(len(values)), f"{mean:.2f}", least]
            else:
                row += ["0", _MISSING, _MISSING]
        rows.append(row)
    header = [f"speed of {document['peers'][own]} / peer"]
    for title in plots.TITLES.values():
        header += [f"{title.lower()}: cells", "geometric mean", "minimum"]
    return f"{_machine(document)}\n\n{table(header, rows)}"


def _with_figures(document: dict[str, Any]) -> dict[str, Any]:
    """The results without the peers that have no figure in any cell."""
    measured = {
        peer
        for cell in document["cells"]
        for results in cell["results"].values()
        for peer, record in results.items()
        if "error" not in record
    }
    peers = {peer: label for peer, label in document["peers"].items() if peer in measured}
    return document | {"peers": peers}


def _without_figures(document: dict[str, Any]) -> list[str]:
    """A line for each peer that has no figure in any cell, with its errors."""
    lines = []
    for peer in document["peers"].keys() - _with_figures(document)["peers"].keys():
        records = [r[peer] for c in document["cells"] for r in c["results"].values() if peer in r]
        errors = dict.fromkeys(record["error"] for record in records)
        lines.append(f"- {document['peers'][peer]}: `{'`, `'.join(errors)}`")
    return sorted(lines)


def _machine(document: dict[str, Any]) -> str:
    device, versions = document["device"], document["versions"]
    driver = f", driver {device['driver']}" if device["driver"] else ""
    parts = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{device_title(document)}{driver}, {document['date']}; {parts}."


def _has_few_queries(cell: dict[str, Any]) -> bool:
    return cell["group"] == _FEW_QUERIES


def _figures(
    document: dict[str, Any], direction: str, reasons: list[str], few_queries: bool
) -> str:
    """TFLOP/s of each cell and peer, or TB/s of keys and values if there are few queries."""
    rows = []
    for cell in document["cells"]:
        if direction not in cell["results"] or _has_few_queries(cell) != few_queries:
            continue
        row = [cell["name"]]
        for peer in document["peers"]:
            record = cell["results"][direction][peer]
            if "error" in record:
                if record["error"] not in reasons:
                    reasons.append(record["error"])
                row.append(f"[{reasons.index(record['error']) + 1}]")
                continue
            rate = record["bytes_per_second"] / 1e12 if few_queries else record["tflops"]
            figure = f"{rate:.3g}"
            row.append(f"**{figure}**" if record["ratio_to_best"] == 1 else figure)
        rows.append(row)
    unit = "TB/s" if few_queries else "TFLOP/s"
    return table([unit, *document["peers"].values()], rows) if rows else ""


def _mebibytes(size: int) -> str:
    """
    >>> _mebibytes(3 * 2**19), _mebibytes(3 * 2**30)
    ('1.5', '3072')
    """
    mebibytes = size / 2**20
    return f"{mebibytes:.1f}" if mebibytes < 10 else f"{mebibytes:.0f}"


def _memory(document: dict[str, Any]) -> str:
    """MiB that XLA plans for a call of each cell of some groups; other peers do not report it."""
    rows = []
    for cell in document["cells"]:
        for direction, results in cell["results"].items() if cell["group"] in _WITH_MEMORY else ():
            sizes = (results[peer].get("temporary_bytes") for peer in document["peers"])
            figures = [_MISSING if size is None else _mebibytes(size) for size in sizes]
            rows.append([f"{cell['name']}, {plots.TITLES[direction].lower()}", *figures])
    return table(["MiB", *document["peers"].values()], rows) if rows else ""


def tables(document: dict[str, Any], plot: str | None) -> str:
    """Summary, plot, one table for each direction, and why figures are missing."""
    parts = [summary(document)]
    absent = _without_figures(document)
    document = _with_figures(document)
    if plot is not None:
        title = plots.GRID_TITLE if plots.cells_of_grid(document) else plots.SPEED_TITLE
        parts.append(f"![{title}]({plot})")
    reasons: list[str] = []
    for direction, title in plots.TITLES.items():
        if figures := _figures(document, direction, reasons, few_queries=False):
            parts.append(f"### {title}\n\nThe fastest of each row is bold.\n\n{figures}")
    if figures := _figures(document, "forward", reasons, few_queries=True):
        copy = document["device"]["copy_bytes_per_second"] / 1e12
        parts.append(
            "### Few queries, long keys\n\nForward: the bytes of keys and values per second. "
            f"Negating an array reads and writes {copy:.3g} TB/s.\n\n{figures}"
        )
    if memory := _memory(document):
        parts.append(f"### Memory\n\nBeyond operands and results.\n\n{memory}")
    if reasons or absent:
        listed = [f"- [{i}] `{reason}`" for i, reason in enumerate(reasons, 1)]
        parts.append("\n".join(["No figure, because:\n", *listed, *absent]))
    spreads = [
        record["spread"]
        for cell in document["cells"]
        for results in cell["results"].values()
        for record in results.values()
        if "spread" in record
    ]
    if spreads:
        middle = sorted(spreads)[len(spreads) // 2]
        parts.append(
            "Spread of the batches, (slowest - fastest) / median: "
            f"{middle:.1%} in the median cell, {max(spreads):.1%} at most."
        )
    return "\n\n".join(parts)


def host(document: dict[str, Any]) -> str:
    """The host's cost: calls, first result, kernels compiled."""
    rows = document["host"]
    parts = []
    if "dispatch" in rows:
        dispatch = rows["dispatch"]
        labels = {"bare": "`x + 1`", **document["peers"]}
        names = [n for n in labels if n in dispatch["forward"] or n in dispatch["forward_backward"]]
        cells = [
            [labels[name]]
            + [
                f"{record['us']:.1f}" if "us" in record else record.get("error", _MISSING)
                for record in (dispatch[direction].get(name, {}) for direction in plots.TITLES)
            ]
            for name in names
        ]
        header = [f"host time of a jitted call, µs ({dispatch['cell']})", *plots.TITLES.values()]
        parts.append(table(header, cells))
    if "first_result" in rows:
        states = rows["first_result"]
        steps = list(dict.fromkeys(step for state in states.values() for step in state))
        cells = [
            [step.replace("_", " ")]
            + [
                f"{value:.3f}" if isinstance(value, float) else str(value)
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
    return "\n\n".join(parts)


def ring(document: dict[str, Any]) -> str:
    """The results of ring.py: times, and throughput per device relative to a single device."""
    measured = document["ring"]
    rows = []
    for direction, title in plots.TITLES.items():
        for name, record in measured["results"][direction].items():
            label = f"{title.lower()}, {name}"
            if "error" in record:
                rows.append([label, f"`{record['error']}`", _MISSING, _MISSING])
                continue
            ratio = f"{record['of_one_device']:.1%}" if "of_one_device" in record else ""
            rate = f"{record['tflops_per_device']:.3g}"
            rows.append([label, f"{1e3 * record['seconds']:.1f}", rate, ratio])
    header = [f"{measured['name']}, {measured['devices']} devices", "ms", "TFLOP/s of a device"]
    return f"{_machine(document)}\n\n{table([*header, 'of one device on its share'], rows)}"


def functions(document: dict[str, Any]) -> str:
    """The speed of functions relative to others, and the reasons for missing figures."""
    parts = [_machine(document), table(*function_table.rows(document))]
    reasons = dict.fromkeys(
        f"- {document['peers'][peer]}, {cell['name']}: `{record['error']}`"
        for cell in document["cells"]
        for results in cell["results"].values()
        for peer, record in results.items()
        if "error" in record
    )
    parts += function_table.compilation(document)
    if lines := function_table.block_masks(document):
        parts.append("Block masks, for both directions:\n\n" + "\n".join(f"- {x}" for x in lines))
    if reasons:
        parts.append("No figure, because:\n\n" + "\n".join(reasons))
    return "\n\n".join(parts)


def gallery_errors(document: dict[str, Any]) -> str:
    """The errors of the gallery's functions relative to dense JAX, and those beyond their limit."""
    records = document["gallery_errors"]
    parts = [_machine(document), table(*errors.rows(records))]
    if lines := errors.failures(records):
        parts.append("Beyond the limit:\n\n" + "\n".join(f"- {line}" for line in lines))
    return "\n\n".join(parts)


def of_grid(document: dict[str, Any]) -> bool:
    """Whether results hold cells of the main grid."""
    return any(cell["group"] in _GRID for cell in document.get("cells", ()))


def block_of(document: dict[str, Any]) -> str:
    """The name of the block for results outside the main grid."""
    groups = {cell["group"] for cell in document["cells"]}
    return groups.pop() if len(groups) == 1 and groups <= set(_BLOCKS) else "features"


def plot_path(document: dict[str, Any], grid: Path) -> Path | None:
    """The path of the plot of results, beside that of the grid; None if their block has no plot."""
    if "residency" in document:
        return grid.with_name(f"{document['residency']['arch']}{grid.suffix}")
    groups = {cell["group"] for cell in document.get("cells", ())}
    if of_grid(document):
        return grid
    if not groups or groups & {"functions", "gallery"}:
        return None
    return grid.with_name(f"{block_of(document)}{grid.suffix}")


def blocks(document: dict[str, Any], image: str | None) -> dict[str, str]:
    """The text of results, by the name of its block."""
    if "ring" in document:
        return {"ring": ring(document)}
    if "steps" in document:
        return {"paged": f"{_machine(document)}\n\n{server_table.text(document)}"}
    if "gallery_errors" in document:
        return {"errors": gallery_errors(document)}
    if "precision" in document:
        return {"precision": f"{_machine(document)}\n\n{precision_table.text(document)}"}
    if "residency" in document:
        return {document["residency"]["arch"]: tables(document, image)}
    if document["cells"] and not of_grid(document):
        groups = {cell["group"] for cell in document["cells"]}
        if groups == {"functions"}:
            return {"functions": functions(document)}
        if "gallery" in groups:
            raise ValueError("results of the gallery have pages: python docs/gallery_pages.py")
        return {block_of(document): tables(document, image)}
    found = {"tables": tables(document, image)}
    return found | ({"host": host(document)} if document["host"] else {})


def insert(text: str, blocks: dict[str, str]) -> str:
    """``text``, with the content of each marked block that is in ``blocks`` replaced.

    Raises ``ValueError`` if there is no marker, or if a marker has a name that no block has.

    >>> insert("<!-- benchmarks:begin host -->\\n<!-- benchmarks:end -->", {"host": "3 us"})
    '<!-- benchmarks:begin host -->\\n3 us\\n<!-- benchmarks:end -->'
    """
    names = [match["name"] for match in _BLOCK.finditer(text)]
    if not names or (unknown := set(names) - set(_NAMES)):
        wrong = f"the names {sorted(unknown)}" if names else "none"
        raise ValueError(
            "expected lines '<!-- benchmarks:begin NAME -->' and '<!-- benchmarks:end -->' with "
            f"a NAME out of {', '.join(_NAMES)}, got {wrong}: add them where the figures belong"
        )

    def replaced(block: re.Match[str]) -> str:
        if block["name"] not in blocks:
            return block[0]
        return f"{block[1]}{blocks[block['name']]}\n{block[3]}"

    return _BLOCK.sub(replaced, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "results", type=Path, help="written by another command here, or by gallery_errors.py"
    )
    parser.add_argument(
        "--into", type=Path, nargs="+", default=_TARGETS, help="default: docs and README.md"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        default=_ROOT / "docs" / "images" / "benchmarks.svg",
        help="SVG or PNG of the main grid; other plots lie beside it (default: %(default)s)",
    )
    options = parser.parse_args()
    document = read(options.results)
    plot = plot_path(document, options.plot)
    is_drawn = plot is not None and plots.draw(document, ours(document), plot)
    compared = overview.rows(map(read, sorted(_RESULTS.glob("*.json"))))
    for path in options.into:
        image = os.path.relpath(plot, path.parent) if is_drawn and plot else None
        try:
            text = path.read_text()
            found = blocks(document, image)
            if overview.MARKER in text:
                picture = options.plot.with_stem("overview")
                overview.draw(compared, picture)
                found["overview"] = overview.text(compared, os.path.relpath(picture, path.parent))
            if overview.EXTRACT_MARKER in text:
                found["extract"] = overview.extract(compared)
            path.write_text(insert(text, found))
        except (OSError, ValueError) as error:
            raise SystemExit(f"{path}: {error}") from error
        print(f"updated {path}")


if __name__ == "__main__":
    main()
