"""The files of results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import machine


def default_path(device_name: str, suffix: str = "") -> Path:
    """In ``results``, by device and date."""
    device = device_name.lower().replace(" ", "-")
    return Path(__file__).parent / "results" / f"{device}-{machine.today()}{suffix}.json"


def write(path: Path, document: dict[str, Any]) -> None:
    """Replaces the file at once, so that an interrupted run leaves the cells it has finished."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    temporary.replace(path)
