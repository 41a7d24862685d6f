"""Prints the commands of README.md, one per line: first the example, then the tests."""

import pathlib
import re

readme = (pathlib.Path(__file__).parent.parent / "README.md").read_text()
print(*re.findall(r"^```bash\n(.+)\n^```", readme, re.MULTILINE), sep="\n")
