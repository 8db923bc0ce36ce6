"""`python -m tests.browser`: installs Chromium and axe-core where that is permitted, and runs the tests here.

Arguments are passed to pytest. Without a browser the tests are skipped, and pytest says so. The tests control the
browser directly, so no driver is needed.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests import ROOT
from tests.__main__ import PYTEST, TIMEOUT, compile_all
from tests.support.browser import axe, chromium
from tests.support.system.apt import apt_get


def install() -> str:
    """Returns why Chromium could not be installed, or ""."""
    if chromium.find() is not None:
        return ""
    if os.geteuid() != 0:
        return "only root can install packages"
    try:
        apt_get("install", "--quiet", "--yes", "--no-install-recommends", "chromium")
    except (subprocess.SubprocessError, OSError) as error:
        return str(error)
    return ""


def main(arguments: list[str]) -> int:
    compile_all()
    if reason := install():
        print(f"Chromium could not be installed, its tests are skipped: {reason}", flush=True)
    if reason := axe.install():
        print(f"axe-core could not be downloaded, its tests are skipped: {reason}", flush=True)
    return subprocess.call([*PYTEST, "-p", "no:xdist", "-rfEs", *TIMEOUT, "tests/browser", *arguments], cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
