"""`python -m bench.published`: experiments that others have published, repeated here. A row for each claim: the ratio
that was claimed, the ratio that was measured, and why they differ.

Networks have random weights and are made on the spot. The two sides of a ratio take turns, in an order that is reversed
each round; the ratio is that of their medians.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from bench.lib import table
from bench.lib.charts import Ranked, rankings
from bench.published.experiments import EXPERIMENTS, PHASES, Claim, Effort, Rates
from shmserve.tools.charts import COLORS
from tests.engines.__main__ import install, python_of
from tests.engines.catalog import ENGINES

CHART = Path(__file__).parents[2] / "docs" / "figures" / "published.svg"
FULL, QUICK = Effort(2.0, 5), Effort(0.05, 1, small=True)


@dataclass(frozen=True)
class ClaimResult:
    claim: str
    short: str
    claimed: float | None
    measured: float
    why: str


def rates_of(name: str, effort: Effort, work: Path) -> Rates:
    """Runs an experiment, in the environment of its engine if this one lacks it. Empty: it cannot be installed."""
    experiment = EXPERIMENTS[name]
    if not experiment.engine or find_spec(experiment.engine) is not None:
        return experiment.measure(work, effort)
    engine = next(engine for engine in ENGINES if engine.name == experiment.engine)
    if reason := install(engine):
        print(f"skipped: {name}: {engine.name} cannot be installed: {reason}", file=sys.stderr)
        return {}
    file = work / f"{name}.json"
    command = [str(python_of(engine)), "-m", "bench.published", name, "--rates", str(file)]
    command += ["--seconds", str(effort.seconds), "--rounds", str(effort.rounds), *["--quick"] * effort.small]
    subprocess.run(command, check=True)
    rates: Rates = json.loads(file.read_text())
    return rates


def results_of(claims: tuple[Claim, ...], rates: Rates) -> list[ClaimResult]:
    return [
        ClaimResult(claim.name, claim.short, claim.claimed, rates[claim.rate] / rates[claim.than], claim.why)
        for claim in claims
    ]


def chart(results: list[ClaimResult], caption: str) -> str:
    measured = [Ranked(one.short, one.measured, f"{one.measured:.2f}", COLORS[0]) for one in results]
    claimed = [Ranked(one.short, one.claimed or 0.0, f"{one.claimed:.2f}" if one.claimed else "-") for one in results]
    return rankings([("ratio measured here", measured), ("ratio claimed", claimed)], caption)


def markdown(results: list[ClaimResult]) -> str:
    rows = [
        [one.claim, f"{one.claimed:.2f}" if one.claimed is not None else "-", f"{one.measured:.2f}", one.why]
        for one in results
    ]
    return table.markdown(["claim", "claimed ratio", "measured here", "why they differ"], rows)


def phase_table(rates: Mapping[str, Rates]) -> str:
    """The milliseconds of each phase of the models whose time was divided into phases; "" if there are none."""
    rows: dict[str, list[str]] = {}
    for measured in rates.values():
        for key, value in measured.items():
            if key.endswith(", ms"):
                rows.setdefault(key.partition(",")[0], []).append(f"{value:.3f}")
    return table.markdown(["ms", *PHASES], [[name, *times] for name, times in rows.items()]) if rows else ""


def save(results: list[ClaimResult], rates: Mapping[str, Rates], command: str) -> Path:
    today = time.strftime("%Y-%m-%d", time.gmtime())
    facts = table.machine() | {"load average at the end": f"{os.getloadavg()[0]:.0f}"}
    lines = [f"# Published experiments, {today}", "", f"Made by `{command}`. docs/compare.md explains it.", ""]
    lines += [*(f"- {key}: {value}" for key, value in facts.items()), "", markdown(results), "", phase_table(rates), ""]
    path = table.RESULTS / f"{today}-{table.host_kind()}-published.md"
    path.write_text("\n".join(lines))
    record = {"date": today, "machine": facts, "results": [asdict(one) for one in results], "per_second": rates}
    path.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    CHART.write_text(chart(results, f"{facts['cores']} cores ({facts['cpu']}), {today}: make compare-published"))
    return path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.published", description=__doc__)
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"of {', '.join(EXPERIMENTS)} (default: all)")
    parser.add_argument("--seconds", type=float, help="duration of a turn")
    parser.add_argument("--rounds", type=int, help="turns of each side")
    parser.add_argument(
        "--quick", action="store_true", help="small networks, one short turn: show that all run, save nothing"
    )
    parser.add_argument("--save", action="store_true", help="save the table in bench/results")
    parser.add_argument("--rates", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.names) - EXPERIMENTS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    usual = QUICK if args.quick else FULL
    effort = Effort(args.seconds or usual.seconds, args.rounds or usual.rounds, usual.small)
    results: list[ClaimResult] = []
    rates: dict[str, Rates] = {}
    with tempfile.TemporaryDirectory(prefix="published-") as folder:
        for name in args.names or EXPERIMENTS:
            print(f"{name} ...", file=sys.stderr, flush=True)
            if measured := rates_of(name, effort, Path(folder)):
                rates[name] = measured
                results += results_of(EXPERIMENTS[name].claims, measured)
    if args.rates is not None:  # for `rates_of` in another environment
        (only,) = rates.values()
        args.rates.write_text(json.dumps(only))
        return 0
    print(markdown(results), phase_table(rates), sep="\n\n")
    if args.save and not args.quick:
        print(save(results, rates, f"python -m bench.published {' '.join(sys.argv[1:])}".strip()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
