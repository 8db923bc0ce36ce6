"""Which tests execute a line of the source, as recorded by coverage.py.

Only what runs in the test process itself is recorded. Lines that only servers and workers execute are covered by tests
with real processes, which `process_tests` selects by package.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from tests import ROOT
from tests.__main__ import LONG

RECORDED = ROOT / "build" / "mutation"
DATA = RECORDED / "coverage"
PACKAGES = ("shmserve", "workers", "repo", "clients")
FORKS = "tests/unit/clients/test_forks_and_signals.py"
"""After these tests, coverage.py attributes nothing to tests any more: they run last."""
LEFT_OUT = tuple(f"--ignore={path}" for path in LONG)
"""Faults must be detected by `make test` alone."""
SUITES = (
    ("tests/unit", f"--ignore={FORKS}", *LEFT_OUT),
    ("tests/conformance", "tests/sim", "tests/security", *LEFT_OUT, FORKS),
)

CONFIG = f"""\
[run]
source = {",".join(PACKAGES)}
parallel = true
data_file = {DATA}
disable_warnings = no-data-collected,module-not-imported,module-not-measured
"""

PROCESS_TESTS = {
    "shmserve/core": ("tests/process/server/requests", "tests/process/pipelines", "tests/process/models/capacity"),
    "shmserve/broker": ("tests/process/server", "tests/process/models/loading", "tests/process/models/repositories"),
    "shmserve/gateway": ("tests/process/gateway",),
    "shmserve/session": ("tests/process/server/requests",),
    "shmserve/shm": ("tests/process/server/requests",),
    "shmserve/protocol": ("tests/process/server/requests",),
    "workers": (
        "tests/conformance/test_backends.py",
        "tests/process/worker",
        "tests/process/server/processes",
        "tests/process/models",
    ),
    "repo": ("tests/process/models/repositories", "tests/process/cli"),
    "clients": ("tests/process/cli",),
    "shmserve/tools": ("tests/process/cli",),
}


def process_tests(file: str) -> list[str]:
    """The tests with real processes that are closest to a source file."""
    (chosen,) = (tests for package, tests in PROCESS_TESTS.items() if file.startswith(f"{package}/"))
    return [*LEFT_OUT, *(tests for tests in chosen if (ROOT / tests).exists())]


def record(at_once: bool) -> None:
    """Runs the tests that start no processes under coverage.py, the suites at the same time or one after the other."""
    RECORDED.mkdir(parents=True, exist_ok=True)
    for old in RECORDED.glob("coverage*"):
        old.unlink()
    config = RECORDED / "coveragerc"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={config}", "-m", "pytest", "-q", "-m", "not process"]
    command += ["-n0", "-p", "no:cacheprovider", "-p", "tests.mutation.contexts", "--tb=no"]

    def run(suite: tuple[str, ...]) -> list[str]:
        ended = subprocess.run([*command, *suite], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        if ended.returncode not in (0, 1):  # 1: some tests have failed
            raise SystemExit(f"pytest {' '.join(suite)} ended with {ended.returncode}")
        return failed_tests(ended.stdout)

    with ThreadPoolExecutor(len(SUITES) if at_once else 1) as pool:
        failed = [test for tests in pool.map(run, SUITES) for test in tests]
    for test in failed:
        print(f"{test} fails without a fault", flush=True)
    subprocess.run([sys.executable, "-m", "coverage", "combine", "-q", f"--rcfile={config}"], cwd=ROOT, check=True)


def failed_tests(said: str) -> list[str]:
    """The tests that failed, according to the output of pytest."""
    lines = (line for line in said.splitlines() if line.startswith(("FAILED", "ERROR")))
    return [line.split(" - ")[0].partition(" ")[2] for line in lines]


class Record:
    def __init__(self) -> None:
        from coverage import CoverageData

        self._data = CoverageData(basename=os.fspath(DATA))
        self._data.read()
        self._files = {os.path.relpath(os.path.realpath(name), ROOT): name for name in self._data.measured_files()}
        self._lines: Counter[str] = Counter()
        """How many lines each test executes."""
        for name in self._files.values():
            for contexts in self._data.contexts_by_lineno(name).values():
                self._lines.update(contexts)

    def tests(self, file: str, lines: Iterable[int]) -> list[str]:
        """The tests that execute one of the lines, as arguments for pytest. Those that execute few other lines come
        first: they are fast, and most likely about this line."""
        name = self._files.get(file)
        if name is None:
            return []
        contexts = self._data.contexts_by_lineno(name)
        found = {context for line in lines for context in contexts.get(line, ())} - {""}
        return sorted(found, key=lambda context: (self._lines[context], context))
