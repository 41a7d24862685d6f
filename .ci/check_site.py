"""python .ci/check_site.py SITE : no page of a built site needs the network, and no link is broken.

A page may link to other sites. It may load nothing from them: no script, style, picture or frame.
"""

import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
FONTS_AND_STYLES = re.compile(r"""url\(\s*['"]?((?:https?:)?//[^)'"]+)|@import\s+['"]([^'"]+)""")


class Page(HTMLParser):
    """Collects the files that a page loads, its links, and the ids to which others may link."""

    def __init__(self, text: str):
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if "id" in values:
            self.ids.add(values["id"])
        # Relations such as "canonical" and "search" load nothing.
        if tag in LOADS and (
            tag != "link" or values.get("rel") in ("stylesheet", "icon", "preload")
        ):
            self.loads.append(values.get(LOADS[tag], ""))
        if tag == "a" and "href" in values:
            self.links.append(values["href"])


def faults(site: Path) -> list[str]:
    site = site.resolve()
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    found = [] if pages else [f"expected pages in {site}, got none"]
    for path, page in pages.items():
        name = path.relative_to(site)
        for target in filter(None, page.loads):
            parts = urlsplit(target)
            if parts.scheme in ("http", "https") or parts.netloc:
                found.append(f"{name} loads {target} from the network")
            elif not parts.scheme and not (path.parent / unquote(parts.path)).exists():
                found.append(f"{name} loads {target}, which does not exist")
        found += [f"{name} links to {link}, which does not exist" for link in broken(path, pages)]
    for path in sorted(site.rglob("*.css")):
        for match in FONTS_AND_STYLES.finditer(path.read_text()):
            found.append(f"{path.relative_to(site)} loads {match[1] or match[2]}")
    return found


def broken(path: Path, pages: dict[Path, Page]) -> list[str]:
    """The links of a page into the site that lead nowhere."""
    lost = []
    for link in pages[path].links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
        if target not in pages:
            exists = target.exists()
        else:
            exists = not parts.fragment or unquote(parts.fragment) in pages[target].ids
        if not exists:
            lost.append(link)
    return lost


def main(arguments: list[str]) -> int:
    found = faults(Path(arguments[0]))
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
