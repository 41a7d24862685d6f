"""Writes the pages and pictures of the gallery: ``python docs/gallery_pages.py``.

The code comes from examples/gallery and the speeds from benchmarks/results. A test checks that the
pages are up to date.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "examples"))

from gallery import lists, scores, structure, windows
from gallery.catalog import ENTRIES, Entry, Shape

from jax_memeff import Mask
from jax_memeff._call.mask import pictures
from jax_memeff._call.mask.pictures import Picture, summary

FOLDER = ROOT / "docs" / "gallery"
_PAGES = {
    scores: "Functions of scores",
    windows: "Windows",
    structure: "Structure",
    lists: "Lists of keys",
}
_MASK_SHAPE, _SCORE_SHAPE = Shape(1, 4, 64), Shape(1, 4, 25)
_TILE = 4
"""Rows and columns of a tile in the pictures of masks."""
_LEGEND = "![The colors of the pictures of masks](legend.svg)"
_STYLE = "svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}"
"""For an SVG that is no part of a page: its text is dark on a light page, light on a dark one."""
_LEVELS = ("#08306b", "#2171b5", "#6baed6", "#c6dbef", "#fee0d2", "#fc9272", "#de2d26", "#67000d")
"""From low to high scores."""


def files() -> dict[Path, str]:
    """The text of each file, by its path."""
    found = {FOLDER / "README.md": _index(), FOLDER / "legend.svg": _legend()}
    for module, title in _PAGES.items():
        found[FOLDER / f"{_name(module)}.md"] = _page(module, title)
        for entry in _entries(module):
            found[FOLDER / _name(module) / f"{entry.name}.svg"] = picture(entry)
    return found


def _name(module: ModuleType) -> str:
    return module.__name__.split(".")[-1]


def _entries(module: ModuleType) -> Iterator[Entry]:
    return (entry for entry in ENTRIES.values() if entry.make.__module__ == module.__name__)


def _index() -> str:
    lines = [
        "# Gallery",
        "",
        "The gallery has score and mask functions from the literature. Each is a few lines of JAX "
        "that are compiled into the kernels ([Functions](../guide/functions.md)).",
        "Tests compare each function with dense JAX, including the gradients of all float arrays "
        "that it reads. The code is in [examples/gallery](../../examples/gallery).",
        "",
        *_how_to_read(),
        "",
    ]
    for module, title in _PAGES.items():
        page = f"{_name(module)}.md"
        lines += [f"## {title}", "", "| | | |", "|---|---|---|"]
        cells = [
            f"[![]({_name(module)}/{e.name}.svg)]({page}#{_anchor(e.title)}) "
            f"[{e.title}]({page}#{_anchor(e.title)})"
            for e in _entries(module)
        ]
        cells += [""] * (-len(cells) % 3)
        lines += [f"| {' | '.join(cells[i : i + 3])} |" for i in range(0, len(cells), 3)]
        lines.append("")
    return "\n".join(lines)


def _how_to_read() -> list[str]:
    """Explains the colors in the pictures of masks."""
    return [
        _LEGEND,
        "",
        "Kernels never load a skipped tile. They test each element of a partial tile, and no "
        f"element of a full one. The pictures have {_MASK_SHAPE.length} columns and tiles of "
        f"{_TILE} x {_TILE}. The tiles of kernels are larger: `mask.show(T)` draws tiles of "
        "128 x 128, and `jax_memeff.picture` those of the kernel that a call gets. Pictures of "
        "scores show low scores in blue, high ones in red, and masked ones in gray. Speeds are "
        "relative: above 1, the call with the function or mask is faster.",
    ]


def _legend() -> str:
    """An SVG with the name of each color of the pictures of masks."""
    width, line = 230, 22
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" '
        f'height="{line * len(pictures.COLORS)}" fill="currentColor" font-family="sans-serif" '
        'font-size="14">',
        f"<style>{_STYLE}</style>",
    ]
    for number, (name, color) in enumerate(pictures.COLORS.items()):
        top = line * number
        lines.append(f'<rect x="4" y="{top + 4}" width="14" height="14" fill="{color}"/>')
        lines.append(f'<text x="26" y="{top + 16}">{name}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _anchor(title: str) -> str:
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _page(module: ModuleType, title: str) -> str:
    source = inspect.getsource(module)
    first = next(
        node.lineno for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)
    )
    header = ast.get_docstring(ast.parse(source)) or ""
    imports = "\n".join(source.splitlines()[: first - 1]).replace(f'"""{header}"""', "").strip()
    parts = [f"# {title}", _markdown(header), f"```python\n{imports}\n```"]
    shown = {entry.make for entry in _entries(module)}
    if any(entry.is_mask for entry in _entries(module)):
        parts.append(_LEGEND)
    for entry in _entries(module):
        parts += [
            f"## {entry.title}",
            _markdown(inspect.getdoc(entry.make) or ""),
            f"![{entry.title}]({_name(module)}/{entry.name}.svg)",
            *_tiles(entry),
            *_speed(entry),
            _code(entry.make),
        ]
    helpers = [
        function
        for _, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and function not in shown
    ]
    for function in helpers:
        parts += [f"## {function.__name__}", _markdown(inspect.getdoc(function) or "")]
        parts.append(_code(function))
    return "\n\n".join(parts) + "\n"


def _code(function: Any) -> str:
    """The source without the docstring, which the page shows above it."""
    lines = textwrap.dedent(inspect.getsource(function)).splitlines()
    body = ast.parse("\n".join(lines)).body[0]
    assert isinstance(body, ast.FunctionDef)
    text = body.body[0]
    del lines[text.lineno - 1 : text.end_lineno]
    if not lines[text.lineno - 1].strip():
        del lines[text.lineno - 1]
    return "```python\n" + "\n".join(lines) + "\n```"


def _markdown(docstring: str) -> str:
    """A docstring in Markdown: arguments become a list, and examples are left out."""
    text, _, arguments = docstring.partition("\nArgs:\n")
    arguments = arguments.split("\n\n")[0]
    items = re.sub(r"^    (\w[\w, ]*): ", r"- `\1`: ", arguments, flags=re.MULTILINE)
    items = re.sub(r"\n {8}", " ", items)
    joined = "\n\n".join(" ".join(part.split()) for part in text.strip().split("\n\n"))
    joined = "\n\n".join(filter(None, (joined, items.strip())))
    return re.sub(r":\w+:`([^`]+)`", r"`\1`", joined).replace("``", "`")


def _speed(entry: Entry) -> list[str]:
    """One sentence for each benchmark result of this entry."""
    found = []
    for path in sorted((ROOT / "benchmarks" / "results").glob("*-gallery.json")):
        document = json.loads(path.read_text())
        for cell in document["cells"]:
            if cell["function"] != f"gallery {entry.name}":
                continue
            ratios = [
                f"{direction.replace('_', ' + ')} {_ratio(records):.2f}"
                for direction, records in cell["results"].items()
                if _ratio(records)
            ]
            if ratios:
                what = "without a mask" if entry.is_mask else "without the function"
                found.append(
                    f"Speed relative to the call {what} ({document['device']['name']}, head dim "
                    f"{cell['head_dim']}, T {cell['query_length']}): {', '.join(ratios)}."
                )
    return found


def _ratio(records: dict[str, Any]) -> float:
    """The speed with the function relative to that without it; 0 if a result is missing."""
    seconds = [records.get(n, {}).get("seconds") for n in ("memeff_plain", "memeff_cuda")]
    return 0.0 if None in seconds else seconds[0] / seconds[1]


def _tiles(entry: Entry) -> list[str]:
    """One sentence with the classes of the tiles of a mask's picture."""
    if not entry.is_mask:
        return []
    first, *second = (summary(panel).split(": ")[1] for panel in mask_pictures(entry))
    others = [f" The second head: {counts}." for counts in second]
    return ["".join([f"Tiles: {first}.", *others])]


