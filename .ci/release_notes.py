"""python .ci/release_notes.py TAG : the section of CHANGELOG.md for the release with this tag.

Ends with an error unless the tag is "v" and the version of pyproject.toml, and the section exists.
"""

import re
import sys
import tomllib
from pathlib import Path


def notes(root: Path, tag: str) -> str:
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    if tag != f"v{version}":
        raise SystemExit(
            f"expected the tag v{version}, as pyproject.toml has the version, got {tag}"
        )
    sections = re.split(r"^## ", (root / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    for section in sections[1:]:
        title, _, text = section.partition("\n")
        if re.fullmatch(rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", title):
            return text.strip()
    raise SystemExit(
        f"expected CHANGELOG.md to have a section '## [{version}] - YEAR-MONTH-DAY': rename "
        "'## [Unreleased]', and begin a new one above it"
    )


if __name__ == "__main__":
    print(notes(Path(__file__).parents[1], sys.argv[1]))
