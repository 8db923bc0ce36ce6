"""`python -m bench.endpoints.agreement`: checks that `shmserve bench` measures what other load generators measure.

One server, one model, the same number of requests in flight. `bench`, `perf_analyzer` and `wrk` take turns in a
changing order, because the speed of the machine varies more than the tools differ. The medians of all turns are
compared. A tool that is not installed is skipped with a message.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median

from bench.endpoints import perf_analyzer
from bench.endpoints.servers import ROW, Serving, ours
from bench.lib import models, table, wrk
from bench.lib.clock import in_turn
from bench.lib.table import Row, micros
from bench.lib.wrk import WrkTurn
from shmserve.tools.load.analysis.latencies import percentile_of
from shmserve.tools.load.measure import measure
from shmserve.tools.load.plan import ClosedLoop, Endpoint, LoadPlan, MeasureSettings

WITHIN = 0.05
MODEL = "identity"
DELAY_US = 10_000
"""Default delay of the model, so that throughput is limited by the server and not by a generator that shares its
cores."""

Take = Callable[[], WrkTurn]


def repository(work: Path, delay_us: int) -> Path:
    root = work / "agreement"
    tensors = {"x": ("FP32", [ROW])}, {"y": ("FP32", [ROW])}
    parameters = {"delay_us": str(delay_us)} if delay_us else {}
    models.write(root, MODEL, models.Model("identity", *tensors, max_batch=32, parameters=parameters), {})
    return root


def by_bench(url: str, concurrency: int, seconds: float) -> WrkTurn:
    window = round(seconds * 1e9 / perf_analyzer.WINDOWS)
    settings = MeasureSettings(
        warmup_ns=window // 2, window_ns=window, min_windows=perf_analyzer.WINDOWS, max_windows=perf_analyzer.WINDOWS
    )
    plan = LoadPlan(
        model=MODEL, endpoint=Endpoint(url=url), loads=(ClosedLoop(concurrency),), settings=settings, processes=1
    )
    (point,) = measure(plan).points
    if point.failed:
        raise RuntimeError(f"bench: {point.errors}")
    windows = point.windows
    per_s = sum(window.good for window in windows) * 1e9 / sum(window.length_ns for window in windows)
    p50, p99 = (percentile_of(point.latency.histogram, share) / 1000 for share in (50, 99))
    return WrkTurn(per_s, p50, p99)


def by_perf_analyzer(tool: Path, server: Serving, protocol: str, concurrency: int, seconds: float) -> WrkTurn:
    options = ["--concurrency-range", str(concurrency)]
    (result,) = perf_analyzer.rows(tool, server, MODEL, protocol, options, seconds)
    return WrkTurn(result.per_s, result.p50_us, result.p99_us)


def by_wrk(tool: str, address: str, concurrency: int, seconds: float, work: Path) -> WrkTurn:
    data = [0.5] * ROW
    body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, ROW], "data": data}]}).encode()
    post = wrk.Post(f"http://{address}/v2/models/{MODEL}/infer", {"Content-Type": "application/json"}, (body,))
    return wrk.run(tool, post, concurrency, seconds, work)


def compared(what: str, by_tool: Mapping[str, list[WrkTurn]]) -> Iterator[Row]:
    """Throughput and median latency measured by bench, relative to the other tools."""
    of_bench = by_tool["bench"]
    for name, turns in by_tool.items():
        if name == "bench":
            continue
        for metric, own, other in (
            ("requests/s", [turn.per_s for turn in of_bench], [turn.per_s for turn in turns]),
            ("p50", [turn.p50_us for turn in of_bench], [turn.p50_us for turn in turns]),
        ):
            measured, reference = median(own), median(other)
            shown = (
                f"{measured:,.0f} to {reference:,.0f}"
                if metric != "p50"
                else f"{micros(measured)} to {micros(reference)}"
            )
            yield Row(f"{what}: {metric} of bench, to {name}", measured / reference, "x", 1 - WITHIN, 1 + WITHIN, shown)


def rows(
    tool: Path | None, wrk_tool: str | None, delay_us: int, rounds: int, seconds: float, flights: list[int]
) -> list[Row]:
    results: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        work = Path(folder)
        with ours(repository(work, delay_us)) as server:
            for protocol in ("http", "grpc"):
                url = f"{protocol}://{server.http if protocol == 'http' else server.grpc}"
                for flight in flights:
                    takes: dict[str, Take] = {"bench": partial(by_bench, url, flight, seconds)}
                    if tool is not None:
                        takes["perf_analyzer"] = partial(by_perf_analyzer, tool, server, protocol, flight, seconds)
                    if wrk_tool is not None and protocol == "http":
                        takes["wrk"] = partial(by_wrk, wrk_tool, server.http, flight, seconds, work)
                    if len(takes) > 1:
                        results += compared(f"{protocol}, {flight} in flight", in_turn(rounds, takes))
    return results


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.endpoints.agreement", description=__doc__)
    option = parser.add_argument
    option("--perf-analyzer", type=Path, default=perf_analyzer.TOOL, metavar="PATH", help="(default: %(default)s)")
    option("--wrk", default="wrk", metavar="PATH", help="(default: the one in PATH)")
    option("--seconds", type=float, default=2.0, help="length of one turn (default 2)")
    option("--rounds", type=int, default=7, help="turns of each tool (default 7)")
    option(
        "--delay-us",
        type=int,
        default=DELAY_US,
        help="time of the model; 0 compares the generators' own cost too (default: %(default)s)",
    )
    option("--in-flight", type=int, action="append", metavar="N", help="may be given again (default: 1 and 8)")
    chosen = parser.parse_args(argv)
    tool = chosen.perf_analyzer if chosen.perf_analyzer.exists() else None
    wrk_tool = shutil.which(chosen.wrk)
    for name, there, hint in (
        ("perf_analyzer", tool, "`make bench-agreement` installs it, or give --perf-analyzer"),
        ("wrk", wrk_tool, "`apt install wrk`, or give --wrk"),
    ):
        if there is None:
            print(f"skipped: there is no {name}; {hint}", file=sys.stderr)
    if tool is None and wrk_tool is None:
        return 0
    result = rows(tool, wrk_tool, chosen.delay_us, chosen.rounds, chosen.seconds, chosen.in_flight or [1, 8])
    print(table.plain(result))
    return 1 if any(row.verdict != "ok" for row in result) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