def mask_pictures(entry: Entry) -> list[Picture]:
    """The pictures of a mask for two heads, or for one if both are equal."""
    call = entry.call(*entry.arguments(_MASK_SHAPE))
    mask = call["mask"] & Mask.causal() if entry.is_causal else call["mask"]
    length = _MASK_SHAPE.length
    first, second = (
        mask.picture(entry.rows or length, length, tile=(_TILE, _TILE), head=head)
        for head in range(2)
    )
    return [first] if (first.valid == second.valid).all() else [first, second]


def picture(entry: Entry) -> str:
    """An SVG of the tiles of a mask, or of scores, for two heads, or for one if both are equal.

    The scores before the function are 0. For a soft cap they grow from -8 to 8 with the column.
    """
    if entry.is_mask:
        panels = [pictures.kinds_of(panel) for panel in mask_pictures(entry)]
        colors, scale = tuple(pictures.COLORS.values()), 5
    else:
        levels = _levels(entry)
        panels = [levels[0], *(x for x in levels[1:2] if (x != levels[0]).any())]
        colors, scale = _LEVELS, 8
    size, gap = panels[0].shape, 4
    width = len(panels) * (size[1] + gap) - gap
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{scale * width}" '
        f'height="{scale * size[0]}" viewBox="0 0 {width} {size[0]}" shape-rendering="crispEdges">'
    ]
    for number, panel in enumerate(panels):
        left = number * (size[1] + gap)
        lines.append(f'<rect x="{left}" width="{size[1]}" height="{size[0]}" fill="#eee"/>')
        for level, color in enumerate(colors):
            if path := _runs(panel == level, left):
                lines.append(f'<path stroke="{color}" d="{path}"/>')
        if entry.is_mask:
            lines.append(_borders(size, left))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _borders(size: tuple[int, ...], left: int) -> str:
    """The lines between the tiles."""
    rows, columns = size
    lines = [f"M{left} {row}h{columns}" for row in range(_TILE, rows, _TILE)]
    lines += [f"M{left + column} 0v{rows}" for column in range(_TILE, columns, _TILE)]
    return f'<path stroke="#fff" stroke-width=".2" d="{"".join(lines)}"/>'


