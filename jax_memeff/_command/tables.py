"""The tables of ``python -m jax_memeff info``, and how tables look. Nothing here imports JAX."""

from __future__ import annotations

import os
import time

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from jax_memeff import config
from jax_memeff.codegen import emit, select
from jax_memeff.codegen.problem import Problem
from jax_memeff.codegen.toolchain import compile as compiler
from jax_memeff.codegen.toolchain import headers, parts, prebuilt

_WIDEST = 1000
"""Columns: wider than any table of numbers."""


def new_table(name: str, *columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(name, no_wrap=True, overflow="fold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def print_whole(out: Console, table: Table) -> None:
    """Print a table of numbers: a terminal that is narrower than it wraps whole lines.

    Columns that are narrowed to the terminal would break numbers into digits.
    """
    wide = out.options.update(width=_WIDEST)
    table.width = Measurement.get(out, wide, table).maximum
    out.print(table, crop=False)


def toolchain() -> Table:
    """Where each part of the toolchain is or, if it is missing, the places that were searched."""
    table = new_table("part", "found in", "through")
    found = parts.all_found()
    for part, place in found.items():
        path, via = ("not found", "") if place is None else (str(place.path), place.via)
        table.add_row(part.title, escape(path), via)
    if None in found.values():
        for place, value in parts.searched().items():
            table.add_row(f"searched {place}", escape(value.replace(os.pathsep, "\n")))
        table.add_row("to install it", escape(parts.install()))
    return table


def timings(arch: str) -> Table:
    """Seconds of each step from a problem to an image, for one small kernel."""
    spec = select.select(Problem("forward", "f16", 64, 64, arch))  # sm_75 has no bfloat16
    # A line that no other source has, so that the first compile cannot be found in the cache.
    text = f"// timed at {time.time_ns()}\n" + emit.source(spec)
    steps = {
        "digest of the headers": headers.digest,
        "compile": lambda: compiler.compile_source(text, arch, [spec.name]),
        "find in the cache": lambda: compiler.compile_source(text, arch, [spec.name]),
    }
    table = new_table("step", "milliseconds")
    for step, run in steps.items():
        start = time.perf_counter()
        run()
        table.add_row(f"{step} ({spec.name}, {arch})", f"{1e3 * (time.perf_counter() - start):.1f}")
    return table


def prebuilt_kernels() -> str:
    """The contents of the archive of ``JAX_MEMEFF_KERNELS``, or why it is not used."""
    try:
        found = prebuilt.contents()
    except prebuilt.UnusableArchiveError as error:
        return str(error)
    if found is None:
        return "JAX_MEMEFF_KERNELS is not set"
    fits = "" if found.fits else ", whose headers differ: not used"
    kernels = (
        f"{found.kernels} kernels for {', '.join(found.archs)}" if found.kernels else "no kernels"
    )
    return (
        f"{config.kernel_archive()}: {kernels}, "
        f"by jax_memeff {found.version} and NVRTC {found.compiler.get('nvrtc', 'unknown')}{fits}"
    )
