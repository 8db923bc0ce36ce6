"""`python -m tests.site`: builds the site of this version in build/site/VERSION and checks its links.

build/site has what a host serves: a folder for each version, versions.json, which the page's choice of versions reads,
and a page that leads to the newest one. Folders of other versions that are there stay.

The generator is installed in build/site-env, if missing. If it cannot be installed, nothing is built, and the reason is
printed. The site loads nothing from other hosts: Mermaid, which draws the diagrams, is a file of the site.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from shmserve.version import version
from tests import ROOT
from tests.site.links import broken_links
from tests.site.stage import stage
from tests.support import npm

PACKAGES = ("zensical==0.0.73", "mkdocstrings-python==2.0.11", "ruff==0.17.6")
"""ruff formats the signatures of the API reference."""
ENVIRONMENT = ROOT / "build" / "site-env"
MADE = ENVIRONMENT / ".made"
PAGES = ROOT / "build" / "site-pages"
BUILT = ROOT / "build" / "site-built"
STYLE = Path(__file__).with_name("site.css")
SITE = ROOT / "build" / "site"
NEWEST = """\
<!doctype html>
<title>shmserve</title>
<meta http-equiv="refresh" content="0; url={version}/index.html">
<a href="{version}/index.html">Documentation of shmserve {version}</a>
"""
INSTALL_S = 400
MERMAID = "mermaid@12.3.0"
MERMAID_FILE = ROOT / "build" / "mermaid" / "mermaid.min.js"


def install() -> str:
    """Creates the environment, if missing. Returns why that failed, or ""."""
    wanted = "\n".join(PACKAGES)
    if MADE.is_file() and MADE.read_text() == wanted:
        return ""
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    pip = [str(ENVIRONMENT / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-input", "--retries", "1"]
    for command in ([sys.executable, "-m", "venv", str(ENVIRONMENT)], [*pip, *PACKAGES]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
        except (subprocess.SubprocessError, OSError) as error:
            return str(error)
        if done.returncode:
            return (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    MADE.write_text(wanted)
    return ""


def build() -> int:
    """Builds the site. Any warning is an error."""
    stage(ROOT, PAGES)
    shutil.copyfile(STYLE, PAGES / STYLE.name)
    built = SITE / version()
    shutil.rmtree(BUILT, ignore_errors=True)
    command = [str(ENVIRONMENT / "bin" / "zensical"), "build", "--clean", "--strict"]
    if status := subprocess.call(command, cwd=ROOT, env=os.environ | {"NO_COLOR": "1"}):
        return status
    shutil.rmtree(built, ignore_errors=True)
    shutil.move(BUILT, built)
    add_mermaid(built, MERMAID_FILE)
    list_versions(SITE)
    if broken := broken_links(built):
        print("broken links:", *broken, sep="\n  ")
        return 1
    print(f"the site: {(built / 'index.html').relative_to(ROOT)}")
    return 0


def list_versions(site: Path) -> None:
    """Writes the list of the versions that are there, the newest first, and the page that leads to it."""
    versions = sorted(
        (page.parent.name for page in site.glob("*/index.html")), key=lambda name: [*map(int, re.findall(r"\d+", name))]
    )[::-1]
    (site / "versions.json").write_text(json.dumps([{"version": v, "title": v, "aliases": []} for v in versions]))
    (site / "index.html").write_text(NEWEST.format(version=versions[0]))


def add_mermaid(site: Path, file: Path) -> None:
    """Lets the pages with diagrams load Mermaid from the site, before the theme would load it from elsewhere."""
    shutil.copyfile(file, site / "assets" / file.name)
    for page in site.glob("**/*.html"):
        text = page.read_text()
        if 'class="mermaid"' in text:
            script = f'<script src="{"../" * (len(page.relative_to(site).parts) - 1)}assets/{file.name}"></script>'
            page.write_text(text.replace("</head>", f"{script}</head>", 1))


def main() -> int:
    if reason := install() or npm.install(MERMAID, f"dist/{MERMAID_FILE.name}", MERMAID_FILE):
        print(f"the site is not built, as its generator could not be installed: {reason}")
        return 0
    return build()


if __name__ == "__main__":
    sys.exit(main())
