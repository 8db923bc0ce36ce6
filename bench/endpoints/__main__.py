"""`python -m bench.endpoints`: the network endpoints compared with Triton's, with the same models, in turn.

A point that misses its bound, or cannot be measured, stays in the table. Each point shows the processor time per
request in each process. For small models, and an input of 600 KB, the relay of `bench.peers` takes part as the floor.
`--busy` repeats the points beside processes that compute all the time.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median
from time import perf_counter

from bench.endpoints import perf_analyzer
from bench.endpoints.clients import CONCURRENT_CLIENTS, SEQUENTIAL_CLIENTS
from bench.endpoints.floor import relay
from bench.endpoints.open_load import OPEN_LOAD, compared_tails
from bench.endpoints.perf_analyzer import AnalyzerRun
from bench.endpoints.servers import ROW, Serving, ours, repository, triton
from bench.lib import models, processes, table
from bench.lib.child import Child
from bench.lib.clock import alternate
from bench.lib.setting import Setting
from bench.lib.table import Row, micros
from tests.tritonclient import models as client_models

FLIGHT = 64
MIB = 1 << 20
TINY, BESIDE_BUSY, LARGE = 1.5, 1.2, 1.0
"""Required share of Triton's throughput, measured with its own tool."""
LARGE_GRPC = {1: 1.25, 8: 1.15}
SIZES = {"identity": ROW, "mlp": models.MLP_SHAPE[0]}
PICTURE = 150_528
"""Elements of 600 KB."""
RELAYED = SIZES | {"first": PICTURE}


@dataclass
class ComparedLoad:
    """One load, measured at both servers."""

    text: str
    model: str
    protocol: str
    at_least: float
    options: list[str] = field(default_factory=list)


def points(quick: bool, busy: int) -> Iterator[ComparedLoad]:
    tiny = BESIDE_BUSY if busy else TINY
    for model in SIZES:
        for protocol in ("http", "grpc"):
            for flight in (1, 8, 32, 64):
                load = ["--concurrency-range", str(flight)]
                yield ComparedLoad(f"{model}, {protocol}, {flight} in flight", model, protocol, tiny, load)
    for protocol in ("http", "grpc"):
        for flight in (1, 8):
            load = ["--concurrency-range", str(flight), "--shape", f"x:{PICTURE}"]
            at_least = LARGE_GRPC[flight] if protocol == "grpc" else LARGE
            yield ComparedLoad(f"first of 600 KB, {protocol}, {flight} in flight", "first", protocol, at_least, load)
    for size in (1, 16):
        for protocol in ("http", "grpc"):
            for flight in (1,) if quick else (1, 8):
                load = ["--concurrency-range", str(flight), "--shape", f"x:{size * MIB // 4}"]
                load += ["--shared-memory", "system", "--output-shared-memory-size", str(size * MIB)]
                text = f"identity of {size} MiB, {protocol}, shared memory, {flight} in flight"
                yield ComparedLoad(text, "whole", protocol, LARGE, load)


MODES: dict[str, tuple[str, str, list[str]]] = {
    "http, sync, one to four in flight": ("simple", "http", ["--sync", "--concurrency-range", "1:4:3"]),
    "http, async": ("simple", "http", ["--async", "--concurrency-range", "4"]),
    "http, rates": ("simple", "http", ["--request-rate-range", "100:200:100"]),
    "http, shared memory": ("simple", "http", ["--shared-memory", "system", "--concurrency-range", "2"]),
    "http, sequences": ("simple_sequence", "http", ["--concurrency-range", "2", "--sequence-length", "5"]),
    "grpc, sync, one to four in flight": ("simple", "grpc", ["--sync", "--concurrency-range", "1:4:3"]),
    "grpc, async": ("simple", "grpc", ["--async", "--concurrency-range", "4"]),
    "grpc, streaming": ("simple", "grpc", ["--async", "--streaming", "--concurrency-range", "4"]),
    "grpc, rates": ("simple", "grpc", ["--request-rate-range", "100:200:100"]),
    "grpc, shared memory": ("simple", "grpc", ["--shared-memory", "system", "--concurrency-range", "2"]),
    "grpc, sequences by streaming": (
        "simple_sequence",
        "grpc",
        ["--async", "--streaming", "--concurrency-range", "2", "--sequence-length", "5"],
    ),
    "grpc, sequences by rate": (
        "simple_sequence",
        "grpc",
        ["--async", "--streaming", "--request-rate-range", "100", "--num-of-sequences", "2", "--sequence-length", "5"],
    ),
}
"""Modes of perf_analyzer, each run once at shmserve alone: model, protocol, options."""