def _runs(cells: np.ndarray, left: int) -> str:
    """A path with one line of width 1 for each run of cells in a row."""
    parts = []
    for row, own in enumerate(cells):
        edges = np.flatnonzero(np.diff(np.pad(own.astype(int), 1)))
        for start, end in edges.reshape(-1, 2):
            parts.append(f"M{left + start} {row}.5h{end - start}")
    return "".join(parts)


def _levels(entry: Entry) -> np.ndarray:
    """int [N, T, S]: -1 for masked elements, else the level of the score."""
    shape = _SCORE_SHAPE
    call = entry.call(*entry.arguments(shape))
    sizes = (1, shape.heads, shape.length, shape.length)
    ramp = np.linspace(-8, 8, shape.length) if entry.make is scores.soft_cap else 0
    given = jnp.broadcast_to(jnp.asarray(ramp, jnp.float32), sizes[1:]).ravel()
    index = (x.ravel() for x in np.meshgrid(*map(np.arange, sizes), indexing="ij"))
    changed = jax.vmap(call["score_mod"])(given, *index).reshape(sizes[1:])
    lowest, highest = jnp.quantile(changed, jnp.array([0.02, 0.98]))
    level = (changed - lowest) / (highest - lowest) * len(_LEVELS)
    level = np.clip(np.floor(np.asarray(level)), 0, len(_LEVELS) - 1).astype(int)
    valid = np.tril(np.ones(sizes[2:], bool)) if entry.is_causal else True
    return np.where(valid, level, -1)


if __name__ == "__main__":
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
