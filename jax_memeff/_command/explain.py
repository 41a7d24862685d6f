"""``python -m jax_memeff explain``: the kernel of a problem, those that lost, and its tiles."""

from __future__ import annotations

import argparse
import importlib
from typing import NamedTuple

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from jax_memeff.codegen import select
from jax_memeff.codegen.features.mask import NO_BOUND
from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.select import family_reasons
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.strategy import Strategy

NEAREST = 3
"""The number of kernels shown besides the one that is selected, unless all are asked for."""


class _Loser(NamedTuple):
    """A kernel that was not selected: its place in the order of choice, and the reasons."""

    place: int
    spec: KernelSpec
    reasons: list[str]


def choice(out: Console, problem: Problem, strategy: Strategy, *, every: bool) -> KernelSpec | None:
    """Print which kernel serves a problem, and why others do not; returns it, or None without one.

    Args:
        out: where to print.
        problem, strategy: those of the call.
        every: whether all other kernels are shown, in the order of choice. By default these are the
            nearest ones.
    """
    if reasons := family_reasons(problem):
        for reason in reasons:
            out.print(f"  {reason}", style="red", markup=False)
        return None
    explained = select.explain(problem, strategy)
    at = next((place for place, (_, reasons) in enumerate(explained) if not reasons), None)
    selected = None if at is None else explained[at][0]
    if selected is None:
        out.print("no kernel fits this problem", style="red")
    else:
        _print(out, selected, f"selected: {selected.tile.reason}", "green")
    losers = [
        _Loser(place, spec, reasons or [_merit(spec, selected)])
        for place, (spec, reasons) in enumerate(explained)
        if place != at
    ]
    shown = losers if every else _nearest(losers, selected, at or 0)
    if shown:
        order = "in the order of choice" if every else "the nearest ones"
        out.print(f"\n[bold]Not selected[/bold], {order}:")
    for loser in shown:
        _print(out, loser.spec, "; ".join(loser.reasons))
    if len(shown) < len(losers):
        out.print(f"{len(losers) - len(shown)} more with --all")
    out.print()
    return selected


def _nearest(losers: list[_Loser], selected: KernelSpec | None, at: int) -> list[_Loser]:
    """Those with the fewest reasons against them, and of these the closest in the order of choice.

    Kernels of one name differ in a detail of the tile; only the nearest of them is shown.
    """
    names = {None if selected is None else selected.name}
    nearest = []
    for loser in sorted(losers, key=lambda loser: (len(loser.reasons), abs(loser.place - at))):
        if loser.spec.name not in names:
            names.add(loser.spec.name)
            nearest.append(loser)
    return nearest[:NEAREST]


def _merit(spec: KernelSpec, selected: KernelSpec | None) -> str:
    """How a kernel that solves the problem compares with the one that is selected."""
    assert selected is not None
    dims = (spec.padded_head_dim, spec.padded_value_dim)
    is_padded = dims != (selected.padded_head_dim, selected.padded_value_dim)
    return f"fits, {'with more padding' if is_padded else 'but comes after the selected one'}"


def _print(out: Console, spec: KernelSpec, verdict: str, style: str | None = None) -> None:
    name = Text(spec.name, style or "bold")
    out.print(name + Text(f"  {spec.shared_bytes} bytes of shared memory"), soft_wrap=True)
    out.print(Padding(Text(verdict), (0, 0, 0, 2), expand=False))


def grid(spec: KernelSpec, sequence: int) -> str:
    """The number of tiles of a kernel for so many rows, or columns in a backward."""
    by_keys = spec.direction == "backward"
    tile = spec.tile.key if by_keys else spec.tile.query
    rows, heads = ("key", "key heads") if by_keys else ("query", "query heads")
    count = -(-sequence // tile)
    if spec.kernel.splits_keys:
        return f"{count} tiles of {tile} rows; as many splits of the keys as fill the device"
    return f"{count} tiles of {tile} {rows} rows for each of the {heads} and batch indices"


def drawing(options: argparse.Namespace, spec: KernelSpec) -> str:
    """A drawing of the tiles, as far as the flags determine the mask."""
    if spec.kernel.splits_keys:
        return "no drawing: the rows of a tile belong to several heads"
    if options.window == NO_BOUND:
        return "no drawing: pass a bound, such as --window 256"
    # Only drawings and functions need JAX.
    pictures = importlib.import_module("jax_memeff._call.mask.pictures")
    count = pictures.number_of_tiles((options.seq,) * 2, (spec.tile.query, spec.tile.key))
    if count > pictures.MOST_TILES:
        return f"no drawing: it would have {count} tiles; pass a smaller --seq"
    mask_type = importlib.import_module("jax_memeff._call.mask").Mask
    mask = mask_type()
    if options.window is not None:
        mask = mask_type.window(options.window, 0)
    elif options.causal:
        mask = mask_type.causal()
    if options.mask_function is not None:
        named_functions = importlib.import_module("jax_memeff._cuda.named_functions")
        mask &= named_functions.mask(options.mask_function)
    tile = spec.tile.query, spec.tile.key
    unknown = [name for name in ("segments", "boolean") if getattr(options, name)]
    note = f"\nwithout --{' and --'.join(unknown)}, whose arrays are unknown here"
    return f"{mask.picture(options.seq, tile=tile)}{note if unknown else ''}"
