"""The site: ``python -m sphinx -W --keep-going docs build/site``, with the extra ``docs``.

Pages are the Markdown files of this folder, which GitHub shows as they are. Links that leave the
folder are changed here: to the page of the site that shows the file, or to the file on GitHub.
"""

from __future__ import annotations

import html
import os
import re
from importlib.metadata import version as version_of
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from docutils.nodes import document
    from sphinx.application import Sphinx

DOCS = Path(__file__).parent
ROOT = DOCS.parent
REPOSITORY = "https://github.com/jax-memeff/jax-memeff"

project = "jax-memeff"
author = "the jax-memeff authors"
copyright = author
version = release = version_of("jax-memeff")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
suppress_warnings = ["toc.empty_glob"]

myst_heading_anchors = 3
myst_links_external_new_tab = False

autodoc_typehints = "none"  # docstrings have shapes and dtypes, which types do not say
autodoc_member_order = "bysource"
napoleon_use_rtype = False
python_maximum_signature_line_length = 80

highlight_language = "text"  # formulas in docstrings are no Python

pygments_dark_style = "github-dark"

html_theme = "furo"
html_title = f"jax-memeff {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_search_scorer = str(DOCS / "search_scorer.js")
html_copy_source = False
templates_path = ["_templates"]
html_context = {"repository": REPOSITORY}
html_sidebars = {
    "**": [
        *("sidebar/brand.html", "repository.html", "sidebar/search.html"),
        *("sidebar/scroll-start.html", "sidebar/navigation.html", "sidebar/scroll-end.html"),
    ]
}
html_theme_options = {
    # At the end of each page, because a phone does not show the sidebar.
    "footer_icons": [
        {"name": "Repository", "url": REPOSITORY, "html": "Repository", "class": "repository"}
    ],
    "light_css_variables": {"color-brand-primary": "#0b5394", "color-brand-content": "#0b5394"},
    "dark_css_variables": {"color-brand-primary": "#79b8ff", "color-brand-content": "#79b8ff"},
}

SHOWN = {
    "project/changelog": ROOT / "CHANGELOG.md",
    "project/contributing": ROOT / "CONTRIBUTING.md",
    "project/benchmark_method": ROOT / "benchmarks/README.md",
}
"""Files outside this folder, by the page that shows each."""

_PAGES = {path: f"/{page}.md" for page, path in SHOWN.items()} | {ROOT / "README.md": "/index.md"}
OUTSIDE_SEARCH = ("tuning/", "project/changelog", "project/benchmark_method")
"""Pages that users do not look for: their words would hide guides. Other pages link to them."""

_LINK = re.compile(r"\]\((?P<target>[^)#:\s]+)(?P<anchor>#[^)\s]*)?\)")
_WORD_OF_CODE = re.compile(r'(?<=<span class="pre">)[^<]{18,}(?=</span>)')
_BREAK_AFTER = re.compile(r"(?<=\w)([_./,=(\[|]+|-(?=\w))(?=\w)")


def site_links(text: str, folder: Path) -> str:
    """``text`` of a file in ``folder`` with links that work on the site.

    >>> site_links("[a](../README.md) [b](guide/masks.md#window)", DOCS)
    '[a](/index.md) [b](/guide/masks.md#window)'
    >>> site_links("[c](../../examples)", DOCS / "guide").removeprefix(f"[c]({REPOSITORY}")
    '/blob/main/examples)'
    """

    def on_site(link: re.Match[str]) -> str:
        path = Path(os.path.normpath(folder / link["target"]))
        anchor = link["anchor"] or ""
        if path in _PAGES:
            target = _PAGES[path] + anchor
        elif path.is_relative_to(DOCS) and path.suffix in (".md", ".svg", ".png"):
            target = f"/{path.relative_to(DOCS)}{anchor}"
        else:
            target = f"{REPOSITORY}/blob/main/{path.relative_to(ROOT)}{anchor}"
        return f"]({target})"

    return _LINK.sub(on_site, text)


def contents(page: str, text: str) -> str:
    """A table of contents for the README of a folder, or for a page with a folder of its name.

    It has the pages that the text links, then the others.

    >>> contents("tuning/README", "[first](sm90_forward.md)").split()[2:4]
    ['sm90_forward', 'compilers']
    >>> contents("benchmarks", "[first](benchmarks/serving.md#pages)").split()[2:4]
    ['benchmarks/serving', 'benchmarks/cpu']
    """
    prefix = "" if page.endswith("README") else f"{Path(page).name}/"
    folder = (DOCS / page).parent / prefix
    linked = re.findall(rf"\]\({prefix}(\w+)\.md", text)
    there = sorted(path.stem for path in folder.glob("*.md"))
    names = [name for name in dict.fromkeys([*linked, *there]) if name in there]
    entries = "\n".join(prefix + name for name in names if name != "README")
    return f"\n```{{toctree}}\n:hidden:\n\n{entries}\n```\n"


def breakable(body: str) -> str:
    """HTML whose long words of code may break after separators, but not inside identifiers.

    >>> breakable('<span class="pre">key_value_seq_lengths</span>')
    '<span class="pre">key_<wbr>value_<wbr>seq_<wbr>lengths</span>'
    """
    return _WORD_OF_CODE.sub(lambda word: _BREAK_AFTER.sub(r"\1<wbr>", word[0]), body)


def _read(app: Sphinx, page: str, source: list[str]) -> None:
    path = SHOWN.get(page, DOCS / f"{page}.md")
    text = path.read_text() if page in SHOWN else source[0]
    has_contents = page not in SHOWN and (path.name == "README.md" or (DOCS / page).is_dir())
    source[0] = site_links(text, path.parent) + (contents(page, text) if has_contents else "")


def inlined(svg: str, alternative: str) -> str:
    """An SVG as a part of a page, whose text color replaces the one of its own style.

    >>> inlined('<svg width="9"><style>svg{color:red}</style></svg>', 'a & "b"')
    '<svg role="img" aria-label="a &amp; &quot;b&quot;" width="9"></svg>'
    """
    label = html.escape(alternative)
    own = re.sub(r"<style>.*?</style>\n?", "", svg)
    return own.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def _inline_pictures(app: Sphinx, doctree: document, page: str) -> None:
    """Pictures that use the color of the text follow the theme that a reader selects."""
    from docutils import nodes  # the tests read this file without Sphinx

    for image in list(doctree.findall(nodes.image)):
        path = DOCS / image["uri"]
        if path.suffix == ".svg" and "currentColor" in (svg := path.read_text()):
            raw = inlined(svg, image.get("alt", ""))
            image.replace_self(nodes.raw("", raw, format="html"))


def _leave_out_of_search(app: Sphinx, doctree: document) -> None:
    page = app.env.docname
    if page.startswith(OUTSIDE_SEARCH):
        app.env.metadata[page]["nosearch"] = "yes"
    if page == "tuning/README":
        app.env.metadata[page]["orphan"] = "yes"  # no table of contents has it


def _break_code(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: document | None
) -> None:
    if "body" in context:
        context["body"] = breakable(context["body"])


def setup(app: Sphinx) -> None:
    app.connect("source-read", _read)
    app.connect("doctree-resolved", _inline_pictures)
    app.connect("doctree-read", _leave_out_of_search)
    app.connect("html-page-context", _break_code)
