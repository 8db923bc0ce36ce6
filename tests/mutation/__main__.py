"""`python -m tests.mutation`: injects the faults of `faults.py` into a copy of the source, one at a time, and reports
which test detects each of them.

Run it before and after a change to the tests: a fault that was detected before must still be detected. For each fault,
the tests that execute its line run until the first failure, then those of `tests/process` that are closest to it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests import ROOT
from tests.mutation import covering
from tests.mutation.faults import FAULTS, Fault

LIMIT_S = 120
"""Limit for the tests of one fault: processor time for those in the test process, time for those with servers."""
TEST_LIMIT_S = 40
"""Time limit for one test. A fault that makes a test hang counts as detected."""
PYTEST = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", "--tb=no"]
PYTEST += ["--timeout", str(TEST_LIMIT_S)]
TREES = 2
"""Faults that are tried at the same time, each in a copy of the source; --trees 1 needs one core."""
ENDED = (0, 1, 5, -signal.SIGTERM, -signal.SIGXCPU, -signal.SIGKILL)
"""Exit statuses of pytest: passed, failed, no tests, and at a limit."""


def detected(fault: Fault, tree: Path, record: covering.Record) -> str:
    """The first test that fails with the fault; "" if there is none."""
    path = tree / fault.file
    text = path.read_text()
    if text.count(fault.old) != 1:
        raise SystemExit(f"{fault.file} has {text.count(fault.old)} times {fault.old!r}, expected once: adapt FAULTS")
    first = text[: text.index(fault.old)].count("\n") + 1
    lines = range(first, first + fault.old.count("\n") + 1)
    path.write_text(text.replace(fault.old, fault.new))
    try:
        inside = record.tests(fault.file, lines)
        return (_failure(inside, tree, 10 * LIMIT_S) if inside else "") or _failure(
            covering.process_tests(fault.file), tree, LIMIT_S
        )
    finally:
        path.write_text(text)


def _failure(tests: list[str], tree: Path, limit: float) -> str:
    listed = tree / "build" / "mutation-tests.txt"
    listed.parent.mkdir(exist_ok=True)
    listed.write_text("\n".join(tests) + "\n")
    # Under pytest-xdist, a failure that Hypothesis finds is not shrunk, which would take until the limit.
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_XDIST_WORKER": "gw0"}
    command = ["prlimit", f"--cpu={LIMIT_S}", *PYTEST, f"@{listed}"]
    with tempfile.TemporaryFile("w+") as output:
        running = subprocess.Popen(command, cwd=tree, env=environment, stdout=output, stderr=output)
        try:
            running.wait(limit)
        except subprocess.TimeoutExpired:
            running.terminate()  # pytest then ends its servers
            running.wait()
        output.seek(0)
        said = output.read()
    failed = covering.failed_tests(said)
    if not failed and running.returncode not in ENDED:
        raise SystemExit(f"pytest ended with {running.returncode}:\n{said[-3000:]}")
    return failed[0] if failed else ""


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names or files: only these faults")
    parser.add_argument("--reuse", action="store_true", help="use the coverage recorded by an earlier run")
    parser.add_argument("--trees", type=int, default=TREES, help="how many faults to try at the same time")
    parser.add_argument("--json", metavar="FILE", help="also write the results to a file")
    chosen = parser.parse_args(words)
    if not chosen.reuse:
        print("recording which tests execute which lines ...", flush=True)
        covering.record(at_once=chosen.trees > 1)
    record = covering.Record()
    results: dict[str, str] = {}
    counts: Counter[tuple[str, bool]] = Counter()
    faults = [f for f in FAULTS if not chosen.names or any(name in f.name or name in f.file for name in chosen.names)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(chosen.trees) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        ignored = shutil.ignore_patterns(".venv", ".git", "build", "__pycache__", "*.egg-info")
        for number in range(chosen.trees):
            trees.put(Path(shutil.copytree(ROOT, Path(folder) / str(number), symlinks=True, ignore=ignored)))

        def try_one(fault: Fault) -> tuple[Fault, str]:
            tree = trees.get()
            try:
                return fault, detected(fault, tree, record)
            finally:
                trees.put(tree)

        for fault, how in pool.map(try_one, faults):
            results[fault.name] = how
            package = "/".join(fault.file.split("/")[: 2 if fault.file.startswith("shmserve/") else 1])
            counts[package, bool(how)] += 1
            print(f"{fault.name}: {how or 'NOT DETECTED'}", flush=True)
        unchanged = trees.get()
        for how in filter(None, dict.fromkeys(results.values())):
            if _failure([how], unchanged, LIMIT_S):
                print(f"{how} also fails without a fault")
    for package in sorted({package for package, _ in counts}):
        print(f"| `{package}` | {counts[package, True] + counts[package, False]} | {counts[package, True]} |")
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(results, indent=1) + "\n")
    missed = sum(not how for how in results.values())
    print(f"{len(results) - missed} of {len(results)} faults detected")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
