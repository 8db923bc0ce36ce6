"""Checks a built site: the files and anchors that its links name exist, and it loads nothing from other hosts."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LINKING = {"a": "href", "img": "src", "link": "href", "script": "src", "source": "src"}


class _Page(HTMLParser):
    """The links and anchors of an HTML file."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        """Images and scripts of other hosts."""
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if value and (name == "id" or (tag == "a" and name == "name")):
                self.anchors.add(value)
            elif value and name == _LINKING.get(tag):
                foreign = tag not in ("a", "link") and urlsplit(value).netloc
                (self.loaded if foreign else self.links).add(value)


def broken_links(site: Path) -> list[str]:
    """The broken internal links of a site, as `page: link`.

    The page for unknown addresses is left out: its links begin at the root of the server.
    """
    pages = {path: _Page(path.read_text()) for path in sorted(site.glob("**/*.html")) if path.name != "404.html"}
    broken = []
    for path, page in pages.items():
        broken += [f"{path.relative_to(site)}: {link}" for link in sorted(page.loaded)]
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            exists = target.is_relative_to(site.resolve()) and target.is_file()
            anchor = unquote(parts.fragment)
            if not exists or (anchor and target in pages and anchor not in pages[target].anchors):
                broken.append(f"{path.relative_to(site)}: {link}")
    return broken
