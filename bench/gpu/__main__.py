"""`python -m bench.gpu --out FOLDER`: measures what the machine allows, and writes results.md and results.json after
each measure, so that nothing is lost if the run is ended.

Invariant: the run ends within `--seconds`, and a measure that hangs ends at its own limit.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import NamedTuple

from bench import measures
from bench.gpu.setting import GpuSetting, Skipped, facts
from bench.gpu.throughput import overlap, resnet
from bench.gpu.transfers import copies_between_steps, hand_over, host_to_device
from bench.lib import processes, table


class Measure(NamedTuple):
    take: Callable[[GpuSetting], list[table.Row]]
    min_s: float
    """Not started with less time left."""
    max_s: float


def _cpu(name: str, setting: GpuSetting) -> list[table.Row]:
    return measures.ALL[name](setting)


MEASURES = {
    "hand-over": Measure(hand_over, 15, 60),
    "copies": Measure(copies_between_steps, 15, 60),
    "host-to-device": Measure(host_to_device, 10, 40),
    "resnet": Measure(resnet, 30, 80),
    "overlap": Measure(overlap, 15, 50),
    "lone": Measure(partial(_cpu, "lone"), 15, 60),
    "throughput": Measure(partial(_cpu, "throughput"), 15, 50),
}
"""In order of importance. The last two use no GPU: a machine with one has many cores."""


class TooSlow(Exception):
    """A measure has reached its limit."""


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="Measure the GPU path beside bare CUDA.")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="folder for results.md and results.json"
    )
    parser.add_argument("--seconds", type=float, default=280.0, help="time for the whole run (default 280)")
    parser.add_argument("--turn", type=float, default=0.7, metavar="SECONDS", help="length of one turn (default 0.7)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each party (default 3)")
    parser.add_argument("--mib", type=int, default=64, help="size of large tensors (default 64)")
    parser.add_argument("--only", action="append", choices=MEASURES, help="run only this measure; may be repeated")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    chosen = arguments(argv)
    end = perf_counter() + chosen.seconds
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that started processes are stopped
    chosen.out.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "-m", "bench.gpu", "--out", "FOLDER", *_without_out(argv)])
    notes = {**facts(), "turns": f"{chosen.rounds} of {chosen.turn:g} s each, in turn with the baseline, medians"}
    rows: list[table.Row] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as work:
        setting = GpuSetting(Path(work), chosen.turn, chosen.rounds, 10.0, mib=chosen.mib)
        for name in chosen.only or MEASURES:
            rows += take(name, setting, end - perf_counter())
            table.write(chosen.out / "results", rows, command, notes, about="gpu-testing")
    print(table.plain(rows))
    return 1 if any(row.verdict == "FAILED" for row in rows) else 0


def take(name: str, setting: GpuSetting, remaining_s: float) -> list[table.Row]:
    """The rows of a measure; one row with the reason if it was skipped or failed."""
    measure, others, began = MEASURES[name], processes.OtherLoad(), perf_counter()
    try:
        if remaining_s < measure.min_s:
            raise Skipped(f"{max(remaining_s, 0):.0f} s left, it needs {measure.min_s:g}")
        with limited(min(measure.max_s, remaining_s)):
            rows = measure.take(setting)
    except Skipped as error:
        rows = [table.Row(name, None, "", skipped=str(error))]
    except Exception as error:
        traceback.print_exc()
        rows = [table.failed_row(name, error)]
    noise = others.cores()
    rows = [replace(row, others=noise) for row in rows]
    print(f"{name}: {perf_counter() - began:.0f} s\n{table.plain(rows)}", flush=True)
    return rows


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises TooSlow in the main thread after this time."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooSlow(f"it took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _without_out(argv: list[str]) -> list[str]:
    """Results contain no path."""
    place = next((number for number, word in enumerate(argv) if word.startswith("--out")), len(argv))
    return argv[:place] + argv[place + (1 if "=" in "".join(argv[place : place + 1]) else 2) :]


if __name__ == "__main__":
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    sys.exit(main(sys.argv[1:]))
