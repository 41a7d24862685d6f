"""The two pictures: a point for each figure, in strips by architecture and by task.

They have no background and take the color of the text around them, so they can be read on a light
and on a dark page, and their letters have at least 11 pixels on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

from reporting.results import DIRECTIONS

from overview.comparison import DENSE, FEATURES, SERVING, Group, Result, mean

FASTER, SLOWER = "#2f81f7", "#e5534b"
WIDTH = 420
FONT = 13
_MARGIN, _HEADING, _LABEL, _BAND, _GAP = 8, 26, 18, 24, 8
_TICKS = (0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 20)
_STYLE = "svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}"
UNMEASURED = ("A100", "A10", "L4", "L40S", "RTX 20 to 50", "B200")

_KINDS = {"hopper": "Hopper", "sm80": "sm_80 family", "cpu": "CPU"}

Part = tuple[str, dict[str, list[Result]]]
"""A heading, and strips by their labels."""


def by_architecture(groups: Sequence[Group]) -> list[Part]:
    """A part for each device, with a strip for each direction."""
    parts = []
    for device in dict.fromkeys(group.device for group in groups):
        own = [group for group in groups if group.device == device]
        strips = {title: _of(own, direction) for direction, title in DIRECTIONS.items()}
        parts.append((f"{_KINDS[own[0].architecture]}: {device}", strips))
    return _with_points(parts)


def by_task(groups: Sequence[Group]) -> list[Part]:
    """A part for each task, with a strip for Hopper and one for the kernels of sm_80, no CPUs."""
    tasks = {
        "Training: forward + backward": (DENSE, "forward_backward"),
        "Prompts: forward": ((*DENSE, "prompts"), "forward"),
        "Decoding: few queries, steps of a server": (SERVING[:2], "forward"),
        "Features: windows, biases, dropout, masks, functions": (FEATURES, None),
    }
    parts = []
    for task, (names, direction) in tasks.items():
        strips = {
            _KINDS[kind]: _of(
                [g for g in groups if g.architecture == kind and g.name in names], direction
            )
            for kind in ("hopper", "sm80")
        }
        parts.append((task, strips))
    return _with_points(parts)


def _with_points(parts: Iterable[Part]) -> list[Part]:
    found = [(title, {k: v for k, v in strips.items() if v}) for title, strips in parts]
    return [part for part in found if part[1]]


def _of(groups: Iterable[Group], direction: str | None) -> list[Result]:
    return [result for group in groups for result in group.compared(direction)]


def counts(results: Sequence[Result]) -> str:
    """The mean, and how many are slower.

    >>> counts([Result("", "forward", 1.0, {"p": time}) for time in (2.0, 0.5)])
    '1.00, 1 of 2 slower'
    """
    slower = sum(result.is_slower for result in results)
    return f"{mean(results):.2f}, {slower} of {len(results)} slower"


def unmeasured(groups: Iterable[Group]) -> list[str]:
    """The GPUs that a reader will ask for and that no result is from."""
    devices = " ".join(group.device for group in groups).split(" ")
    return [name for name in UNMEASURED if name not in devices]


def spoken(parts: Sequence[Part]) -> str:
    """The numbers of a picture in words, for those who cannot see it."""
    return "; ".join(
        f"{title}, {label}: {counts(results)}"
        for title, strips in parts
        for label, results in strips.items()
    )


def drawn(parts: Sequence[Part], note: str = "") -> str:
    """The SVG of the parts, with a line of text below them."""
    points = [r.ratio for _, strips in parts for results in strips.values() for r in results]
    low, high = min(0.9, *filter(None, points)) * 0.94, max(1.1, *points) * 1.06
    width = WIDTH - 2 * _MARGIN

    def x(ratio: float) -> float:
        place = math.log(max(ratio, low) / low) / math.log(high / low)
        return _MARGIN + width * place

    ticks = {tick: x(tick) for tick in _TICKS if low <= tick <= high}
    lines, top = [], 0
    for title, strips in parts:
        lines.append(_text(_MARGIN, top + 17, title, weight=600))
        top += _HEADING
        for label, results in strips.items():
            lines.append(_text(_MARGIN, top + 12, label))
            lines.append(_text(WIDTH - _MARGIN, top + 12, f"mean {counts(results)}", "end"))
            lines += _strip(results, top + _LABEL, x, ticks)
            top += _LABEL + _BAND + _GAP
    lines += [
        _text(max(place, 12), top + 10, f"{tick:g}", "middle") for tick, place in ticks.items()
    ]
    lines.append(_text(_MARGIN, top + 30, "fastest peer's time / ours (red: the peer is faster)"))
    if note:
        lines.append(_text(_MARGIN, top + 50, note))
    height = top + (60 if note else 40)
    start = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" fill="currentColor" font-size="{FONT}" '
        'font-family="system-ui, sans-serif">'
    )
    return "\n".join([start, f"<style>{_STYLE}</style>", *lines, "</svg>"]) + "\n"


def _strip(
    results: Sequence[Result], top: int, x: Callable[[float], float], ticks: dict[float, float]
) -> list[str]:
    """A point for each result; neighbors in the list have different heights."""
    lines = [
        f'<rect x="{_MARGIN}" y="{top}" width="{x(1) - _MARGIN:.1f}" height="{_BAND}" '
        f'fill="{SLOWER}" opacity=".12"/>'
    ]
    for tick, place in ticks.items():
        opacity = ".8" if tick == 1 else ".2"
        lines.append(
            f'<path d="M{place:.1f} {top}v{_BAND}" stroke="currentColor" opacity="{opacity}"/>'
        )
    for is_slower, color in ((False, FASTER), (True, SLOWER)):
        points = [
            f'<circle cx="{x(result.ratio):.1f}" '
            f'cy="{top + _BAND * (0.2 + 0.15 * (index % 5)):.1f}" r="3"/>'
            for index, result in enumerate(results)
            if result.is_slower == is_slower
        ]
        if points:
            lines.append(f'<g fill="{color}" opacity=".85">{"".join(points)}</g>')
    return lines


def _text(x: float, y: float, words: str, anchor: str = "start", weight: int = 400) -> str:
    bold = f' font-weight="{weight}"' if weight != 400 else ""
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}"{bold}>{escape(words)}</text>'
