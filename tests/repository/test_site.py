"""Tests of the site that need no Sphinx; .ci/run builds it."""

from __future__ import annotations

import doctest
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import jax_memeff
import jax_memeff.dropout
import jax_memeff.flax

pytestmark = pytest.mark.quick

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))


def test_links_and_contents():
    spec = importlib.util.spec_from_file_location("conf", DOCS / "conf.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    failed, attempted = doctest.testmod(module)
    assert attempted == 6 and failed == 0
    for page, file in module.SHOWN.items():
        assert (DOCS / f"{page}.md").exists() and file.exists()
    for prefix in module.OUTSIDE_SEARCH:
        assert list(DOCS.glob(f"{prefix}*.md")), prefix


@pytest.mark.parametrize("module", [jax_memeff, jax_memeff.dropout, jax_memeff.flax])
def test_the_reference_has_every_public_name(module):
    names = {name for name in getattr(module, "__all__", dir(module)) if not name.startswith("_")}
    objects = {name: getattr(module, name) for name in names}
    documented = {
        name
        for name, value in objects.items()
        if inspect.isfunction(value) or inspect.isclass(value)
    }
    assert documented
    prefix = module.__name__.replace(".", r"\.")
    found = set(re.findall(rf":: {prefix}\.(\w+)", REFERENCE))
    assert documented - found == set()


def test_the_reference_has_every_method_of_masks():
    own = {
        name
        for kind in jax_memeff.Mask.__mro__
        for name, value in vars(kind).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, staticmethod))
    }
    (listed,) = re.findall(r"jax_memeff\.Mask\(\)\n   :members: (.*)", REFERENCE)
    internal = {"all_lengths", "canonical", "has_function", "without_block_masks"}
    assert own - internal == set(listed.split(", "))


def test_a_site_that_needs_the_network_or_has_a_broken_link_is_refused(tmp_path):
    """.ci/check_site.py, which .ci/run runs on the built site."""
    spec = importlib.util.spec_from_file_location("check_site", DOCS.parent / ".ci/check_site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page, style = tmp_path / "guide" / "page.html", tmp_path / "style.css"
    page.parent.mkdir()
    style.write_text("body { color: red }")
    (tmp_path / "index.html").write_text('<h1 id="top">Index</h1>')
    good = (
        '<link rel="stylesheet" href="../style.css"><link rel="canonical" href="https://a.org/">'
        '<a href="https://a.org/x">x</a><a href="../index.html#top">y</a><a href="#own">z</a>'
        '<img src="data:image/png;base64,AA"><p id="own">'
    )
    page.write_text(good)
    assert module.main([str(tmp_path)]) == 0
    page.write_text(
        good + '<script src="https://cdn.org/a.js"></script><img src="//cdn.org/b.png">'
        '<img src="lost.svg"><a href="../lost.html"></a><a href="../index.html#lost"></a>'
        '<a href="#lost"></a>'
    )
    style.write_text("@font-face { src: url('https://fonts.org/a.woff') }")
    assert module.faults(tmp_path) == [
        "guide/page.html loads https://cdn.org/a.js from the network",
        "guide/page.html loads //cdn.org/b.png from the network",
        "guide/page.html loads lost.svg, which does not exist",
        "guide/page.html links to ../lost.html, which does not exist",
        "guide/page.html links to ../index.html#lost, which does not exist",
        "guide/page.html links to #lost, which does not exist",
        "style.css loads https://fonts.org/a.woff",
    ]
    assert module.faults(tmp_path / "nothing") != []
