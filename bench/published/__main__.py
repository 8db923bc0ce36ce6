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
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.lib import models, table
from bench.lib.charts import Ranked, rankings
from bench.lib.clock import durations, in_turn
from bench.lib.models import onnx_model
from bench.published import text_models, texts
from shmserve.repo import networks
from shmserve.testing import Server
from shmserve.tools.charts import COLORS

PATIENCE_S = 60.0
CHART = Path(__file__).parents[2] / "docs" / "figures" / "published.svg"
INCEPTION_IMAGE, DENSENET_IMAGE = [3, 299, 299], [3, 224, 224]
CALLERS = 8
PHASED = 50
"""Requests whose time is divided into phases."""
PHASES = ("queue", "compute_input", "compute_infer", "compute_output", "success")
BATCHES = 8
"""Batches of 64 texts in the work of the hand-made service and of the server."""
Rates = Mapping[str, float]
"""Party -> requests per second."""


@dataclass(frozen=True)
class Claim:
    """`rate` / `than`: the two parties. `claimed` None: no figure was published. `short`: its name in the chart."""

    name: str
    short: str
    rate: str
    than: str
    claimed: float | None
    why: str


@dataclass(frozen=True)
class Result:
    claim: str
    short: str
    claimed: float | None
    measured: float
    why: str


# ------------------------------------------------------------------------------------------------- experiments

INCEPTION = (
    Claim(
        "Inception: batching, 4 in flight",
        "batching",
        "batching, 4",
        "plain, 4",
        165.2 / 73.4,
        "a GPU computes a batch in little more time than one image; one image keeps a core of a CPU busy",
    ),
    Claim(
        "Inception: two instances, 4 in flight",
        "instances",
        "instances, 4",
        "plain, 4",
        108.6 / 73.4,
        "two instances use two cores; on a GPU the second only hides copies",
    ),
    Claim(
        "Inception: both, 16 in flight",
        "both",
        "both, 16",
        "plain, 16",
        289.6 / 73.4,
        "the cores are the limit, and two instances keep both busy",
    ),
)
DENSENET = (
    Claim("DenseNet-121: OpenVINO", "OpenVINO", "openvino", "plain", None, "published for TensorRT on a GPU"),
    Claim(
        "DenseNet-121: FP16",
        "FP16",
        "fp16",
        "plain",
        None,
        "for GPUs: on a CPU, ONNX Runtime converts to 32 bits and back",
    ),
)
PIPELINE = (
    Claim(
        "64 texts: ensemble beside pre- and post-processing in the caller",
        "ensemble",
        "ensemble, 1",
        "caller, 1",
        1.15,
        "the tokenizer is the same on both sides, and the caller is on the same machine",
    ),
    Claim(
        "the same, eight callers",
        "8 callers",
        "ensemble, 8",
        "caller, 8",
        1.15,
        "the callers are threads of one process and share its lock; each step of the ensemble has one process",
    ),
    Claim(
        "64 texts: tokenizer in Rust beside a loop",
        "tokenizer",
        "fast",
        "slow",
        None,
        "texts are split at blanks only, which Python does in C; the tokenizer in Rust returns lists of Python",
    ),
    Claim("64 texts: labels by numpy beside a loop", "labels", "numpy", "loop", None, "64 vectors of 64 numbers"),
)
SERVICE = (
    Claim(
        "move from a hand-made service, 64 texts in a request",
        "service",
        "server",
        "service",
        7.77 / 4.54,
        "the service runs one text at a time, the server 64",
    ),
)


def inception(work: Path, seconds: float, rounds: int) -> Rates:
    file = work / "inception.onnx"
    file.write_bytes(networks.inception())
    root = work / "inception"
    for name, rows, instances in (("plain", 0, 1), ("batching", 16, 1), ("instances", 0, 2), ("both", 16, 2)):
        # Without batching, each request still has an axis for its rows.
        shape = INCEPTION_IMAGE if rows else [1, *INCEPTION_IMAGE]
        model = onnx_model(shape, networks.CLASSES, rows, instances)
        if not rows:
            model.outputs = {"y": ("FP32", [1, networks.CLASSES])}
        models.write(root, name, model, {"model.onnx": file})
    image = {"x": np.random.default_rng(0).random((1, *INCEPTION_IMAGE), np.float32)}
    with Server(root) as server, server.client(timeout=PATIENCE_S) as client:
        named = dict.fromkeys(party for claim in INCEPTION for party in (claim.rate, claim.than))
        pairs = {party: party.split(", ") for party in named}
        parties = {
            party: partial(_flow, client, name, image, seconds, int(flight)) for party, (name, flight) in pairs.items()
        }
        return _medians(rounds, parties)


