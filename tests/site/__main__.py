"""`python -m tests.site`: builds the site in build/site and checks its links.

The generator is installed in build/site-env, if missing. If it cannot be installed, nothing is built, and the reason is
printed. The site loads nothing from other hosts: Mermaid, which draws the diagrams, is a file of the site.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests import ROOT
from tests.site.links import broken_links
from tests.site.stage import stage
from tests.support import npm

PACKAGES = ("zensical==0.0.73", "mkdocstrings-python==2.0.11", "ruff==0.17.6")
"""ruff formats the signatures of the API reference."""
ENVIRONMENT = ROOT / "build" / "site-env"
MADE = ENVIRONMENT / ".made"
PAGES = ROOT / "build" / "site-pages"
STYLE = Path(__file__).with_name("site.css")
SITE = ROOT / "build" / "site"
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
    shutil.rmtree(SITE, ignore_errors=True)
    command = [str(ENVIRONMENT / "bin" / "zensical"), "build", "--clean", "--strict"]
    if status := subprocess.call(command, cwd=ROOT, env=os.environ | {"NO_COLOR": "1"}):
        return status
    add_mermaid(SITE, MERMAID_FILE)
    if broken := broken_links(SITE):
        print("broken links:", *broken, sep="\n  ")
        return 1
    print(f"the site: {(SITE / 'index.html').relative_to(ROOT)}")
    return 0


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
