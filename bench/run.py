"""`python -m bench.run`: runs the measures in turn, prints the table, and saves it in bench/results.

This module does not depend on particular measures. A measure is a function that takes a `Setting` and returns rows.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import tempfile
import traceback
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from bench import measures
from bench.lib import processes, table
from bench.lib.setting import Setting

QUIET = 0.15
"""Cores that other processes may use before a warning is printed."""


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.run", description="Measure shmserve against its machine.")
    parser.add_argument("--list", action="store_true", help="list the measures and exit")
    parser.add_argument("--only", action="append", metavar="NAME", help="run only this measure; may be repeated")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one turn (default 2)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each party (default 5)")
    parser.add_argument("--soak-seconds", type=float, default=60.0, help="length of the mixed soak (default 60)")
    parser.add_argument(
        "--quick", action="store_true", help="use short turns, few rounds and a soak of 10 s; save nothing"
    )
    parser.add_argument(
        "--cpus", metavar="LIST", help="run everything, including baselines, on these cores, such as 0,1"
    )
    parser.add_argument("--save", action="store_true", help="save the result of a run with --only, too")
    return parser.parse_args(argv)


def take(names: list[str], setting: Setting) -> list[table.Row]:
    rows: list[table.Row] = []
    for name in names:
        started, others = perf_counter(), processes.OtherLoad()
        print(f"... {name}", end="", flush=True, file=sys.stderr)
        try:
            result = measures.ALL[name](setting)
        except Exception as error:
            traceback.print_exc()
            result = [table.failed_row(name, error)]
        noise = others.cores()
        result = [replace(row, others=noise) for row in result]
        rows += result
        print(f" {perf_counter() - started:.0f} s, others used {noise:.2f} cores meanwhile", file=sys.stderr)
        print(table.plain(result), file=sys.stderr, flush=True)
    return rows


def main(argv: list[str]) -> int:
    chosen = arguments(argv)
    if chosen.list:
        for name, measure in measures.ALL.items():
            print(f"{name:18} {(measure.__doc__ or '').splitlines()[0]}")
        return 0
    names = chosen.only or list(measures.ALL)
    unknown = [name for name in names if name not in measures.ALL]
    if unknown:
        print(f"no measure named {', '.join(unknown)}; there are: {', '.join(measures.ALL)}", file=sys.stderr)
        return 2
    if chosen.cpus:
        os.sched_setaffinity(0, {int(cpu) for cpu in chosen.cpus.split(",")})
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that started processes are stopped
    with tempfile.TemporaryDirectory(prefix="bench-") as work:
        setting = Setting(Path(work), chosen.seconds, chosen.rounds, chosen.soak_seconds)
        if chosen.quick:
            setting = Setting(Path(work), min(0.7, chosen.seconds), min(3, chosen.rounds), 10.0)
        rows = take(names, setting)
    print(table.plain(rows))
    loud = max((row.others for row in rows), default=0.0)
    if loud > QUIET:
        print(f"others used up to {loud:.2f} cores meanwhile: take times and shares with caution", file=sys.stderr)
    if (not chosen.only and not chosen.quick) or chosen.save:
        notes = {
            "cores used": chosen.cpus or "all, no pinning",
            "others": f"used up to {loud:.2f} cores during a measure",
            "turns": f"{setting.rounds} of {setting.seconds:g} s each, in turn with the baseline, medians",
        }
        path = table.save(rows, shlex.join(["python", "-m", "bench.run", *argv]), notes)
        print(f"saved in bench/results/{path.name}")
    return 1 if any(row.verdict == "FAILED" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
