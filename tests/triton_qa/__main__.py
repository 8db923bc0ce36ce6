"""`python -m tests.triton_qa CHECKOUT [SUITE ...]`: runs the Python tests of Triton's server against shmserve.

CHECKOUT is a checkout of Triton's server repository. It is not changed, and nothing is downloaded. Runs each suite's
own script, with a replacement for `tritonserver`. Exit code 1: a test failed that is not a known difference.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

from tests.triton_qa import models, report, runner, workplace
from tests.triton_qa.catalog import LEFT_OUT, SUITES, Suite

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "triton-qa"
PYTHON = Path(os.environ.get("SHMSERVE_TRITON_QA") or ROOT / "build" / "triton-qa-env" / "bin" / "python")
"""The Python of the environment that `make triton-qa` creates."""
PORTS = (8000, 8001, 8002)
"""Ports hard-coded in the tests."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.triton_qa", description=__doc__)
    made.add_argument("checkout", type=Path, help="a checkout of Triton's server repository")
    made.add_argument("suites", nargs="*", metavar="SUITE", help="only these; wildcards are possible, e.g. L0_http*")
    made.add_argument("--json", type=Path, metavar="FILE", help="write all results to this file")
    made.add_argument("--quick", action="store_true", help="only the suites that CI runs; less than three minutes")
    made.add_argument("--list", action="store_true", help="list the suites, and those left out with the reason")
    made.add_argument("--python", type=Path, default=PYTHON, help="the Python that has tritonclient, for the tests")
    return made


def taken() -> list[int]:
    found = []
    for port in PORTS:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                found.append(port)
    return found


def chosen_suites(patterns: list[str], quick: bool) -> list[Suite]:
    suites = [suite for suite in SUITES if suite.quick or not quick]
    return [suite for suite in suites if not patterns or any(fnmatch(suite.name, pattern) for pattern in patterns)]


def commit_of(folder: Path) -> str:
    command = ["git", "-C", str(folder), "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def run(checkout: Path, suites: list[Suite], python: Path) -> tuple[list[report.Tally], list[runner.Result]]:
    data = BUILD / "data" / workplace.VERSION
    logs = BUILD / "log"
    logs.mkdir(parents=True, exist_ok=True)
    command = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    models.generate(checkout / "qa" / "common", data)
    tallies, results = [], []
    for suite in suites:
        flat = suite.name.replace("/", ".")
        place = workplace.prepare(BUILD / "work" / flat, checkout, suite, data, python)
        found, wrong = runner.run(suite, place, data, packages, logs / f"{flat}.log")
        if not found:
            wrong = wrong or "no test has run"
        tallies.append(report.tally(suite.name, found, wrong))
        results += found
        counts = ", ".join(f"{count} {outcome}" for outcome, count in tallies[-1].counts.items() if count)
        print(f"{suite.name}: {counts or 'nothing'}{f' ({wrong})' if wrong else ''}", file=sys.stderr, flush=True)
    return tallies, results


def main(words: list[str]) -> int:
    chosen = parser().parse_args(words)
    if chosen.list:
        print(*(suite.name for suite in SUITES), sep="\n")
        print(*(f"left out: {name}: {reason}" for name, reason in LEFT_OUT.items()), sep="\n")
        return 0
    if not (chosen.checkout / "qa" / "common").is_dir():
        print(f"{chosen.checkout} is not a checkout of Triton's server repository: no qa/common", file=sys.stderr)
        return 2
    if not chosen.python.exists():
        print(f"no Python at {chosen.python}: `make triton-qa` makes the environment for the tests", file=sys.stderr)
        return 2
    if ports := taken():
        print(f"the tests use fixed ports; in use: {', '.join(map(str, ports))}", file=sys.stderr)
        return 2
    suites = chosen_suites(chosen.suites, chosen.quick)
    if not suites:
        print("no suite has such a name; --list names them", file=sys.stderr)
        return 2
    tallies, results = run(chosen.checkout.resolve(), suites, chosen.python)
    print(*report.details(results), "", *report.table(tallies), sep="\n")
    print(f"\nTriton's server: commit {commit_of(chosen.checkout)}; shmserve: commit {commit_of(ROOT)}")
    if chosen.json:
        chosen.json.write_text(report.as_json(tallies, results))
    bad = any(one.counts["failed"] or one.wrong for one in tallies)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