class EndpointMeasures:
    """The measures and their shared parameters."""

    def __init__(self, chosen: argparse.Namespace, work: Path) -> None:
        self.tool: Path = chosen.perf_analyzer
        self.python: Path | None = chosen.triton_python
        self.quick: bool = chosen.quick
        self.only: list[str] = chosen.only
        self.busy: int = chosen.busy
        self.seconds: float = 1.0 if chosen.quick else chosen.seconds
        self.rounds: int = 2 if chosen.quick else chosen.rounds
        self.setting = Setting(work, self.seconds, self.rounds, 0.0)

    def rows(self) -> Iterator[Row]:
        yield from self.mode_rows()
        if self.python is None:
            print("no --triton-python: nothing to compare with", file=sys.stderr)
            return
        root = repository(self.setting.work, self.setting.onnx("mlp"))
        with ExitStack() as stack:
            server = stack.enter_context(ours(root))
            other = stack.enter_context(triton(root, self.python, self.setting.work))
            stack.enter_context(processes.busy(self.busy))
            for model, group in groupby(points(self.quick, self.busy), lambda point: point.model):
                wanted = [point for point in group if self.wants(point.text)]
                with ExitStack() as of_model:
                    parties = [server, other]
                    if wanted and model in RELAYED:
                        floor = relay(model, RELAYED[model], self.setting.onnx("mlp"), server, self.setting.work)
                        parties.append(of_model.enter_context(floor))
                    for point in wanted:
                        yield self.measured(point.text, partial(self.compared, point, parties))
            if self.wants(OPEN_LOAD):
                yield self.measured(
                    OPEN_LOAD, lambda: compared_tails("mlp", (server, other), self.seconds, self.rounds)
                )
            for model in SIZES:
                if self.wants(f"{model}, native"):  # includes both rows
                    yield from self.native(model, server, other)

    def wants(self, text: str) -> bool:
        return not self.only or any(part in text for part in self.only)

    def measured(self, text: str, take: Callable[[], Row]) -> Row:
        others = processes.OtherLoad()
        try:
            row = take()
        except Exception as error:
            traceback.print_exc()
            row = table.failed_row(text, error)
        row = replace(row, others=others.cores())
        print("  ".join(cell for cell in table.cells(row) if cell), file=sys.stderr, flush=True)
        return row

    # ------------------------------------------------------------------------------------ with perf_analyzer

    def mode_rows(self) -> Iterator[Row]:
        wanted = {
            f"perf_analyzer: {name}": mode for name, mode in MODES.items() if self.wants(f"perf_analyzer: {name}")
        }
        if not wanted:
            return
        root = self.setting.repository("modes")
        client_models.build(root, ["simple", "simple_sequence"])
        with ours(root) as server:
            for text, (model, protocol, options) in wanted.items():
                yield self.measured(text, partial(self.mode_row, text, server, model, protocol, options))

    def mode_row(self, text: str, server: Serving, model: str, protocol: str, options: list[str]) -> Row:
        result = perf_analyzer.rows(self.tool, server, model, protocol, options, min(self.seconds, 0.9))
        expected = 2 if any(":" in option for option in options) else 1
        silent = [ran for ran in result if not ran.server_us.get("model")]
        failed = f"{len(silent)} of {len(result)} loads without times of the server" if silent else ""
        if len(result) != expected:
            failed = f"{len(result)} loads reported, not {expected}"
        parts = "; ".join(f"{ran.per_s:,.0f}/s, {_parts(ran.server_us)}" for ran in result)
        return Row(text, result[0].per_s, "/s", beside=f"server's own times: {parts}", failed=failed)

    def compared(self, point: ComparedLoad, parties: list[Serving]) -> Row:
        """The rate of the first party as a share of the second's. A third is the floor."""
        took: dict[str, list[AnalyzerRun]] = {}

        def party(at: Serving) -> float:
            ran = perf_analyzer.run(self.tool, at, point.model, point.protocol, point.options, self.seconds)
            took.setdefault(at.name, []).append(ran)
            return ran.per_s

        rates = alternate(self.rounds, *(partial(party, at) for at in parties))
        ours, theirs, *floor = (median(values) for values in rates)
        beside = "; ".join(_summary(name, runs) for name, runs in took.items())
        if floor:
            beside = f"relay {floor[0] / theirs:.2f} of Triton; {beside}"
        return Row(point.text, ours / theirs, "of Triton", at_least=point.at_least, beside=beside)

    # ------------------------------------------------------------------------------------ with Python clients

    def native(self, model: str, server: Serving, other: Serving) -> Iterator[Row]:
        """The native client, and the best of Triton's, each at its own server."""
        common = {"model": model, "size": SIZES[model], "flight": FLIGHT}
        with (
            Child("bench.endpoints.clients:native", url=server.lane, **common) as ours,
            Child(
                "bench.endpoints.clients:tritonclient", str(self.python), http=other.http, grpc=other.grpc, **common
            ) as theirs,
        ):
            yield self.measured(f"{model}, native", partial(self.concurrent, model, ours, theirs))
            yield self.measured(f"{model}, native", partial(self.sequential, model, ours, theirs))

    def query(self, child: Child, way: str, answer: str) -> Callable[[], float]:
        return lambda: float(child.ask(seconds=self.seconds, way=way)[answer])

    def concurrent(self, model: str, ours: Child, theirs: Child) -> Row:
        parties = [
            self.query(ours, "many", "per_s"),
            *(self.query(theirs, way, "per_s") for way in CONCURRENT_CLIENTS),
        ]
        rate, *others = (median(values) for values in alternate(self.rounds, *parties))
        beside = f"{rate:,.0f}/s; " + ", ".join(
            f"{way} {per_s:,.0f}/s" for way, per_s in zip(CONCURRENT_CLIENTS, others, strict=True)
        )
        text = f"{model}, native AsyncClient, {FLIGHT} in flight"
        return Row(text, rate / max(others), "of Triton's best client", at_least=3.0, beside=beside)

    def sequential(self, model: str, ours: Child, theirs: Child) -> Row:
        parties = [
            self.query(ours, "lone", "median_us"),
            *(self.query(theirs, way, "median_us") for way in SEQUENTIAL_CLIENTS),
        ]
        took, *others = (median(values) for values in alternate(self.rounds, *parties))
        beside = f"{micros(took)}; " + ", ".join(
            f"{way} {micros(us)}" for way, us in zip(SEQUENTIAL_CLIENTS, others, strict=True)
        )
        text = f"{model}, native Client, one request"
        return Row(text, took / min(others), "of the time of Triton's best client", at_most=0.4, beside=beside)


