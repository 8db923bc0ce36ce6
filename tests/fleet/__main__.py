"""`python -m tests.fleet`: puts the programs into build/fleet, unless they are there, and runs the tests here.

Arguments are for pytest. A program that cannot be had is skipped, and pytest says so.
"""

from __future__ import annotations

import subprocess
import sys

from tests import ROOT
from tests.__main__ import PYTEST, compile_all
from tests.fleet import programs

INSTALLS = {
    "HAProxy": programs.install_haproxy,
    "Envoy": programs.install_envoy,
    "Prometheus": programs.install_prometheus,
}


def main(arguments: list[str]) -> int:
    compile_all()
    for name, install in INSTALLS.items():
        if reason := install():
            print(f"{name} could not be installed, its tests are skipped: {reason}", flush=True)
    return subprocess.call([*PYTEST, "-p", "no:xdist", "-rs", "--timeout", "300", "tests/fleet", *arguments], cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
