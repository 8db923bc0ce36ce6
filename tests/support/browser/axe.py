"""axe-core, which finds what keeps people who use assistive technology from using a page."""

from __future__ import annotations

from typing import Any

from tests import ROOT
from tests.support import npm
from tests.support.browser.tab import Tab

PACKAGE = "axe-core@4.14.1"
FILE = ROOT / "build" / "axe" / "axe.min.js"


def install() -> str:
    """Downloads axe-core, unless it is there. Returns why that failed, or ""."""
    return npm.install(PACKAGE, FILE.name, FILE)


def findings(tab: Tab) -> list[str]:
    """The serious and critical findings in the page, each with the elements."""
    if not tab.evaluate("'axe' in window"):
        tab.evaluate(f"{FILE.read_text()}; 0")
    violations: list[dict[str, Any]] = tab.evaluate("axe.run().then(({violations}) => violations)")
    return [
        f"{one['id']}: {one['help']}: {[node['html'][:150] for node in one['nodes'][:3]]}"
        for one in violations
        if one["impact"] in ("serious", "critical")
    ]
