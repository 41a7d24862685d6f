"""Compiles several kernels at a time with NVRTC, which is faster."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from emulator.translation_unit import joined, preamble

from jax_memeff.codegen import emit
from jax_memeff.codegen.spec import KernelSpec
from jax_memeff.codegen.toolchain import compile as compiler
from jax_memeff.codegen.toolchain.compile import Compiled

AT_A_TIME = 8


def compiled(specs: Iterable[KernelSpec], arch: str) -> Iterator[tuple[list[KernelSpec], Compiled]]:
    """Yields some kernels at a time with the compiler's results.

    Machine code, resources and remarks equal those of each kernel alone, because ptxas does not
    optimize across entry points.
    """

    def definitions(spec: KernelSpec) -> list[str]:
        return [line for line in preamble(emit.source(spec)).splitlines() if "define" in line]

    for _, group in itertools.groupby(sorted(specs, key=definitions), definitions):
        same = list(group)
        for first in range(0, len(same), AT_A_TIME):
            batch = same[first : first + AT_A_TIME]
            names = [entry.name for spec in batch for entry in spec.entry_points]
            source = joined([emit.source(spec) for spec in batch])
            yield batch, compiler.compile_source(source, arch, names)
