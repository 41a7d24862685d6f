"""Prints today's files with tests, one per line. A file is due two days in a row, once a week.

JAX_MEMEFF_CLOSURE chooses another day, or all files, as in tests/daily.py.
"""

import sys
import tomllib
import zlib
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import daily  # noqa: E402


def is_due(file: str, today: int | None = daily.TODAY) -> bool:
    # Two days in a row, because cases of @pytest.mark.rotating(2) change every day. Seven has no
    # factor in common with the parts of rotating cases, so each part meets each file's days. The
    # digest of its name keeps a file on its days when others come and go.
    return today is None or (today + zlib.crc32(file.encode())) % 7 < 2


def files() -> list[str]:
    """The files below ``testpaths`` in which pytest can find tests or doctests."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = (
        file.relative_to(ROOT)
        for folder in settings["tool"]["pytest"]["ini_options"]["testpaths"]
        for file in (ROOT / folder).rglob("*.py")
    )
    return sorted(map(str, found))


if __name__ == "__main__":
    print(*filter(is_due, files()), sep="\n")
