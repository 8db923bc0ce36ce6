"""`python -m tests.fleet`: installs missing programs in build/fleet and Ray in build/engines, and runs the tests of
this folder, of tests/deploy and of tests/ray.

Arguments are passed to pytest. Tests of programs that cannot be installed are skipped, and the output says so.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial

from tests import ROOT
from tests.__main__ import PYTEST, compile_all
from tests.deploy import programs as of_deploy
from tests.engines.__main__ import NOTHING_RAN, python_of
from tests.engines.__main__ import install as install_engine
from tests.engines.catalog import Engine
from tests.fleet import programs

INSTALLS: dict[str, Callable[[], str]] = {
    "HAProxy": partial(programs.unpack_with_dependencies, "haproxy"),
    "Envoy": programs.install_envoy,
    # Its dependencies are only for its web page.
    "Prometheus": partial(programs.unpack, "prometheus", "prometheus"),
    **of_deploy.INSTALLS,
}
RAY = Engine("ray", "ray", ("ray",))
OF_RAY = ("tests/ray", "-p", "no:tests.support.leaks", "-W", "ignore::Warning")
"""Ray starts and ends processes and threads at any time, and emits warnings about itself."""


def main(arguments: list[str]) -> int:
    compile_all()
    for name, install in INSTALLS.items():
        if reason := install():
            print(f"{name} could not be installed, its tests are skipped: {reason}", flush=True)
    # The first build of an image takes minutes.
    options = ["-p", "no:xdist", "-rfEs", "--timeout", "1200", *arguments]
    statuses = [subprocess.call([*PYTEST, "tests/fleet", "tests/deploy", *options], cwd=ROOT)]
    if reason := install_engine(RAY):
        print(f"Ray could not be installed, its tests are skipped: {reason}", flush=True)
    else:
        statuses.append(subprocess.call([str(python_of(RAY)), *PYTEST[1:], *OF_RAY, *options], cwd=ROOT))
    return next((status for status in statuses if status not in (0, NOTHING_RAN)), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
