"""`python -m tests.fleet`: puts the programs into build/fleet and Ray into build/engines, unless they are there, and
runs the tests here, in tests/deploy and in tests/ray.

Arguments are for pytest. What cannot be installed is skipped, and the output says so.
"""

from __future__ import annotations

import subprocess
import sys

from tests import ROOT
from tests.__main__ import PYTEST, compile_all
from tests.deploy import programs as of_deploy
from tests.engines.__main__ import NOTHING_RAN, python_of
from tests.engines.__main__ import install as install_engine
from tests.engines.catalog import Engine
from tests.fleet import programs

INSTALLS = {
    "HAProxy": programs.install_haproxy,
    "Envoy": programs.install_envoy,
    "Prometheus": programs.install_prometheus,
    **of_deploy.INSTALLS,
}
RAY = Engine("ray", "ray", ("ray",))
OF_RAY = ("tests/ray", "-p", "no:tests.support.leaks", "-W", "ignore::Warning")
"""Ray starts and ends processes and threads as it likes, and warns of itself."""


def main(arguments: list[str]) -> int:
    compile_all()
    for name, install in INSTALLS.items():
        if reason := install():
            print(f"{name} could not be installed, its tests are skipped: {reason}", flush=True)
    # To build an image takes minutes, the first time.
    options = ["-p", "no:xdist", "-rs", "--timeout", "1200", *arguments]
    statuses = [subprocess.call([*PYTEST, "tests/fleet", "tests/deploy", *options], cwd=ROOT)]
    if reason := install_engine(RAY):
        print(f"Ray could not be installed, its tests are skipped: {reason}", flush=True)
    else:
        statuses.append(subprocess.call([str(python_of(RAY)), *PYTEST[1:], *OF_RAY, *options], cwd=ROOT))
    return next((status for status in statuses if status not in (0, NOTHING_RAN)), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
