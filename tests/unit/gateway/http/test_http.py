"""The parts of the HTTP endpoint: heads, chunks, compression, paths and documents.

Request smuggling is in test_connection.py.
"""

from __future__ import annotations

import gzip
import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.errors import InvalidRequest, NotFound, ServeError, Unavailable, Unsupported
from shmserve.gateway.http import bodies
from shmserve.gateway.http.heads import BadHead, parse
from shmserve.gateway.http.routes import METRICS_ROUTES, NoRoute, resolve
from shmserve.gateway.upstream import documents
from shmserve.gateway.upstream.documents import Route
from shmserve.gateway.upstream.regions import Regions
from shmserve.protocol.actions import Action
from tests.support.cases import cases
from tests.support.gateway.http_connection import lines
from tests.support.gateway.sliced_work import finished


def test_all_fields_of_a_head() -> None:
    head = parse(lines("content-LENGTH: 12", "Inference-Header-Content-Length:  5", "Content-Encoding: GZIP",
                       "Accept-Encoding: br;q=1, deflate;q=0.5, gzip", "Expect: 100-continue"))  # fmt: skip
    assert head.route == Route(Action.INFER, "m")
    assert (head.length, head.json_length, head.encoding, head.accepts) == (12, 5, "gzip", "deflate")
    assert (head.expects, head.chunked) == (True, False)
    upgrade, close = lines("Connection: Upgrade", "Upgrade: h2c"), lines("Connection: close")
    old = lines(first="GET /v2 HTTP/1.0")
    assert [parse(block).keep_alive for block in (lines(), upgrade, close, old)] == [True, True, False, False]


@cases(
    (lines("Transfer-Encoding: gzip, chunked"), 501),
    (lines("Inference-Header-Content-Length: -1"), 400),
    (lines("Inference-Header-Content-Length: 1", "Inference-Header-Content-Length: 2"), 400),
    (lines("Expect: tea"), 417),
    (lines(*[f"a{number}: b" for number in range(130)]), 431),
    (lines("a b: c"), 400),
    (lines(first="GET /v2"), 505),
    (lines(first="GET /v2 HTTP/2.0"), 505),
    (lines(first="CONNECT x:1 HTTP/1.1"), 400),
    (lines(first="GET /v2\xff HTTP/1.1"), 400),
    (b"\x16\x03\x01\x02\0\x01\0\r\n\r\n", 400),
)
def test_heads_that_are_refused(block: bytes, status: int) -> None:
    with pytest.raises(BadHead) as caught:
        parse(block)
    assert caught.value.status == status


def test_accept_encoding() -> None:
    for value, encoding in {
        "gzip": "gzip", "gzip;q=0, deflate": "deflate", "gzip; q=0.0": "", "identity, *": "", "br": "",
        "deflate;q=1.0, gzip": "deflate",
    }.items():  # fmt: skip
        assert parse(lines(f"Accept-Encoding: {value}")).accepts == encoding


@cases(
    (b"\r\n", "a valid size"),
    (b"1" * 2000, "exceeds 1024 bytes"),
    (b"1;a=" + b"b" * 1020, None),
    (b"1;a=" + b"b" * 1020 + b"\r\n", None),
    (b"1;a=" + b"b" * 1021 + b"\r\n", "exceeds 1024 bytes"),
    (b"1;a=" + b"b" * 1022, "exceeds 1024 bytes"),
    (b"1\r\nab", "does not match its size"),
    (b"3e9\r\n", "exceeds the maximum allowed value of 1000 bytes"),
    (b"ffffffffffffffff\r\n", "exceeds the maximum allowed value of 1000 bytes"),
    (b"0\r\n" + b"a: " + b"b" * 1000 + b"\r\n", None),
    (b"0\r\n" + (b"a: " + b"b" * 1000 + b"\r\n") * 40, "exceed 32768 bytes"),
)
def test_invalid_and_large_chunks_are_refused(data: bytes, text: str | None) -> None:
    chunks = bodies.Chunks(1000)
    if text is None:
        chunks.feed(data, 100)
        assert not chunks.done
        return
    with pytest.raises(InvalidRequest, match=text):
        chunks.feed(data, 100)


