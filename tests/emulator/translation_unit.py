"""Several kernels in one source, because compilers spend most of their time on common parts.

NVRTC takes 3 s to read CuTe and 2 s to compile a kernel; g++ instantiates the same templates for
each kernel.
"""

from __future__ import annotations

import re
from collections.abc import Sequence


def preamble(source: str) -> str:
    """The preprocessor's lines of a kernel's source."""
    return "".join(line for line in source.splitlines(keepends=True) if line.startswith("#"))


def joined(sources: Sequence[str]) -> str:
    """One source in which each kernel has a namespace, because each has a ``Config``.

    Entry points are ``extern "C"`` and keep their names. Hazard: all preambles must have the same
    definitions, because these change the headers.
    """
    heads = [preamble(source).splitlines() for source in sources]
    assert len({tuple(line for line in head if "define" in line) for head in heads}) == 1
    lines = dict.fromkeys(line for head in heads for line in head)
    text = "".join(f"{line}\n" for line in lines)
    for index, source in enumerate(sources):
        body = "".join(x for x in source.splitlines(keepends=True) if not x.startswith("#"))
        functions = "".join(_FUNCTIONS.findall(body))
        kernel = f"namespace kernel{index} {{\n{_FUNCTIONS.sub('', body)}}}\n"
        # The structs of users' functions have the same names in all sources and call functions of
        # their namespace.
        for name in ("", *(f"::{name}" for name in _STRUCTS.findall(functions))):
            own = f"memeff::function::kernel{index}{name}"
            functions = re.sub(rf"\bmemeff::function{name}\b(?!::)", own, functions)
            kernel = re.sub(rf"\bmemeff::function{name}\b(?!::)", own, kernel)
        text += functions + kernel
    return text


_FUNCTIONS = re.compile(r"^namespace memeff::function \{\n.*?^\}(?:  //[^\n]*)?\n", re.M | re.S)
_STRUCTS = re.compile(r"^struct (\w+) ", re.M)
