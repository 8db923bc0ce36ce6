"""Runs `perf_analyzer`, Triton's load generator. Its results are used unchanged; processor time per request in each
process is measured in addition.
"""

from __future__ import annotations

import csv
import os
import resource
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.endpoints.servers import Serving

TOOL = Path(__file__).parents[2] / "build" / "perf-analyzer" / "bin" / "perf_analyzer"
WINDOWS = 3
MEMORY = 6 << 30
"""perf_analyzer keeps all data that it sends, and would use all memory without a limit."""
RUN_S = 180
_PARTS = {
    "Server Queue": "queue",
    "Server Compute Input": "in",
    "Server Compute Infer": "model",
    "Server Compute Output": "out",
}


@dataclass
class AnalyzerRun:
    per_s: float
    p50_us: float
    p99_us: float
    server_us: dict[str, float]
    """The server's own times for the parts of a request, from its statistics."""
    cpu_us: dict[str, float] = field(default_factory=dict)
    """Processor time per request, by process role."""


def run(tool: Path, server: Serving, model: str, protocol: str, options: Sequence[str], seconds: float) -> AnalyzerRun:
    """Runs three windows, regardless of their spread; the results cover all of them."""
    before, count = server.busy(), server.answered(model)
    (result, *_) = rows(tool, server, model, protocol, options, seconds)
    after, count = server.busy(), server.answered(model) - count
    result.cpu_us = {part: (after[part] - before[part]) / max(1, count) * 1e6 for part in after}
    return result


def rows(
    tool: Path, server: Serving, model: str, protocol: str, options: Sequence[str], seconds: float
) -> list[AnalyzerRun]:
    """One result for each requested load."""
    address = server.http if protocol == "http" else server.grpc
    if not address:
        raise RuntimeError(f"{server.name} does not serve {protocol}")
    window, output = int(seconds * 1000 / WINDOWS), ""
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "table.csv"
        for longer in (1, 6):  # windows with few requests are an error to perf_analyzer
            command = [
                str(tool),
                "-m",
                model,
                "-u",
                address,
                "-i",
                protocol,
                "-p",
                str(window * longer),
                "-r",
                str(WINDOWS),
                "-s",
                "999",
                "-f",
                str(table),
                *options,
            ]
            code, output = _run(command)
            if table.exists():  # also written for a load reported as unstable, with code 2
                with table.open() as opened:
                    return [_parse(row) for row in csv.DictReader(opened)]
    raise RuntimeError(f"perf_analyzer ended with {code}: {' '.join(output.split()[-40:])}")


def _run(command: list[str]) -> tuple[int, str]:
    cuda = Path(command[0]).parents[1].glob("lib/python*/site-packages/nvidia/cuda_runtime/lib")
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, cuda))}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    resource.prlimit(process.pid, resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        output, _ = process.communicate(timeout=RUN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        output = f"not done after {RUN_S} s\n{process.communicate()[0]}"
    return process.returncode, output


def _parse(row: dict[str, str]) -> AnalyzerRun:
    parts = {text: float(row[name]) for name, text in _PARTS.items() if name in row}
    return AnalyzerRun(float(row["Inferences/Second"]), float(row["p50 latency"]), float(row["p99 latency"]), parts)