def densenet(work: Path, seconds: float, rounds: int) -> Rates:
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    file, half = work / "densenet.onnx", work / "densenet16.onnx"
    file.write_bytes(networks.densenet())
    onnx.save(convert_float_to_float16(onnx.load(file), keep_io_types=True), half)
    root = work / "densenet"
    for name, backend, path in (
        ("plain", "onnxruntime", file),
        ("openvino", "openvino", file),
        ("fp16", "onnxruntime", half),
    ):
        model = onnx_model(DENSENET_IMAGE, networks.CLASSES, 4)
        model.backend = backend
        if backend == "openvino":
            model.parameters, model.more = {"NUM_STREAMS": "1"}, 'default_model_filename: "model.onnx"'
        models.write(root, name, model, {"model.onnx": path})
    image = {"x": np.random.default_rng(0).random((1, *DENSENET_IMAGE), np.float32)}
    with Server(root) as server, server.client(timeout=PATIENCE_S) as client:
        names = ("plain", "openvino", "fp16")
        return _medians(rounds, {name: partial(_flow, client, name, image, seconds, 1) for name in names})


def pipeline(work: Path, seconds: float, rounds: int) -> Rates:
    root = work / "texts"
    text_models.write(root, work / "encoder.onnx")
    given = {"text": texts.some_texts()}
    with Server(root) as server, server.client(timeout=PATIENCE_S) as client:
        vector = {"vector": np.random.default_rng(0).random((texts.TEXTS, text_models.HIDDEN), np.float32)}

        def caller() -> Any:
            ids, mask = texts.tokens_fast([text.decode() for (text,) in given["text"]])
            found = client.infer("encoder", {"input_ids": ids, "attention_mask": mask})["text"]
            return texts.labels_numpy(found)

        def ensemble() -> Any:
            return client.infer("texts", given)["label"]

        if caller().tolist() != ensemble().tolist():
            raise RuntimeError("the ensemble and the caller disagree about the labels")
        ways = {"ensemble": ensemble, "caller": caller}
        parties: dict[str, Callable[[], float]] = {
            f"{name}, {count}": partial(_callers, ask, seconds, count)
            for name, ask in ways.items()
            for count in (1, CALLERS)
        }
        for name, model, inputs in (
            ("fast", "tokenizer_fast", given),
            ("slow", "tokenizer_loop", given),
            ("numpy", "labels_numpy", vector),
            ("loop", "labels_loop", vector),
        ):
            parties[name] = partial(_callers, partial(client.infer, model, inputs), seconds, 1)
        rates = _medians(rounds, parties)
        before = client.statistics()
        for _ in range(PHASED):
            ensemble()
        for line in phases(before, client.statistics()):
            print(line, file=sys.stderr)
        return rates


