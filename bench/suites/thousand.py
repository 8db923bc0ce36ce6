"""Many Python models in one server: time to ready, memory of a worker, and one caller beside idle models.

    python -m bench.suites.thousand [--models 1000] [--rounds 7] [--seconds 2]

The caller sends one request after the other to one model, in turn to a server that has only this model and to the one
that has all of them. Memory is the PSS of each worker: a page shared by several processes is divided among them.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

from bench.lib import models, processes, table
from bench.lib.clock import alternate, durations, summary
from bench.lib.setting import serving
from bench.lib.table import Row, micros
from shmserve import Client
from shmserve.system import procfs

MIB = 1 << 20
WORKER = {"shmserve.workers.main", "--name"}
"""In the command line of a worker."""
MODEL = models.Model("python", {"x": ("FP32", [16])}, {"y": ("FP32", [16])}, max_batch=8)


def repository(root: Path, count: int) -> Path:
    for number in range(count):
        models.write(root, f"m{number:04}", MODEL, {"model.py": models.IDENTITY})
    return root


def rows(work: Path, count: int, rounds: int, seconds: float) -> list[Row]:
    import numpy as np

    feed = {"x": np.ones((1, 16), np.float32)}
    with serving(repository(work / "one", 1)) as alone:
        root, start = repository(work / "many", count), perf_counter()
        with serving(root) as many:
            ready = perf_counter() - start
            below = processes.descendants(many.broker_pid())
            workers = [pid for pid in below if set(procfs.command_line(pid).split()) >= WORKER]
            sizes = [procfs.proportional_bytes(pid) / MIB for pid in workers]
            with Client(alone.lane) as first, Client(many.lane) as second:
                times = alternate(
                    rounds,
                    *(
                        lambda c=client: float(
                            summary(durations(lambda: c.infer("m0000", feed)["y"], seconds, warm=50))["median_us"]
                        )
                        for client in (second, first)
                    ),
                )
    beside, lone = map(median, times)
    return [
        Row(f"{count} Python models: ready", ready, "s", at_most=20.0),
        Row(
            f"{count} Python models: PSS of a worker",
            median(sizes),
            "MiB",
            at_most=4.0,
            beside=f"{min(sizes):.1f} to {max(sizes):.1f} MiB, {len(sizes)} workers",
        ),
        Row(
            f"one model beside {count - 1} idle: p50",
            beside / lone,
            "of alone",
            at_most=1.05,
            beside=f"{micros(beside)}, alone {micros(lone)}",
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-") as work:
        print(table.plain(rows(Path(work), args.models, args.rounds, args.seconds)))


if __name__ == "__main__":
    main()
