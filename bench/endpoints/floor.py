"""The relay of `bench.peers` as a third server of `bench.endpoints`: the floor of what it compares."""

from __future__ import annotations

import json
import sys
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from bench.endpoints.servers import ANSWER_S, BATCH, Serving, free_port
from bench.peers.report import RELAY
from bench.peers.running import running
from bench.peers.workloads import APPS


@contextmanager
def relay(model: str, elements: int, onnx: Path, server: Serving, work: Path) -> Iterator[Serving]:
    """The relay for one model. Calls that are not inference get the answers of `server`."""
    place = work / f"relay-{model}"
    place.mkdir()
    answers = place / "answers.json"
    answers.write_text(json.dumps({name: b64encode(data).decode() for name, data in _answers(model, server)}))
    http, rpc = free_port(), free_port()
    environment = {
        "PEER_WORKLOAD": model,
        "PEER_BATCH": str(1 if model == "first" else BATCH),
        "PEER_ELEMENTS": str(elements),
        "PEER_ONNX": str(onnx),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, str(APPS / "relay_app.py"), str(http), str(rpc), str(answers)]
    with running(RELAY, command, environment, place) as process:
        process.await_success(urllib.request.Request(f"http://127.0.0.1:{http}/v2"))
        yield Serving(RELAY, {"front": process.pid}, f"127.0.0.1:{http}", f"127.0.0.1:{rpc}")


def _answers(model: str, server: Serving) -> Iterator[tuple[str, bytes]]:
    """What perf_analyzer asks before it measures. It asks for statistics only if the server says that it has some."""
    without_statistics = {"name": RELAY, "version": "1", "extensions": ["binary_tensor_data"]}
    yield "/v2", json.dumps(without_statistics).encode()
    for path in (f"/v2/models/{model}", f"/v2/models/{model}/config"):
        with urllib.request.urlopen(f"http://{server.http}{path}", timeout=ANSWER_S) as answer:
            yield path, answer.read()
    yield "/inference.GRPCInferenceService/ServerMetadata", b"\n\x05relay\x12\x011"
    with grpc.insecure_channel(server.grpc) as channel:
        for name in ("ModelMetadata", "ModelConfig"):
            method = f"/inference.GRPCInferenceService/{name}"
            request = bytes([10, len(model)]) + model.encode()  # the field `name`
            yield method, channel.unary_unary(method)(request, timeout=ANSWER_S)
