"""A real gateway next to a running server, identity models for it, and the bodies of its HTTP requests."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from shmserve.dtypes import TO_CONFIG
from shmserve.testing import Server
from tests.support.commands import COMMAND
from tests.support.ensemble_models import tensors
from tests.support.model_files import write_model
from tests.support.patience import PATIENCE_S

TALKER = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = int(pb_utils.get_input_tensor_by_name(request, "count").as_numpy().ravel()[0])
            for number in range(0 if count == FAILS_AT_ONCE else abs(count)):
                if request.is_cancelled():
                    break
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("number", np.array([number], np.int32))]))
            if count < 0:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("no more today")))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
FAILS_AT_ONCE = -1000


class Gateway:
    """`http`, `grpc` and `metrics` are its ports."""

    def __init__(self, server: Server, *options: str) -> None:
        reader, writer = os.pipe()
        command = [*COMMAND, "gateway"]
        command += ["--runtime-dir", str(server.runtime_dir)]
        command += ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--ready-fd", str(writer), *options]
        self.process = subprocess.Popen(command, pass_fds=[writer], stderr=subprocess.PIPE)
        os.close(writer)
        with open(reader) as ready:
            words = ready.readline().split()
        assert words[:1] == ["READY"], self.process.communicate()
        ports = dict(word.split("=") for word in words[1:])
        self.http, self.grpc, self.metrics = (int(ports.get(name, 0)) for name in ("http", "grpc", "metrics"))

    def connection(self, port: int = 0) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", port or self.http, timeout=PATIENCE_S)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
        with contextlib.closing(self.connection()) as made:
            text = json.dumps(body) if isinstance(body, dict) else body
            made.request(method, path, text, {name.replace("_", "-"): value for name, value in headers.items()})
            answer = made.getresponse()
            return answer.status, answer.read()

    def socket(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.http), 30)

    def stop(self) -> bytes:
        self.process.send_signal(signal.SIGTERM)
        _, log = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == 0, log
        return log


def model(repository: Path, name: str, dtypes: list[str], dims: str, batch: int, more: str = "") -> None:
    kinds = [(dtype, f"{TO_CONFIG[dtype].removeprefix('TYPE_')}:{dims}") for dtype in dtypes]
    inputs, outputs = (tensors(*[f"{letter}_{dtype}:{kind}" for dtype, kind in kinds]) for letter in "io")
    config = f'name: "{name}" backend: "identity" max_batch_size: {batch} input {inputs} output {outputs} {more}'
    write_model(repository, name, config)


GATED = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        with open(GATE) as gate:
            gate.read()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("o_FP32", request.inputs()[0].as_numpy())])]
"""


def gated(repository: Path) -> Path:
    """A model that runs one request at a time, each when its gate, a named pipe, is written to."""
    gate = repository.with_name(f"{repository.name}-gate")
    os.mkfifo(gate)
    model(repository, "gated", ["FP32"], "[ -1 ]", 1)
    config = repository / "gated" / "config.pbtxt"
    config.write_text(config.read_text().replace("identity", "python"))
    (repository / "gated" / "1" / "model.py").write_text(GATED.replace("GATE", repr(str(gate))))
    return gate


def open_gate(gate: Path) -> None:
    """Releases one request, once the model has it."""
    gate.open("w").close()


def talker(repository: Path) -> None:
    """A decoupled model that sends the numbers below `count`, and an error at the end if it is negative."""
    config = f"input {tensors('count:INT32:[1]')} output {tensors('number:INT32:[1]')}"
    config += ' backend: "python" model_transaction_policy { decoupled: true }'
    write_model(repository, "talker", config, TALKER.replace("FAILS_AT_ONCE", str(FAILS_AT_ONCE)))


def binary(inputs: dict[str, tuple[str, np.ndarray[Any, Any], bytes]], **more: Any) -> tuple[bytes, dict[str, str]]:
    """A body of the binary data extension: JSON followed by the tensors."""
    document = {
        "inputs": [
            {"name": name, "datatype": dtype, "shape": array.shape, "parameters": {"binary_data_size": len(raw)}}
            for name, (dtype, array, raw) in inputs.items()
        ],
        "parameters": {"binary_data_output": True},
    }
    text = json.dumps(document | more).encode()
    body = text + b"".join(raw for _, _, raw in inputs.values())
    return body, {"Inference-Header-Content-Length": str(len(text))}


def outputs(answer: http.client.HTTPResponse) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The JSON of an answer, and the bytes of its outputs."""
    body = answer.read()
    assert answer.status == 200, body
    length = int(answer.headers["Inference-Header-Content-Length"])
    document, at, found = json.loads(body[:length]), length, {}
    for output in document["outputs"]:
        size = output["parameters"]["binary_data_size"]
        found[output["name"]] = body[at : at + size]
        at += size
    assert at == len(body)
    return document, found


def rows(width: int, value: float = 0.0) -> dict[str, tuple[str, np.ndarray[Any, Any], bytes]]:
    array = np.arange(width, dtype=np.float32).reshape(1, width) + np.float32(value)
    return {"i_FP32": ("FP32", array, array.tobytes())}


def metric(server: Server, name: str, **labels: str) -> float:
    with server.client() as client:
        families = text_string_to_metric_families(client.metrics())
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def wait_in_flight(server: Server, least: int, most: int) -> None:
    while not least <= metric(server, "shmserve_requests_in_flight") <= most:
        continue
