"""`python -m tests` runs the whole suite, with three pytest-xdist workers on two cores. Arguments are passed to
pytest."""

from __future__ import annotations

import compileall
import os
import subprocess
import sys

from tests import ROOT

CODE = ("shmserve", "workers", "repo", "clients", "bench", "tests")
MOST = 8
"""Maximum number of workers: tests start servers, some with engines that need a gigabyte."""
ELSEWHERE = (
    "--ignore=tests/browser",
    "--ignore=tests/fleet",
    "--ignore=tests/deploy",
    "--ignore=tests/package",
    "--ignore=tests/gpu_rehearsal",
)
"""These need a browser, balancers, containers or interpreters, or test what runs elsewhere. They have make targets."""
PYTEST = [sys.executable, "-m", "pytest"]


def compile_all() -> None:
    """Compiles all files. Otherwise, with PYTHONDONTWRITEBYTECODE, each of some thousand processes compiles a hundred
    files."""
    for name in CODE:
        compileall.compile_dir(ROOT / name, quiet=1)


def parallel() -> list[str]:
    # More than cores: a test that starts a server waits about as long as it computes.
    workers = max(2, min(len(os.sched_getaffinity(0)) * 3 // 2, MOST))
    # Without reordering, because conftest.py puts the long tests first. The timeout is a safety net that shows the
    # stacks of a test.
    return ["-n", str(workers), "--dist", "loadgroup", "--no-loadscope-reorder", "--timeout", "300", *ELSEWHERE]


if __name__ == "__main__":
    compile_all()
    sys.exit(subprocess.call([*PYTEST, *(sys.argv[1:] or parallel())]))