def test_the_number_of_chunks_is_limited() -> None:
    chunks = bodies.Chunks(1 << 20)
    assert chunks.feed(b"1\r\na\r\n" * 65_536 + b"0\r\n\r\n", 65_538) == b""
    assert chunks.done
    assert len(chunks.body) == 65_536
    with pytest.raises(InvalidRequest, match="Chunked request body exceeds maximum of 65536 non-empty chunks"):
        bodies.Chunks(1 << 20).feed(b"1\r\na\r\n" * 65_537, 65_537)


def inflated(encoding: str, body: bytes, limit: int) -> bytearray:
    return finished(bodies.inflate_body(encoding, body, limit, "--limit", lambda size: None))


@given(st.binary(max_size=300))
def test_compression_roundtrip(data: bytes) -> None:
    assert inflated("gzip", gzip.compress(data), 300) == data
    assert inflated("deflate", zlib.compress(data), 300) == data
    assert gzip.decompress(finished(bodies.deflate_body("gzip", [data, memoryview(data)]))) == data + data
    assert zlib.decompress(finished(bodies.deflate_body("deflate", [data]))) == data


@cases(
    ("br", b"", Unsupported),
    ("gzip", b"no", InvalidRequest),
    ("gzip", gzip.compress(b"x" * 50, mtime=0)[:-1], InvalidRequest),
    ("gzip", gzip.compress(b"x" * 50, mtime=0) * 2, InvalidRequest),
    ("deflate", b"", InvalidRequest),
)
def test_invalid_compression_is_refused(encoding: str, body: bytes, kind: type[ServeError]) -> None:
    with pytest.raises(kind):
        inflated(encoding, body, 1000)


def test_routes() -> None:
    """test_openapi.py resolves every path of the API."""
    for method, path, route in (
        ("GET", "/v2/", Route(Action.METADATA)),
        ("GET", "/v2/health/ready?x=y", Route(Action.READY)),
        ("GET", "/v2/models/stats", Route(Action.STATISTICS)),
        ("GET", "/v2/models/m%2Fn", Route(Action.MODEL_METADATA, "m/n")),
        ("GET", "/v2/models/m/versions/3/config", Route(Action.CONFIG, "m", "3")),
        ("GET", "/v2/models/stats/stats", Route(Action.STATISTICS, "stats")),
        ("GET", "/v1/models/m@prod", Route(Action.OPENAI_MODEL, "m@prod", kind="openai")),
        ("POST", "/v2/repository/r/models/m/load", Route(Action.NAMED_REPOSITORY)),
        ("GET", "/v2/systemsharedmemory/status", Route(Action.MEMORY_STATUS, kind="system")),
        ("GET", "/v2/cudasharedmemory/region/r/status", Route(Action.MEMORY_STATUS, "r", kind="cuda")),
    ):
        assert resolve(method, path) == route
    assert resolve("GET", "/metrics", METRICS_ROUTES) == Route(Action.METRICS)
    assert resolve("GET", "/v2/health/live", METRICS_ROUTES) == NoRoute(404, "Not Found")


@cases(
    (
        405,
        "POST /v2,GET /v2/models/m/infer,HEAD /v2/health/live,DELETE /v2/repository/models/m/load,POST /,"
        "POST /page/model/m,POST /v1/models,GET /v1/chat/completions",
    ),
    (
        404,
        "GET /page/one/two/three,GET /v1,POST /v1/replies,GET /v2/models,GET /v2/models/m/n,"
        "GET /v2/models/m/versions,GET /metrics,POST /v2/systemsharedmemory/other",
    ),
    (
        400,
        "GET /v2/models//ready,GET /v2/models/m/versions/0,GET /v2/models/m/versions/x/ready,"
        "GET /v2/models/m/versions/99999999999999999999,GET /v2/models/%ff",
    ),
)
def test_unknown_paths_and_methods_are_refused(status: int, requests: str) -> None:
    for request in requests.split(","):
        method, path = request.split()
        refusal = resolve(method, path)
        assert isinstance(refusal, NoRoute), request
        assert refusal.status == status, request


def question(name: str, body: bytes = b"", model: str = "") -> documents.BrokerQuery:
    route = Route(Action(name), model, kind="system")
    query = documents.query_of(route, documents.arguments_of(route, body), Regions(False), ("", ""))
    assert isinstance(query, documents.BrokerQuery)
    return query


