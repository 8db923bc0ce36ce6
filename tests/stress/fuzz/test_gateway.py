"""Sends random bytes, slightly invalid requests, and requests that the OpenAPI document allows to a running gateway. It
must keep running, send only documented responses, and reveal no internals.

A hundred requests here; `make stress` sends more, as SHMSERVE_FUZZ says.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from bench.hostile.client import SECRETS
from shmserve.testing import Server
from tests.support.gateway.running_gateway import Gateway, model
from tests.support.model_files import write_model

pytestmark = pytest.mark.process

EXAMPLES = max(100, int(os.environ.get("SHMSERVE_FUZZ", "50000")) // 200)
ALSO = (501, 505)
"""Statuses above 500 that are intended."""
patient = settings(
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


TALK = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            given = pb_utils.get_input_tensor_by_name(request, "sampling_parameters")
            count = 1 if given is None else json.loads(given.as_numpy()[0]).get("n", 1)
            text = np.array([b"a"] * count, object)
            for _ in range(2):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
TALK_CONFIG = """
backend: "python" max_batch_size: 0 model_transaction_policy { decoupled: true }
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
input [ { name: "messages" data_type: TYPE_STRING dims: [ 1 ] optional: true } ]
input [ { name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] optional: true } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]
"""
VECTOR = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        vector = np.ones((1, 2), np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("vector", vector)]) for _ in requests]
"""
OPTIONS = ("--http-max-input-size=1000000", "--limit=http_held_bytes=2000000", "--allow-metrics=false")
VECTOR_CONFIG = """
backend: "python" max_batch_size: 8
input [ { name: "text" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "vector" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    repository = tmp_path_factory.mktemp("models")
    model(repository, "row", ["FP32"], "[ -1 ]", 8)
    model(repository, "word", ["BYTES"], "[ 1 ]", 8)
    write_model(repository, "talk", TALK_CONFIG, TALK)
    write_model(repository, "vector", VECTOR_CONFIG, VECTOR)
    with Server(repository) as server:
        made = Gateway(server, *OPTIONS)
        yield made
        assert made.ask("GET", "/v2/health/ready") == (200, b"")
        log = made.stop().decode()
    assert "Traceback" not in log
    assert "ERROR" not in log


def check(status: int, body: bytes, kind: str | None) -> None:
    assert 200 <= status < 500 or status in ALSO, body
    if status != 200:
        assert kind == "application/json"
        text = json.loads(body)["error"] if body else ""
        if isinstance(text, dict):  # of the OpenAI-compatible endpoints, and Anthropic's
            assert sorted(text) in (["code", "message", "param", "type"], ["message", "type"])
            text = text["message"]
        assert not SECRETS.search(text), text


BODY = b'{"inputs":[{"name":"i_FP32","datatype":"FP32","shape":[1,2],"data":[1,2]}]}'
WHOLE = b"POST /v2/models/row/infer HTTP/1.1\r\nHost: x\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
CHUNKED = (
    b"POST /v2/models/row/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nAccept-Encoding: gzip\r\n\r\n"
    b"%x\r\n%b\r\n0\r\n\r\n"
) % (len(BODY), BODY)
TENSORS = b'{"inputs":[{"name":"i_FP32","datatype":"FP32","shape":[1,2],"parameters":{"binary_data_size":8}}]}'
BINARY = (
    b"POST /v2/models/row/infer HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: %d\r\nContent-Length: %d\r\n"
    b"Expect: 100-continue\r\n\r\n%b12345678"
) % (len(TENSORS), len(TENSORS) + 8, TENSORS)
WORDS = [b"\r\n", b"\0", b"\xff", b" ", b":", b"{", b'"', b"9" * 20, b"-1", b"0", b"chunked", b"gzip", b"HTTP/1.0",
         b"/../", b"%00", b"a" * 40_000, b"[" * 2000, b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n",
         b"Content-Encoding: gzip\r\n", b"Inference-Header-Content-Length: 0\r\n", b"1e999",
         b"\xed\xa0\x80"]  # fmt: skip


@st.composite
def spoiled(draw: DrawFn) -> bytes:
    """One or more requests with parts removed, duplicated or inserted."""
    data = b"".join(draw(st.lists(st.sampled_from([WHOLE, CHUNKED, BINARY]), min_size=1, max_size=3)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        until = min(len(data), at + draw(st.integers(0, 30)))
        piece = draw(st.sampled_from(WORDS) | st.binary(max_size=6) | st.just(data[at:until] * 2))
        data = data[:at] + piece + data[until:]
    return data


@patient
@given(spoiled() | st.binary(max_size=200))
def test_arbitrary_bytes_get_a_valid_response_or_none(gateway: Gateway, data: bytes) -> None:
    with gateway.socket() as made:
        with contextlib.suppress(ConnectionError):  # the gateway may close the connection before it has read everything
            made.sendall(data)
            made.shutdown(socket.SHUT_WR)
        said = b""
        with contextlib.suppress(ConnectionError):
            while part := made.recv(1 << 16):
                said += part
    assert not said or said.startswith(b"HTTP/1.1 ")
    for found in re.finditer(rb"^HTTP/1\.1 (\d+) ", said, re.MULTILINE):
        status = int(found[1])
        assert status < 500 or status in ALSO, said
    assert not SECRETS.search(said.decode("latin-1"))


ANY: SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)
NAMES = [
    *("row", "word", "talk", "vector", "i_FP32", "o_FP32", "i_BYTES", "o_BYTES"),
    *("", "..", "a/b", "\u2028", "%", "none", "n" * 200),
]
KINDS: dict[str, Callable[[], SearchStrategy[Any]]] = {
    "string": lambda: st.sampled_from(NAMES) | st.text(max_size=20),
    "boolean": st.booleans,
    "number": st.floats,
}


class Maker:
    """Generates values that fit the schemas of the document, and now and then anything else."""

    def __init__(self, document: Any) -> None:
        self._schemas = document["components"]["schemas"]

    def value(self, draw: DrawFn, schema: Any) -> Any:
        if draw(st.integers(0, 39)) == 0:
            return draw(ANY)
        if "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        if "enum" in schema:
            return draw(st.sampled_from(schema["enum"]))
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = draw(st.sampled_from(kind))
        if kind == "object":
            return self._object(draw, schema)
        if kind == "array":
            items = schema.get("items", {"type": ["number", "integer", "string"]})
            return [self.value(draw, items) for _ in range(draw(st.integers(0, min(3, schema.get("maxItems", 3)))))]
        if kind == "integer":
            return draw(st.integers(0, 4) | st.integers(schema.get("minimum"), schema.get("maximum")))
        return draw(KINDS[kind]() if kind in KINDS else ANY)

    def _object(self, draw: DrawFn, schema: Any) -> Any:
        required = schema.get("required", ())
        found = {
            name: self.value(draw, inner)
            for name, inner in schema.get("properties", {}).items()
            if name in required or draw(st.booleans())
        }
        more = schema.get("additionalProperties")
        if isinstance(more, dict) and draw(st.booleans()):
            found[draw(st.sampled_from(NAMES) | st.text(max_size=10))] = self.value(draw, more)
        return found


@pytest.fixture(scope="module")
def document(gateway: Gateway) -> Any:
    return json.loads(gateway.ask("GET", "/v2/openapi.json")[1])


SEQUENCE = {"sequence_id": 1, "sequence_start": True, "sequence_end": True}
RIGHT: list[tuple[str, Any]] = [
    ("/v2/models/row/infer", json.loads(BODY) | {"id": "1", "parameters": {"priority": 1, "timeout": 0, "a": "b"}}),
    ("/v2/models/row/infer", json.loads(TENSORS) | {"parameters": SEQUENCE}),
    ("/v2/models/word/infer", {
        "inputs": [{"name": "i_BYTES", "datatype": "BYTES", "shape": [2, 1], "data": [["a"], ["\u00e9"]]}],
        "outputs": [{"name": "o_BYTES", "parameters": {"binary_data": True}}],
    }),
    ("/v2/models/row/infer", json.loads(BODY) | {"outputs": [{"name": "o_FP32", "parameters": {"classification": 2}}]}),
    ("/v2/models/row/generate", {"i_FP32": [1, 2.5], "id": "7", "parameters": {"a": 1}}),
    ("/v2/models/word/generate_stream", {"i_BYTES": "hello", "sequence_id": 0}),
    ("/v1/completions", {"model": "talk", "prompt": ["a", "b"], "n": 2, "stop": ["c"], "echo": True, "stream": True,
                         "stream_options": {"include_usage": True}, "logit_bias": {"5": 1.5}}),
    ("/v1/chat/completions", {
        "model": "talk", "messages": [{"role": "user", "content": [{"type": "text", "text": "\u00e9"}]}],
        "temperature": 0.5, "max_completion_tokens": 5, "response_format": {"type": "text"},
    }),
    ("/v1/embeddings", {"model": "vector", "input": ["a", "b"], "encoding_format": "base64", "dimensions": 1}),
]  # fmt: skip


def spoil(draw: DrawFn, node: Any) -> Any:
    """The same value with one change."""
    if not isinstance(node, dict | list) or not node or draw(st.integers(0, 3)) == 0:
        return draw(st.one_of(ANY, st.sampled_from(NAMES), st.just([node, node]), st.just({"a": node})))
    if isinstance(node, dict):
        key = draw(st.sampled_from(sorted(node)))
        changed = {name: value for name, value in node.items() if name != key}
        if draw(st.integers(0, 4)):
            changed[key if draw(st.integers(0, 9)) else draw(st.sampled_from(NAMES))] = spoil(draw, node[key])
        return changed
    at = draw(st.integers(0, len(node) - 1))
    return [*node[:at], spoil(draw, node[at]), *node[at + 1 :]]


Request = tuple[str, str, bytes | None, dict[str, str]]


def with_binary(draw: DrawFn, body: bytes) -> tuple[bytes, dict[str, str]]:
    length = draw(st.sampled_from([len(body), len(body), len(body), 0, 5, len(body) + 9]))
    return body + draw(st.just(bytes(8)) | st.binary(max_size=12)), {"Inference-Header-Content-Length": str(length)}


@st.composite
def mutated_request(draw: DrawFn) -> Request:
    path, body = draw(st.sampled_from(RIGHT))
    for _ in range(draw(st.integers(0, 2))):
        body = spoil(draw, body)
    text, headers = json.dumps(body).encode(), dict[str, str]()
    if b"binary_data_size" in text:
        text, headers = with_binary(draw, text)
    if draw(st.integers(0, 9)) == 0:
        headers["Accept-Encoding"] = "gzip"
    return "POST", path, text, headers


@st.composite
def allowed(draw: DrawFn, document: Any) -> Request:
    """One of the operations of the document."""
    paths = document["paths"]
    template = draw(st.sampled_from(list(paths)))
    method = draw(st.sampled_from([*list(paths[template]) * 4, "get", "post", "put"]))
    operation = paths[template].get(method, {})
    models = st.sampled_from(["row", "word"] * 5 + NAMES) | st.text(max_size=8)

    def named(_: Any) -> str:
        return quote(draw(models).encode(errors="replace"), safe="")

    path = re.sub(r"{model}|{region}|{repository}", named, template)
    path = path.replace("{version}", draw(st.sampled_from(["1"] * 6 + ["2", "0", "x", "9" * 30])))
    bodies = operation.get("requestBody", {}).get("content", {})
    if "application/json" not in bodies:
        return method.upper(), path, None, {}
    schema = bodies["application/json"]["schema"]
    body, headers = json.dumps(Maker(document).value(draw, schema)).encode(), dict[str, str]()
    if draw(st.integers(0, 3)) == 0:
        body, headers = with_binary(draw, body)
    return method.upper(), path, body, headers


def test_valid_and_mutated_requests(gateway: Gateway, document: Any) -> None:
    answered: Counter[int] = Counter()
    with contextlib.closing(gateway.connection()) as made:

        @patient
        @given(mutated_request() | allowed(document))
        def send(request: Request) -> None:
            method, path, body, headers = request
            made.request(method, path, body, headers)
            answer = made.getresponse()
            check(answer.status, answer.read(), answer.headers["Content-Type"])
            answered[answer.status] += 1

        send()
    assert answered[200] > EXAMPLES / 20, answered
