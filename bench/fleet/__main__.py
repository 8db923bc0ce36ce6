"""`python -m bench.fleet [EXPERIMENT ...]`: runs these experiments, and writes all plots from the saved results."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from bench.fleet.experiments import EXPERIMENTS
from bench.fleet.plots import plots

RESULTS = Path(__file__).with_name("results.json")
PLOTS = Path(__file__).parents[2] / "docs" / "figures"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description=__doc__)
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=f"{', '.join(EXPERIMENTS)}, or all")
    parser.add_argument("--no-plots", action="store_true", help="only save the results")
    args = parser.parse_args()
    names = list(EXPERIMENTS) if args.experiments == ["all"] else args.experiments
    unknown = [name for name in names if name not in EXPERIMENTS]
    if unknown:
        parser.error(f"'{unknown[0]}' is not an experiment")
    for name in names:
        began = time.monotonic()
        rows = EXPERIMENTS[name]()
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        results[name] = rows
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        print(f"{name}: {len(rows)} simulations in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    if not args.no_plots:
        PLOTS.mkdir(exist_ok=True)
        for name, svg in plots(json.loads(RESULTS.read_text())).items():
            (PLOTS / f"{name}.svg").write_text(svg)


if __name__ == "__main__":
    main()
