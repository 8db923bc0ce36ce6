"""The result of a run: the table, and whether it passes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field

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
