"""`python -m tests` runs the suite with three pytest-xdist workers on two cores, `python -m tests long` what it leaves
out, and `python -m tests search` all Hypothesis tests with new random examples, which `long` does, too. Other arguments
are passed to pytest.
"""

from __future__ import annotations

import compileall
import os
import secrets
import subprocess
import sys

from tests import ROOT

CODE = ("shmserve", "workers", "repo", "clients", "bench", "tests")
MOST = 8
"""Maximum number of workers: tests start servers, some with engines that need a gigabyte."""
ELSEWHERE = ("tests/browser", "tests/fleet", "tests/deploy", "tests/package", "tests/gpu_rehearsal", "tests/ray")
"""These need a browser, balancers, containers, interpreters or Ray, or test what runs elsewhere. They have make
targets."""
LONG = (
    "tests/stress",
    "tests/test_tidy.py",
    "tests/conformance/test_backend_edge_cases.py",
    "tests/process/docs",
    "tests/process/service",
    "tests/process/cli/load",
    "tests/process/cli/run",
    "tests/process/cli/test_check.py",
    "tests/process/cli/operations/test_logs.py",
    "tests/process/cli/operations/test_top.py",
    "tests/process/cli/operations/test_watch.py",
    "tests/process/cli/test_convert.py",
    "tests/process/cli/test_init.py",
    "tests/process/models/capacity/test_memory_budget.py",
    "tests/process/models/repositories/test_agents.py",
    "tests/process/models/repositories/test_mirror.py",
    "tests/process/models/repositories/test_mirror_stand_ins.py",
    "tests/process/models/repositories/test_remote.py",
    "tests/process/server/observability/test_otel.py",
    "tests/sim/test_fleet.py",
    "tests/unit/bench",
    "tests/unit/tools/tune/test_tuner.py",
    "tests/unit/core/test_memory.py",
    "tests/unit/deploy",
    "tests/unit/docs",
    "tests/unit/release",
    "tests/unit/repo/agents/test_convert.py",
    "tests/unit/support",
    "tests/unit/terminal/test_streams.py",
)
"""What takes long, and what tests pages, releases, benchmarks and the tests themselves: `make test-long`."""
HYPOTHESIS = ("tests/unit", "tests/sim", "tests/conformance")
PYTEST = [sys.executable, "-m", "pytest"]
TIMEOUT = ("--timeout", "300")
"""A safety net that shows the stacks of a test."""


def compile_all() -> None:
    """Compiles all files. Otherwise, with PYTHONDONTWRITEBYTECODE, each of some thousand processes compiles a hundred
    files."""
    for name in CODE:
        compileall.compile_dir(ROOT / name, quiet=1)


def workers() -> int:
    # More than cores: a test that starts a server waits about as long as it computes.
    return max(2, min(len(os.sched_getaffinity(0)) * 3 // 2, MOST))


def parallel() -> list[str]:
    # Without reordering, because conftest.py puts the long tests first.
    return ["-n", str(workers()), "--dist", "loadgroup", "--no-loadscope-reorder", *TIMEOUT]


def search(arguments: list[str]) -> int:
    """Runs the Hypothesis tests at full depth, or SHMSERVE_EXPLORE times that, with a new seed; see
    tests/support/hypothesis_profiles.py."""
    seed = secrets.randbelow(2**32)
    print(f"Hypothesis tests with the seed {seed}", flush=True)
    options = [*parallel(), "-m", "hypothesis", f"--hypothesis-seed={seed}", *arguments]
    environment = {"SHMSERVE_EXPLORE": "1", **os.environ}
    return subprocess.call([*PYTEST, *options, *HYPOTHESIS], env=environment)


def main(arguments: list[str]) -> int:
    compile_all()
    if arguments[:1] == ["search"]:
        return search(arguments[1:])
    if arguments == ["long"]:
        status = subprocess.call([*PYTEST, *parallel(), *LONG])
        search([])  # what it finds is printed, and mended; it says nothing about the change that is tested
        return status
    if not arguments:
        arguments = [*parallel(), *(f"--ignore={path}" for path in (*ELSEWHERE, *LONG))]
    return subprocess.call([*PYTEST, *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