def body_of(query: documents.BrokerQuery) -> bytes:
    assert query.body is not None
    return query.body.take()


def test_health_of_an_unavailable_server_or_model_is_a_response() -> None:
    live = question("live")
    assert documents.http_answer(live.show({"live": True})) == (200, b"")
    assert documents.http_answer(live.show({"live": False})) == (400, b"")
    assert documents.http_answer(live.failed(Unavailable("gone"))) == (400, b"")
    with pytest.raises(NotFound):
        live.failed(NotFound("?"))
    ready = question("model_ready", model="m")
    assert documents.http_answer(ready.show({"ready": False}))[0] == 400
    assert documents.http_answer(ready.failed(NotFound("x")))[0] == 400
    with pytest.raises(InvalidRequest):
        ready.failed(InvalidRequest("?"))
    assert documents.http_answer(question("unload", model="m").failed(NotFound("x"))) == (200, b"")


def test_the_repository_index() -> None:
    models = [
        {"name": "a", "version": "1", "state": "READY", "reason": "", "pid": 3},
        {"name": "b", "version": "2", "state": "UNAVAILABLE", "reason": "unloaded"},
        {"name": "c", "version": "", "state": "", "reason": ""},
    ]
    first = {"name": "a", "version": "1", "state": "READY", "reason": ""}
    second = {"name": "b", "version": "2", "state": "UNAVAILABLE", "reason": "unloaded"}
    assert question("models").show(models) == [first, second, {"name": "c"}]
    status, text = documents.http_answer(question("models", b'{"ready": true}').show(models))
    assert (status, json.loads(text)) == (200, [first])


def test_bodies_are_forwarded_to_the_broker() -> None:
    query = question("set_trace", b'{"trace_rate": "1", "trace_level": ["TIMESTAMPS"], "log_frequency": null}', "m")
    assert (query.what, query.model) == ("set_trace", "m")
    assert json.loads(body_of(query)) == {"trace_rate": "1", "trace_level": ["TIMESTAMPS"], "log_frequency": None}
    assert question("log").body is None
    forced = question("unload", b'{"parameters": {"force": true}}', "m")
    assert json.loads(body_of(forced)) == {"unload_dependents": False, "wait": False, "force": True}
    parameters = {"config": '{"backend": "python"}', "file:1/model.py": "eA=="}
    load = question("load", json.dumps({"parameters": parameters}).encode(), "m")
    assert body_of(load) == b'{"config": {"backend": "python"}, "files": [["1/model.py", 1]]}\nx'


@cases(
    ("load", b'{"parameters": {"file:a": "eA=="}}', InvalidRequest),
    ("load", b'{"parameters": {"config": "{}", "file:a": "?"}}', InvalidRequest),
    ("load", b'{"parameters": {"other": "x"}}', InvalidRequest),
    ("load", b'{"parameters": {"config": "no JSON"}}', InvalidRequest),
    ("load", b"[" * 5000, InvalidRequest),
    ("unload", b'{"parameters": {"unload_dependents": "yes"}}', InvalidRequest),
    ("models", b"{" + b" " * (1 << 20) + b"}", InvalidRequest),
    ("models", b'{"other": ' + b"[" * 5000, InvalidRequest),
    ("memory_register", b'{"key": "/x", "byte_size": 1}', Unsupported),
    ("memory_register", b" ", InvalidRequest),
    ("named_repository", b"", Unsupported),
    ("set_trace", b"[]", InvalidRequest),
    ("set_log", b'{"log_file": "' + b"x" * 20_000 + b'"}', InvalidRequest),
    ("metrics", b"", Unsupported),
)
def test_invalid_queries_are_refused(action: str, body: bytes, kind: type[ServeError]) -> None:
    with pytest.raises(kind):
        question(action, body, "m")


@pytest.mark.parametrize("value", [b"1", b"null", b'"true"', b"[" * 250_000 + b"true" + b"]" * 250_000])
def test_the_index_parameter_ready_is_a_boolean(value: bytes) -> None:
    with pytest.raises(InvalidRequest, match="Invalid value for 'ready': expected a boolean"):
        question("models", b'{"ready": ' + value + b"}")
