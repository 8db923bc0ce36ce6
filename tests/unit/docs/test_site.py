"""The documentation site: its navigation is complete, and broken links are found. `make site` builds it."""

from __future__ import annotations

import re
from pathlib import Path

from tests import ROOT
from tests.site.links import broken_links
from tests.site.stage import page_names


def test_every_page_is_in_the_navigation_once() -> None:
    configuration = (ROOT / "mkdocs.yml").read_text()
    nav = re.findall(r"^ +- (?:.*: )?(\S+\.md)$", configuration.partition("\nnav:\n")[2], re.MULTILINE)
    assert sorted(nav) == sorted(page_names(ROOT)), "add each page to `nav` in mkdocs.yml"


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "site" / "sub").mkdir(parents=True)
    texts = {
        "outside.html": "",
        "site/a.html": '<h1 id="top">A</h1><a href="#top"></a><a href="sub/b.html#part"></a><a href="sub/"></a>'
        '<a href="https://example.org/x"></a><a href="mailto:a@example.org"></a><img src="plot%20one.svg">',
        "site/plot one.svg": "<svg/>",
        "site/sub/index.html": '<a name="old"></a><a href="../a.html#top">',
        "site/sub/b.html": '<p id="part"></p><a href="../a.html#gone"></a><a href="c.html"></a><a href="#new"></a>'
        '<script src="code.js"></script><img src="../plot.svg"><a href="../../outside.html"></a>',
        "site/404.html": '<a href="/nowhere.html">',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    assert broken_links(tmp_path / "site") == [
        "sub/b.html: #new",
        "sub/b.html: ../../outside.html",
        "sub/b.html: ../a.html#gone",
        "sub/b.html: ../plot.svg",
        "sub/b.html: c.html",
        "sub/b.html: code.js",
    ]