def _parts(parts: dict[str, float]) -> str:
    return " ".join(f"{name} {value:.0f} us" for name, value in parts.items())


def _summary(name: str, runs: list[AnalyzerRun]) -> str:
    cpu = " + ".join(f"{part} {median(ran.cpu_us[part] for ran in runs):.0f}" for part in runs[0].cpu_us)
    rate, p50 = median(ran.per_s for ran in runs), median(ran.p50_us for ran in runs)
    server = " + ".join(f"{part} {median(ran.server_us[part] for ran in runs):.0f}" for part in runs[0].server_us)
    return f"{name} {rate:,.0f}/s, p50 {micros(p50)} (server's: {server}), processors a request: {cpu} us"


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.endpoints", description=__doc__)
    option = parser.add_argument
    option(
        "--triton-python",
        type=Path,
        metavar="PATH",
        help="a Python that has nvidia-pytriton, tritonclient[all] "
        "and onnxruntime; without it, only the modes of perf_analyzer are tested",
    )
    option(
        "--perf-analyzer",
        type=Path,
        metavar="PATH",
        default=perf_analyzer.TOOL,
        help="path of perf_analyzer (default: %(default)s)",
    )
    option("--only", nargs="+", default=[], metavar="TEXT", help="measure only points whose names contain such a text")
    option("--busy", type=int, default=0, metavar="N", help="processes that compute beside both servers (default 0)")
    option("--seconds", type=float, default=3.0, help="length of one turn (default 3)")
    option("--rounds", type=int, default=3, help="turns of each server (default 3)")
    option("--quick", action="store_true", help="measure fewer points in two short turns each, in under six minutes")
    option("--save", action="store_true", help="save the result of a run with --only or --quick, too")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    chosen = arguments(argv)
    if not chosen.perf_analyzer.exists():
        print(f"there is no perf_analyzer at {chosen.perf_analyzer}: docs/performance.md", file=sys.stderr)
        return 2
    started = perf_counter()
    with tempfile.TemporaryDirectory(prefix="bench-") as work:
        result = list(EndpointMeasures(chosen, Path(work)).rows())
    print(table.plain(result))
    print(f"{perf_counter() - started:.0f} s", file=sys.stderr)
    if (chosen.triton_python and not chosen.only and not chosen.quick) or chosen.save:
        shown = [word for word in argv if word not in (str(chosen.triton_python), str(chosen.perf_analyzer))]
        turns = "two of 1 s each, in turn" if chosen.quick else f"{chosen.rounds} of {chosen.seconds:g} s each, in turn"
        loud = max((row.others for row in result), default=0.0)
        notes = {"busy processes": chosen.busy, "others": f"used up to {loud:.2f} cores during a point", "turns": turns}
        path = table.save(result, shlex.join(["python", "-m", "bench.endpoints", *shown]), notes, "-endpoints")
        print(f"saved in bench/results/{path.name}")
    return 1 if any(row.verdict == "FAILED" for row in result) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
