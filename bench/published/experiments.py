"""The experiments: what was claimed, the models, and how their rates are measured."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.lib import models
from bench.lib.clock import durations, in_turn
from bench.lib.models import Model, onnx_model
from bench.published import foreign, text_models, texts
from shmserve.repo import networks
from shmserve.testing import Server

PATIENCE_S = 180.0
CALLERS = 8
PHASED = 50
"""Requests whose time is divided into phases."""
PHASES = ("queue", "compute_input", "compute_infer", "compute_output", "success")
BATCHES = 8
"""Batches of 64 texts in the work of the hand-made service and of the server."""
Rates = Mapping[str, float]
"""Party -> requests per second; "PARTY, MiB" -> memory; "MODEL, PHASE, ms" -> time."""


@dataclass(frozen=True)
class Effort:
    """`seconds`: the duration of a turn. `small`: networks that only show that an experiment runs."""

    seconds: float
    rounds: int
    small: bool = False


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
class Experiment:
    """`engine`: the module that it needs, which is also the name of its environment in `tests.engines`."""

    measure: Callable[[Path, Effort], Rates]
    claims: tuple[Claim, ...]
    engine: str = ""


INCEPTION = (
    Claim(
        "Inception: batching, 1 in flight",
        "batching, 1",
        "batching, 1",
        "plain, 1",
        66.8 / 62.6,
        "one request makes no batch",
    ),
    Claim(
        "Inception: batching, 4 in flight",
        "batching, 4",
        "batching, 4",
        "plain, 4",
        165.2 / 73.4,
        "a GPU computes a batch in little more time than one image; one image keeps a core of a CPU busy",
    ),
    Claim(
        "Inception: two instances, 1 in flight",
        "instances, 1",
        "instances, 1",
        "plain, 1",
        70.6 / 62.6,
        "one request uses one instance",
    ),
    Claim(
        "Inception: two instances, 4 in flight",
        "instances, 4",
        "instances, 4",
        "plain, 4",
        108.6 / 73.4,
        "two instances use two cores; on a GPU the second only hides copies",
    ),
    Claim(
        "Inception: both, 16 in flight",
        "both, 16",
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
PADDLE = (
    Claim(
        "64 texts: PaddlePaddle beside ONNX Runtime, the same network",
        "Paddle",
        "paddle",
        "onnx",
        None,
        "most of the time goes into products of matrices, for which both have fast kernels",
    ),
    Claim(
        "the same, memory of the model",
        "Paddle MiB",
        "paddle, MiB",
        "onnx, MiB",
        None,
        "the package of PaddlePaddle, which also trains, takes 130 MiB before it loads a model",
    ),
)
SERVICE = (
    Claim(
        "move from a hand-made Flask service, 64 texts in a request",
        "service",
        "server",
        "service",
        7.77 / 4.54,
        "the service runs one text at a time, the server 64",
    ),
)


def inception(work: Path, effort: Effort) -> Rates:
    """A frozen graph of TensorFlow."""
    size = 75 if effort.small else 299
    file = _written("graphdef", work / "inception.graphdef", size)
    root = work / "inception"
    for name, rows, instances in (("plain", 0, 1), ("batching", 16, 1), ("instances", 0, 2), ("both", 16, 2)):
        # Without batching, each request still has an axis for its rows.
        axis = [] if rows else [1]
        model = Model(
            "tensorflow",
            {"x": ("FP32", [*axis, size, size, 3])},
            {foreign.GRAPH_OUTPUT: ("FP32", [*axis, networks.CLASSES])},
            rows,
            dynamic=rows > 0,
            instances=instances,
            parameters={"TF_NUM_INTRA_THREADS": "1"},
            more='platform: "tensorflow_graphdef"',
        )
        models.write(root, name, model, {"model.graphdef": file})
    image = {"x": np.random.default_rng(0).random((1, size, size, 3), np.float32)}
    with Server(root, start_timeout=PATIENCE_S) as server, server.client(timeout=PATIENCE_S) as client:
        named = dict.fromkeys(party for claim in INCEPTION for party in (claim.rate, claim.than))
        pairs = {party: party.split(", ") for party in named}
        parties = {
            party: partial(_flow, client, name, image, effort.seconds, int(flight))
            for party, (name, flight) in pairs.items()
        }
        return _medians(effort.rounds, parties)


def densenet(work: Path, effort: Effort) -> Rates:
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    file, half = work / "densenet.onnx", work / "densenet16.onnx"
    shape = [3, 32, 32] if effort.small else [3, 224, 224]
    file.write_bytes(networks.densenet(4 if effort.small else 32, shape[-1]))
    onnx.save(convert_float_to_float16(onnx.load(file), keep_io_types=True), half)
    root = work / "densenet"
    for name, backend, path in (
        ("plain", "onnxruntime", file),
        ("openvino", "openvino", file),
        ("fp16", "onnxruntime", half),
    ):
        model = onnx_model(shape, networks.CLASSES, 4)
        model.backend = backend
        if backend == "openvino":
            model.parameters, model.more = {"NUM_STREAMS": "1"}, 'default_model_filename: "model.onnx"'
        models.write(root, name, model, {"model.onnx": path})
    image = {"x": np.random.default_rng(0).random((1, *tuple(shape)), np.float32)}
    with Server(root) as server, server.client(timeout=PATIENCE_S) as client:
        names = ("plain", "openvino", "fp16")
        return _medians(effort.rounds, {name: partial(_flow, client, name, image, effort.seconds, 1) for name in names})


def pipeline(work: Path, effort: Effort) -> Rates:
    root = work / "texts"
    text_models.write(root, work / "encoder.onnx")
    inputs_of_texts = {"text": texts.some_texts()}
    with Server(root) as server, server.client(timeout=PATIENCE_S) as client:
        vector = {"vector": np.random.default_rng(0).random((texts.TEXTS, text_models.HIDDEN), np.float32)}

        def caller() -> Any:
            ids, mask = texts.tokens_fast([text.decode() for (text,) in inputs_of_texts["text"]])
            vectors = client.infer("encoder", {"input_ids": ids, "attention_mask": mask})["text"]
            return texts.labels_numpy(vectors)

        def ensemble() -> Any:
            return client.infer("texts", inputs_of_texts)["label"]

        if caller().tolist() != ensemble().tolist():
            raise RuntimeError("the ensemble and the caller disagree about the labels")
        ways = {"ensemble": ensemble, "caller": caller}
        parties: dict[str, Callable[[], float]] = {
            f"{name}, {count}": partial(_callers, ask, effort.seconds, count)
            for name, ask in ways.items()
            for count in (1, CALLERS)
        }
        for name, model, inputs in (
            ("fast", "tokenizer_fast", inputs_of_texts),
            ("slow", "tokenizer_loop", inputs_of_texts),
            ("numpy", "labels_numpy", vector),
            ("loop", "labels_loop", vector),
        ):
            parties[name] = partial(_callers, partial(client.infer, model, inputs), effort.seconds, 1)
        rates = _medians(effort.rounds, parties)
        before = client.statistics()
        for _ in range(1 if effort.small else PHASED):
            ensemble()
        return {**rates, **phases(before, client.statistics())}


def phases(before: Mapping[str, Any], after: Mapping[str, Any]) -> Rates:
    """The mean time of each phase of each model that was called between these two documents of statistics."""
    old = {entry["name"]: entry["inference_stats"] for entry in before["model_stats"]}
    times = {}
    for entry in after["model_stats"]:
        name, stats = entry["name"], entry["inference_stats"]
        if count := stats["success"]["count"] - old[name]["success"]["count"]:
            for phase in PHASES:
                times[f"{name}, {phase}, ms"] = (stats[phase]["ns"] - old[name][phase]["ns"]) / count / 1e6
    return times


def paddle(work: Path, effort: Effort) -> Rates:
    """A network that PaddlePaddle has written, and what its converter has made of it."""
    _written("paddle", work / "model", 32 if effort.small else 256)
    inputs, root = {foreign.IDS: ("INT64", [texts.LENGTH])}, work / "paddle"
    for name, backend, parameter, suffixes in (
        ("paddle", "paddle", "cpu_threads", (".json", ".pdiparams")),
        ("onnx", "onnxruntime", "intra_op_thread_count", (".onnx",)),
    ):
        outputs = {foreign.SCORES: ("FP32", [len(texts.LABELS)])}
        model = Model(backend, inputs, outputs, texts.TEXTS, parameters={parameter: "1"})
        models.write(root, name, model, {f"model{suffix}": work / f"model{suffix}" for suffix in suffixes})
    ids = {foreign.IDS: texts.tokens_loop([text.decode() for (text,) in texts.some_texts()])[0]}
    with Server(root, start_timeout=PATIENCE_S) as server, server.client(timeout=PATIENCE_S) as client:
        scores = {name: client.infer(name, ids)[foreign.SCORES] for name in ("paddle", "onnx")}
        np.testing.assert_allclose(scores["paddle"], scores["onnx"], rtol=1e-3, atol=1e-4)
        parties = {name: partial(_callers, partial(client.infer, name, ids), effort.seconds, 1) for name in scores}
        rates = _medians(effort.rounds, parties)
        used = {entry["name"]: entry["memory_usage"] for entry in client.statistics()["model_stats"]}
        memory = {f"{name}, MiB": sum(part["byte_size"] for part in used[name]) / 2**20 for name in scores}
        return {**rates, **memory}


def service(work: Path, effort: Effort) -> Rates:
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
        return _medians(effort.rounds, parties)


EXPERIMENTS = {
    "inception": Experiment(inception, INCEPTION, "tensorflow"),
    "densenet": Experiment(densenet, DENSENET),
    "pipeline": Experiment(pipeline, PIPELINE),
    "paddle": Experiment(paddle, PADDLE, "paddle"),
    "service": Experiment(service, SERVICE),
}


# ------------------------------------------------------------------------------------------------- measuring


def _written(kind: str, path: Path, size: int) -> Path:
    """Another process writes the model: its engine would keep memory and threads in this one."""
    command = [sys.executable, "-m", "bench.published.foreign", kind, str(path), str(size)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return path


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
