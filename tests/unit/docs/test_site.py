"""The documentation site: its navigation is complete, links are rewritten, and broken ones are found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import ROOT
from tests.site.links import broken_links
from tests.site.stage import page_names, stage


def test_every_page_is_in_the_navigation_once() -> None:
    configuration = (ROOT / "mkdocs.yml").read_text()
    nav = re.findall(r"^ +- (?:.*: )?(\S+\.md)$", configuration.partition("\nnav:\n")[2], re.MULTILINE)
    assert sorted(nav) == sorted(page_names(ROOT)), "add each page to `nav` in mkdocs.yml"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    texts = {
        "README.md": "[guide](docs/guides/one.md#part) [licence](LICENSE) [site](https://example.org/docs/a.md)",
        "CONTRIBUTING.md": "[folder](docs), [rules](RULES.md)",
        "RULES.md": "[home](docs/index.md) [again](RULES.md)",
        "CHANGELOG.md": "",
        "LICENSE": "free",
        "docs/index.md": "[overview](../README.md), [here](#there)\n```\n[not](../a/link.md)\n```\n![plot](plot.svg)",
        "docs/plot.svg": "<svg/>",
        "docs/guides/one.md": "[home](../index.md) [results](../../bench/results.json) [gone](gone.md)",
        "bench/results.json": "{}",
    }
    for name, text in texts.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "tree"


def test_links_of_the_pages_are_rewritten(tree: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "of").mkdir(parents=True)
    stage(tree, site)
    assert {path.relative_to(site).as_posix(): path.read_text() for path in site.glob("**/*.*")} == {
        "overview.md": "[guide](guides/one.md#part) [licence](source/LICENSE) [site](https://example.org/docs/a.md)",
        "contributing.md": "folder, [rules](source/RULES.md)",
        "source/RULES.md": "[home](../index.md) [again](RULES.md)",
        "changes.md": "",
        "index.md": "[overview](overview.md), [here](#there)\n```\n[not](../a/link.md)\n```\n![plot](plot.svg)",
        "plot.svg": "<svg/>",
        "guides/one.md": "[home](../index.md) [results](../source/bench/results.json) [gone](gone.md)",
        "source/bench/results.json": "{}",
    }
    assert (site / "source" / "LICENSE").read_text() == "free"
    assert not (site / "of").exists()


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
