"""The pages of docs/clients, and the adapter that one of them has."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from types import SimpleNamespace

PAGES = Path(__file__).parents[2] / "docs" / "clients"


@functools.cache
def adapter(page: str) -> SimpleNamespace:
    """The names that the first block of Python on a page defines."""
    block = re.search(r"^```py(?:thon)?\n(.*?)^```", (PAGES / page).read_text(), re.S | re.M)
    assert block is not None
    names = {"__name__": f"adapter of {page}"}
    exec(compile(block[1], str(PAGES / page), "exec"), names)
    return SimpleNamespace(**names)
