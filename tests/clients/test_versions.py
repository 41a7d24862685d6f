"""The versions that the pages of docs/clients name are those that the tests run with."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from pages import PAGES

pytestmark = pytest.mark.quick

ROOT = PAGES.parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PACKAGES = {
    "equinox.md": "Equinox",
    "flaxdiff.md": "flaxdiff",
    "haiku.md": "dm-haiku",
    "keras.md": "Keras",
    "levanter.md": "haliax",
}
"""The name of the package in the last paragraph of each page; pip takes it in lower case."""


def pinned(package: str) -> str:
    """The one version, or the last number left open, that pyproject.toml or .ci/run installs."""
    sources = [line for extra in ("clients", "test") for line in EXTRAS[extra]]
    sources += re.findall(r"install --no-deps (.*) &&", (ROOT / ".ci/run").read_text())
    found = re.findall(rf"{re.escape(package)}==(\S+)", " ".join(sources))
    assert len(found) == 1, f"expected one pin of {package}, got {found}"
    return found[0].removesuffix(".*")


@pytest.mark.parametrize("page", PACKAGES)
def test_a_page_names_the_pinned_version(page):
    package = PACKAGES[page].lower()
    last = (PAGES / page).read_text().strip().split("\n\n")[-1]
    assert re.findall(rf"{PACKAGES[page]} (\d+(?:\.\w+)*)", last) == [pinned(package)]
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    assert f"{installed}.".startswith(f"{pinned(package)}.")


def test_every_page_names_the_tests_of_its_adapter():
    for page in sorted(path.name for path in Path(PAGES).glob("*.md") if path.name != "README.md"):
        (test,) = re.findall(r"`(tests/\w+/test_\w+\.py)`", (PAGES / page).read_text())
        assert (ROOT / test).exists() and page in (*PACKAGES, "maxtext.md", "decoders.md")
