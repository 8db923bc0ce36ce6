"""`python -m tests.package`: installs the available interpreters in build/pythons and runs the tests of this folder.

Arguments are passed to pytest. An unavailable interpreter is skipped, and pytest says why.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests import ROOT
from tests.__main__ import PYTEST, TIMEOUT, compile_all
from tests.package import pythons


def main(arguments: list[str]) -> int:
    compile_all()
    for version in pythons.VERSIONS:
        print(f"Python {version}: {pythons.install(version)}", flush=True)
    place = str(Path(__file__).parent.relative_to(ROOT))
    return subprocess.call([*PYTEST, "-p", "no:xdist", "-rfEs", *TIMEOUT, place, *arguments], cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