def phases(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The mean time of each phase of each model that was called between these two documents of statistics."""
    old = {entry["name"]: entry["inference_stats"] for entry in before["model_stats"]}
    lines = []
    for entry in after["model_stats"]:
        name, stats = entry["name"], entry["inference_stats"]
        count = stats["success"]["count"] - old[name]["success"]["count"]
        if count:
            times = {phase: (stats[phase]["ns"] - old[name][phase]["ns"]) / count / 1e6 for phase in PHASES}
            lines.append(f"{name}: " + ", ".join(f"{phase} {ms:.3f} ms" for phase, ms in times.items()))
    return lines


def service(work: Path, seconds: float, rounds: int) -> Rates:
    """Both over HTTP with JSON, from eight callers."""
    root = work / "service"
    text_models.write(root, work / "service.onnx")
    rows = [text.decode() for (text,) in texts.some_texts()]
    ours = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [len(rows), 1], "data": rows}]}
    with Server(root, "--http-port", "0", gateway=True) as server, _handmade(work / "service.onnx") as port:
        address = server.endpoints["http"]
        parties = {
            "server": partial(_work, address, "/v2/models/texts/infer", json.dumps(ours).encode()),
            "service": partial(_work, f"127.0.0.1:{port}", "/", json.dumps({"texts": rows}).encode()),
        }
        return _medians(rounds, parties)


EXPERIMENTS = {
    "inception": (inception, INCEPTION),
    "densenet": (densenet, DENSENET),
    "pipeline": (pipeline, PIPELINE),
    "service": (service, SERVICE),
}


# ------------------------------------------------------------------------------------------------- measuring


def _medians(rounds: int, parties: Mapping[str, Callable[[], float]]) -> Rates:
    return {name: median(rates) for name, rates in in_turn(rounds, parties).items()}


def _flow(client: Any, model: str, inputs: Mapping[str, Any], seconds: float, flight: int) -> float:
    """Requests per second with this many in flight, until all are answered: a turn has few batches."""
    start = time.perf_counter()
    waiting = deque(client.submit(model, inputs) for _ in range(flight))
    count = flight
    while waiting:
        waiting.popleft().result(PATIENCE_S)
        if time.perf_counter() < start + seconds:
            waiting.append(client.submit(model, inputs))
            count += 1
    return count / (time.perf_counter() - start)


def _callers(ask: Callable[[], Any], seconds: float, count: int) -> float:
    """Requests per second of this many threads."""
    with ThreadPoolExecutor(count) as pool:
        taken = list(pool.map(lambda _: durations(ask, seconds, 2), range(count)))
    return sum(len(some) * 1e9 / sum(some) for some in taken)


def _work(address: str, path: str, body: bytes) -> float:
    """Batches of texts per second, of callers that share a number of them."""

    def call(_: int) -> None:
        connection = HTTPConnection(address, timeout=PATIENCE_S)
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        connection.close()
        if answer.status != 200:
            raise RuntimeError(f"{address}{path} answered {answer.status}")

    call(0)
    start = time.perf_counter()
    with ThreadPoolExecutor(CALLERS) as pool:
        list(pool.map(call, range(BATCHES)))
    return BATCHES / (time.perf_counter() - start)


@contextmanager
def _handmade(network: Path) -> Iterator[int]:
    command = [sys.executable, "-m", "bench.published.texts", str(network), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.terminate()


# ------------------------------------------------------------------------------------------------- the table


def results_of(claims: tuple[Claim, ...], rates: Rates) -> list[Result]:
    return [
        Result(claim.name, claim.short, claim.claimed, rates[claim.rate] / rates[claim.than], claim.why)
        for claim in claims
    ]


def chart(results: list[Result], caption: str) -> str:
    measured = [Ranked(one.short, one.measured, f"{one.measured:.2f}", COLORS[0]) for one in results]
    claimed = [Ranked(one.short, one.claimed or 0.0, f"{one.claimed:.2f}" if one.claimed else "-") for one in results]
    return rankings([("ratio measured here", measured), ("ratio claimed", claimed)], caption)


def markdown(results: list[Result]) -> str:
    rows = [
        [one.claim, f"{one.claimed:.2f}" if one.claimed is not None else "-", f"{one.measured:.2f}", one.why]
        for one in results
    ]
    return table.markdown(["claim", "claimed ratio", "measured here", "why they differ"], rows)


def save(results: list[Result], rates: Mapping[str, Rates], command: str) -> Path:
    today = time.strftime("%Y-%m-%d", time.gmtime())
    facts = table.machine() | {"load average at the end": f"{os.getloadavg()[0]:.0f}"}
    lines = [f"# Published experiments, {today}", "", f"Made by `{command}`. docs/compare.md explains it.", ""]
    lines += [*(f"- {key}: {value}" for key, value in facts.items()), "", markdown(results), ""]
    path = table.RESULTS / f"{today}-{table.host_kind()}-published.md"
    path.write_text("\n".join(lines))
    record = {"date": today, "machine": facts, "results": [asdict(one) for one in results], "per_second": rates}
    path.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    CHART.write_text(chart(results, f"{facts['cores']} cores ({facts['cpu']}), {today}: make compare-published"))
    return path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.published", description=__doc__)
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"of {', '.join(EXPERIMENTS)} (default: all)")
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of a turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="save the table in bench/results")
    args = parser.parse_args()
    if unknown := set(args.names) - EXPERIMENTS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    results: list[Result] = []
    rates: dict[str, Rates] = {}
    with tempfile.TemporaryDirectory(prefix="published-") as folder:
        for name in args.names or EXPERIMENTS:
            measure, claims = EXPERIMENTS[name]
            print(f"{name} ...", file=sys.stderr, flush=True)
            rates[name] = measure(Path(folder), args.seconds, args.rounds)
            results += results_of(claims, rates[name])
    print(markdown(results))
    if args.save:
        print(save(results, rates, f"python -m bench.published {' '.join(sys.argv[1:])}".strip()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
