"""`python -m tests.triton_qa CHECKOUT [SUITE ...]`: runs the Python tests of Triton's server against shmserve.

CHECKOUT is a checkout of Triton's server repository. It is not changed, and nothing is downloaded. Runs each suite's
own script, with a replacement for `tritonserver`. Exit code 1: a test failed that is not a known difference.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from tests.triton_qa import models, runner, workplace
from tests.triton_qa.catalog import LEFT_OUT, SUITES, Suite
from tests.triton_qa.known import known
from tests.triton_qa.runner import Result

ORDER = ("passed", "known", "failed", "unexpected", "elsewhere", "skipped")
"""`known`: failed, with a reason in `known.py`. `unexpected`: passed in spite of one. `elsewhere`: cannot run here."""


@dataclass
class Tally:
    suite: str
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ORDER, 0))
    wrong: str = ""
    """The failure of the suite's script as a whole, if any."""


def judge(result: Result) -> str:
    if result.outcome == "skipped":
        return "skipped"
    expected = known(result)
    if result.outcome == "passed":
        return "unexpected" if expected and not expected.sometimes else "passed"
    if expected:
        return "known" if expected.here else "elsewhere"
    return "failed"


def tally(suite: str, results: Iterable[Result], wrong: str = "") -> Tally:
    made = Tally(suite, wrong=wrong)
    for result in results:
        made.counts[judge(result)] += 1
    return made


def percentage(counts: dict[str, int]) -> float:
    """The percentage of passed tests among those that can run here; skipped tests do not count."""
    good = counts["passed"] + counts["unexpected"]
    ran = good + counts["known"] + counts["failed"]
    return 100 * good / ran if ran else 0.0


def table(tallies: list[Tally]) -> Iterator[str]:
    """The table in Markdown, as in the documentation."""
    yield "| Suite | Passed | Known differences | Failed | Passed % | Cannot run here |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    total = Tally("total")
    for one in tallies:
        for outcome, count in one.counts.items():
            total.counts[outcome] += count
    for one in [*tallies, total]:
        counts = one.counts
        good = counts["passed"] + counts["unexpected"]
        share = f"{percentage(counts):.1f}"
        yield f"| {one.suite} | {good} | {counts['known']} | {counts['failed']} | {share} | {counts['elsewhere']} |"


def details(results: Iterable[Result]) -> Iterator[str]:
    """A line for each unexpected result, then the reasons for the known differences that occurred."""
    reasons: dict[str, int] = {}
    for result in results:
        verdict = judge(result)
        expected = known(result)
        if verdict == "failed":
            yield f"FAILED {result.suite} {result.name}: {' '.join(result.reason.split())[:200]}"
        elif verdict == "unexpected" and expected:
            yield f"UNEXPECTED PASS {result.suite} {result.name}: {expected.reason}"
        elif verdict in ("known", "elsewhere") and expected:
            reasons[expected.reason] = reasons.get(expected.reason, 0) + 1
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1]):
        yield f"{count} x {reason}"


def as_json(tallies: list[Tally], results: list[Result]) -> str:
    cases = [{**asdict(result), "verdict": judge(result)} for result in results]
    suites = [{**asdict(one), "percentage": round(percentage(one.counts), 1)} for one in tallies]
    return json.dumps({"suites": suites, "tests": cases}, indent=1)


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


def run(checkout: Path, suites: list[Suite], python: Path) -> tuple[list[Tally], list[Result]]:
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
        tallies.append(tally(suite.name, found, wrong))
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
    print(*details(results), "", *table(tallies), sep="\n")
    print(f"\nTriton's server: commit {commit_of(chosen.checkout)}; shmserve: commit {commit_of(ROOT)}")
    if chosen.json:
        chosen.json.write_text(as_json(tallies, results))
    bad = any(one.counts["failed"] or one.wrong for one in tallies)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
