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
    assert attempted == 3 and failed == 0
    for page, file in module.SHOWN.items():
        assert (DOCS / f"{page}.md").exists() and file.exists()


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
        for name, value in vars(jax_memeff.Mask).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, staticmethod))
    }
    (listed,) = re.findall(r"jax_memeff\.Mask\(\)\n   :members: (.*)", REFERENCE)
    internal = {"canonical", "has_function", "without_block_masks"}
    assert own - internal == set(listed.split(", "))
