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
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests import ROOT
from tests.mutation import covering
from tests.mutation.faults import FAULTS, Fault

LIMIT_S = 120.0
"""Time limit for the tests of one fault."""
TEST_LIMIT_S = 40
"""Time limit for one test. A fault that makes a test hang counts as detected."""
PYTEST = [sys.executable, "-m", "pytest", "-q", "-x", "-n2", "--dist", "loadgroup", "--no-loadscope-reorder"]
PYTEST += ["-p", "no:cacheprovider", "--timeout", str(TEST_LIMIT_S), "--tb=no"]


def detected(fault: Fault, tree: Path, record: covering.Record) -> str:
    """The first test that fails with the fault; "" if there is none."""
    path = tree / fault.file
    text = path.read_text()
    if text.count(fault.old) != 1:
        raise SystemExit(f"{fault.file} has {text.count(fault.old)} times {fault.old!r}, expected once: adapt FAULTS")
    first = text[: text.index(fault.old)].count("\n") + 1
    lines = range(first, first + fault.old.count("\n") + 1)
    ends = time.monotonic() + LIMIT_S
    path.write_text(text.replace(fault.old, fault.new))
    try:
        for tests in (record.tests(fault.file, lines), covering.process_tests(fault.file)):
            if tests and (failed := _failure(tests, tree, ends - time.monotonic())):
                return failed
    finally:
        path.write_text(text)
    return ""


def _failure(tests: list[str], tree: Path, limit: float) -> str:
    listed = tree / "build" / "mutation-tests.txt"
    listed.parent.mkdir(exist_ok=True)
    listed.write_text("\n".join(tests) + "\n")
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile("w+") as output:
        running = subprocess.Popen([*PYTEST, f"@{listed}"], cwd=tree, env=environment, stdout=output, stderr=output)
        try:
            running.wait(max(limit, 1.0))
        except subprocess.TimeoutExpired:
            running.terminate()  # pytest then ends its workers, and they the servers
            running.wait()
        output.seek(0)
        said = output.read()
    failed = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if not failed and running.returncode not in (0, 5, -15):
        raise SystemExit(f"pytest ended with {running.returncode}:\n{said[-3000:]}")
    return failed[0].split(" - ")[0].partition(" ")[2] if failed else ""


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names or files: only these faults")
    parser.add_argument("--reuse", action="store_true", help="use the coverage recorded by an earlier run")
    parser.add_argument("--json", metavar="FILE", help="also write the results to a file")
    chosen = parser.parse_args(words)
    if not chosen.reuse:
        print("recording which tests execute which lines ...", flush=True)
        covering.record()
    record = covering.Record()
    results: dict[str, str] = {}
    counts: Counter[tuple[str, bool]] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(".venv", ".git", "build", "__pycache__", "*.egg-info")
        shutil.copytree(ROOT, tree, symlinks=True, ignore=ignored)
        for fault in FAULTS:
            if chosen.names and not any(name in fault.name or name in fault.file for name in chosen.names):
                continue
            began = time.monotonic()
            how = results[fault.name] = detected(fault, tree, record)
            package = "/".join(fault.file.split("/")[: 2 if fault.file.startswith("shmserve/") else 1])
            counts[package, bool(how)] += 1
            print(f"{fault.name}: {how or 'NOT DETECTED'} ({time.monotonic() - began:.0f} s)", flush=True)
    for package in sorted({package for package, _ in counts}):
        print(f"| `{package}` | {counts[package, True] + counts[package, False]} | {counts[package, True]} |")
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(results, indent=1) + "\n")
    missed = sum(not how for how in results.values())
    print(f"{len(results) - missed} of {len(results)} faults detected")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
