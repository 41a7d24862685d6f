"""Result files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LARGEST_DIFFERENCE = 0.05
"""Results that differ by more, as a relative Frobenius norm, are not those of the same function."""


def default_path(device_name: str, kind: str) -> Path:
    """The file for a kind of result on a device; a new result replaces the previous one."""
    device = device_name.lower().replace(" ", "-")
    return Path(__file__).parents[1] / "results" / f"{device}-{kind}.json"


def write(path: Path, document: dict[str, Any]) -> None:
    """Replaces the file atomically, so that an interrupted run keeps its finished cells."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".partial")
    temporary.write_text(_text(document) + "\n")
    temporary.replace(path)


def _text(document: dict[str, Any]) -> str:
    """JSON with one line for each entry, and for each element of a list of cells."""
    entries = []
    for name, value in document.items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        entries.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}"
