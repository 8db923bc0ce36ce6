"""The fuzz targets: functions of bytes, and the initial inputs of each.

Invariant: a target returns for any bytes. It catches only the errors that its caller expects (such as ServeError and
ConfigError); any other exception is a finding.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import msgspec

from bench.hostile.packets import PacketGenerator
from shmserve.errors import InvalidRequest, ProtocolError, ServeError
from shmserve.gateway.auth.access import EndpointAccess
from shmserve.gateway.http import bodies, heads
from shmserve.gateway.kserve import generate
from shmserve.gateway.kserve import plans as kserve
from shmserve.gateway.kserve.plans import RequestOptions
from shmserve.gateway.openai import bodies as openai_bodies
from shmserve.gateway.openai import inputs, models, renderer, scores, templates, tokens
from shmserve.gateway.upstream import documents
from shmserve.protocol import codec as wire
from shmserve.protocol import messages, worker_messages
from shmserve.protocol.roles import ROLES
from shmserve.repo import load, samples
from shmserve.repo.config import override
from shmserve.repo.config.problems import ConfigError
from tests.stress.fuzz import lane, lease
from tests.support.gateway.sliced_work import finished
from tests.support.repo import texts

Target = Callable[[bytes], None]

_UNIONS: tuple[Any, ...] = (
    messages.ClientMessage,
    messages.BrokerMessage,
    worker_messages.WorkerOrder,
    worker_messages.WorkerReport,
)
_CODECS = [(wire.Codec(union), (*get_args(union), wire.Refused)) for union in _UNIONS]
LONGEST_BODY = 100_000
_EVERYBODY = EndpointAccess(ROLES)
_MODEL = {
    "max_batch_size": 8,
    "input": [
        {"name": "x", "data_type": "TYPE_FP32", "dims": ["-1"]},
        {"name": "s", "data_type": "TYPE_STRING", "dims": ["1"]},
    ],
}
_LANGUAGE_MODEL = {
    "input": [
        {"name": name, "data_type": "TYPE_STRING", "dims": ["1"]}
        for name in ("text_input", "messages", "sampling_parameters")
    ]
    + [{"name": "prompt_token_ids", "data_type": "TYPE_INT32", "dims": ["-1"]}],
    "output": [{"name": "text_output", "data_type": "TYPE_STRING", "dims": ["-1"]}],
}
_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls | tojson }}{% endfor %}{{ tools }}"
BACKENDS = ("identity", "python", "onnxruntime")


def decode(data: bytes) -> None:
    """The first byte selects the direction of the messages in the rest."""
    codec, kinds = _CODECS[data[0] % len(_CODECS) if data else 0]
    try:
        found = codec.decode(data[1:])
    except ProtocolError:
        return
    for message in found:
        assert isinstance(message, kinds)
    again = [message for message in found if not isinstance(message, wire.Refused)]
    assert [repr(message) for message in codec.decode(wire.encode(again))] == [repr(message) for message in again]


def config(data: bytes) -> None:
    try:
        found = load.examine(data, "config.pbtxt", load.ModelContext("m", BACKENDS, ("model.onnx",))).require()
    except ConfigError:
        return
    assert found.name == "m"


def config_override(data: bytes) -> None:
    try:
        given = override.parse_override(data)
    except ConfigError:
        return
    load.examine(given.message, override.OVERRIDE, load.ModelContext("m", BACKENDS))


def http(data: bytes) -> None:
    """An HTTP request without a gateway: its head, its body in chunks and compressed, and its parsed content."""
    block, _, body = data.partition(b"\r\n\r\n")
    try:
        head = heads.parse(block + b"\r\n\r\n", access=_EVERYBODY)
    except heads.BadHead:
        return
    with suppress(ServeError):
        if head.chunked:
            chunks = bodies.Chunks(LONGEST_BODY)
            chunks.feed(body, len(body))
            body = bytes(chunks.body)
        if head.encoding:
            body = bytes(finished(bodies.inflate_body(head.encoding, body, LONGEST_BODY, "", lambda size: None)))
        match head.route.action:
            case "infer":
                kserve.plan_of(body[: head.json_length])
                finished(kserve.plan_in_slices(body[: head.json_length], LONGEST_BODY))
            case "generate" | "generate_stream":
                finished(generate.GenerateRequest(body).plan(_MODEL, lambda size: None))
            case "completions" | "chat_completions" | "embeddings" | "rerank" | "score" | "tokenize" | "detokenize":
                _openai(head.route.action, body)
            case _:
                documents.arguments_of(head.route, body)


def _openai(action: str, body: bytes) -> None:
    """Parses a request to JSON and tensors, and renders its chat with a template."""
    model = models.language_model("m", _LANGUAGE_MODEL)
    if action == "completions":
        completion = openai_bodies.completion(body)
        for _ in inputs.Prompts(model, completion).tensors():
            pass
        sampling = inputs.sampling_of(model, completion, completion.logprobs)
        inputs.SamplingInputs(model, sampling, openai_bodies.request_options("1", completion), 1).tensors(0)
    elif action == "chat_completions":
        chat = openai_bodies.chat(body)
        inputs.chat_tensors(model, chat)
        inputs.SamplingInputs(model, inputs.sampling_of(model, chat, None), RequestOptions("1"), 2).options(1)
        values = templates.template_values(
            chat.messages, chat.tools, inputs.template_arguments(model, chat), model.parameters
        )
        with suppress(InvalidRequest):
            renderer.render(_TEMPLATE, msgspec.json.decode(msgspec.json.encode(values)))
    elif action == "rerank":
        scores.rerank_request(body).pairs()
    elif action == "score":
        scores.score_request(body).pairs()
    elif action == "tokenize":
        tokens.tokenize_request(body)
    elif action == "detokenize":
        tokens.detokenize_request(body)
    else:
        request = openai_bodies.embedding(body)
        openai_bodies.texts_or_tokens("input", request.input, openai_bodies.TEXTS)


TARGETS: dict[str, Target] = {
    "decode": decode,
    "config": config,
    "override": config_override,
    "lane": lane.run,
    "lease": lease.run,
    "http": http,
}


def _packets() -> Iterator[bytes]:
    mischief = PacketGenerator(1, "m")
    for number in range(200):
        packet = mischief.packet()
        if len(packet) < 1000:
            yield bytes([number % len(_CODECS)]) + packet
    columns = messages.Columns((messages.TensorForm("x", "FP32", (1,)),), (1, 2), (1, 1), ((b"1234",), (b"5678",)))
    tensor = messages.Tensor("x", "FP32", (1,), (messages.Handle(1, 0, 4),))
    failure = messages.Failure("INTERNAL", "text")
    work = worker_messages.Work(1, 1, (tensor,), None, "uid:1")
    batch = worker_messages.Execute(2, 0, (), False, True, columns, ("uid:1", "uid:1"))
    lend = worker_messages.Lend(1, "m", 1, True, columns.forms, 8, 1)
    rows = (worker_messages.Row(1, (), failure),)
    yield b"\x00" + wire.encode([messages.Hello(1, 1, "a", "memfd", True), messages.InferBatch("m", 0, columns, 5)])
    yield b"\x01" + wire.encode([messages.Reply(1, 1, (tensor,), {"a": 1.5}), messages.LeaseEnd(1, failure)])
    yield b"\x01" + wire.encode([messages.ReplyBatch(1, columns), messages.FailBatch((3, 4), "INVALID_ARG", "text")])
    yield b"\x02" + wire.encode([worker_messages.Load(5, "m", 1, "m_0", "1", {"a": "b"}), lend])
    yield b"\x02" + wire.encode([worker_messages.Execute(1, 0, (work,)), batch])
    yield b"\x03" + wire.encode([worker_messages.Done(1, (), (1, 2, 3, 4), columns=columns)])
    yield b"\x03" + wire.encode([worker_messages.Done(1, rows, (1, 2, 3, 4)), worker_messages.LeaseOver(1, True)])


def _configs() -> Iterator[bytes]:
    yield from (text.encode() for text in texts.ALL)
    for path in sorted(Path(samples.__file__).parent.glob("examples/*/config.pbtxt")):
        yield path.read_bytes()


def _overrides() -> Iterator[bytes]:
    whole: dict[str, Any] = {
        "name": "m",
        "backend": "python",
        "maxBatchSize": "8",
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": ["-1", 3]}],
        "output": [{"name": "y", "dataType": "type_string", "dims": [1]}],
        "instance_group": [{"count": 2, "kind": "KIND_CPU"}],
        "dynamicBatching": {"preferredBatchSize": [4], "priorityQueuePolicy": {"1": {"maxQueueSize": 3}}},
        "parameters": {"a": {"string_value": "b"}},
        "version_policy": {"latest": {"num_versions": 1}},
        "optimization": {"priority": "PRIORITY_MAX", "input_pinned_memory": {"enable": True}},
    }
    yield json.dumps(whole).encode()
    for key, value in whole.items():
        yield json.dumps({key: value}).encode()


def _courses() -> Iterator[bytes]:
    roll = random.Random(4)
    for size in (4, 16, 64, 256):
        for _ in range(20):
            yield roll.randbytes(size)


def _requests() -> Iterator[bytes]:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2.5]}
    output = {"name": "y", "parameters": {"classification": 2, "shared_memory_region": "r"}}
    infer = json.dumps({"inputs": [tensor], "outputs": [output], "id": "1", "parameters": {"sequence_id": 1}})
    load = json.dumps({"parameters": {"config": "{}", "file:1/model.onnx": "eA=="}})
    told = {
        "v2/models/m/infer": infer,
        "v2/models/m/versions/1/generate_stream": json.dumps({"x": [1, 2], "s": "a", "parameters": {"priority": 1}}),
        "v2/repository/models/m/load": load,
        "v2/repository/index": '{"ready": true}',
        "v2/systemsharedmemory/region/r/register": '{"key": "k", "offset": 0, "byte_size": 4}',
        "v1/completions": json.dumps({"model": "m", "prompt": ["a", "b"], "n": 2, "stop": "c", "logprobs": 1}),
        "v1/chat/completions": json.dumps(
            {
                "model": "m",
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "a"}]},
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
                ],
                "tools": [{}],
                "response_format": {"type": "json_object"},
            }
        ),
        "v1/rerank": json.dumps({"model": "m", "query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}),
        "v1/score": json.dumps({"model": "m", "text_1": "a", "text_2": ["b", "c"]}),
        "tokenize": json.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}]}),
        "detokenize": json.dumps({"model": "m", "tokens": [1, 2]}),
        "v1/embeddings": json.dumps({"model": "m", "input": [[1, 2]], "encoding_format": "base64"}),
        "v2/models/m/trace/setting": '{"trace_rate": "1", "trace_level": ["TIMESTAMPS"]}',
    }
    for path, text in told.items():
        body = text.encode()
        first = f"POST /{path} HTTP/1.1\r\nHost: x\r\n".encode()
        yield first + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        yield first + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        packed = gzip.compress(body)
        yield first + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%b" % (len(packed), packed)


BEGINNINGS: dict[str, Callable[[], Iterator[bytes]]] = {
    "decode": _packets,
    "config": _configs,
    "override": _overrides,
    "lane": _courses,
    "lease": lease.beginnings,
    "http": _requests,
}
