"""The Ray Serve application on three nodes: all access paths, and the loss of a node under load."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ray.cluster import kill_server, processes_of
from tests.ray.load import WAYS, Load, over_handle
from tests.support.gateway.rpc import Rpcs, infer_request, message, outputs, refused, talk
from tests.support.load import Failed

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("ray")]
LOST = "must specify the START flag|do not retry it|failed while processing this request"


@pytest.fixture(scope="module")
def served(place: Any, repository: Path) -> Iterator[Any]:
    from ray import serve

    from shmserve.ray import app

    serve.run(app({"models": str(repository), "replicas": 3, "cpus": 0.1}))
    yield place
    serve.delete("default")


def http(place: Any, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes, dict[str, str]]:
    request = urllib.request.Request(f"http://127.0.0.1:{place.http}{path}", body, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), dict(error.headers)


def test_errors_of_the_server_are_passed_on(served: Any) -> None:
    with over_handle(served) as send, pytest.raises(Failed, match=r"handle NOT_FOUND: .*'nope'"):
        send("nope", 1.0)
    status, body, _ = http(served, "POST", "/v2/models/nope/infer", b'{"inputs": []}')
    assert (status, "nope" in json.loads(body)["error"]) == (404, True)
    with Rpcs(served.grpc) as rpcs:
        code, text = refused(rpcs.ModelInfer, infer_request("nope", {}))
    assert (code, "nope" in text) == ("NOT_FOUND", True)


def test_health_and_metadata_over_http(served: Any) -> None:
    assert http(served, "GET", "/v2/health/ready")[0] == 200
    status, body, fields = http(served, "GET", "/v2/models/twice")
    assert (status, json.loads(body)["name"], fields["content-type"]) == (200, "twice", "application/json")
    assert http(served, "GET", "/v2/nothing")[0] == 404
    assert http(served, "GET", "/v2/models/twice/infer")[0] == 405


def test_operations_on_a_single_server_are_refused(served: Any) -> None:
    for method, path in (
        ("POST", "/v2/repository/models/twice/load"),
        ("POST", "/v2/repository/models/twice/unload"),
        ("POST", "/v2/systemsharedmemory/region/r/register"),
        ("GET", "/v2/systemsharedmemory/status"),
        ("POST", "/v2/logging"),
        ("POST", "/v2/trace/setting"),
    ):
        status, body, _ = http(served, method, path, b"{}" if method == "POST" else None)
        assert (status, json.loads(body)) == (403, {"error": "send this to a server, not to the application"}), path
    with Rpcs(served.grpc) as rpcs:
        for call, request in (
            (rpcs.RepositoryModelLoad, message("RepositoryModelLoadRequest", model_name="twice")),
            (rpcs.LogSettings, message("LogSettingsRequest")),
        ):
            assert refused(call, request)[0] == "PERMISSION_DENIED"


@pytest.mark.parametrize("way", WAYS)
def test_a_sequence_stays_on_its_replica(way: str, served: Any) -> None:
    with WAYS[way](served) as send:
        pids = set()
        for number in range(1, 13):
            sums = [send("sums", value, number, value == 1.0, value == 3.0) for value in (1.0, 2.0, 3.0)]
            assert [total for total, _ in sums] == [1.0, 3.0, 6.0]
            assert len({pid for _, pid in sums}) == 1
            pids.add(sums[0][1])
    assert len(pids) > 1, "twelve sequences are on more than one replica"


def test_a_handle_accepts_arrays_and_object_references(served: Any) -> None:
    """Arrays in the request, in the object store, and from a program with an event loop."""
    import ray

    from shmserve.ray import Handle

    handle = Handle(timeout=60.0)
    x = np.arange(8, dtype=np.float32).reshape(8, 1)
    answers = [handle.infer("twice", {"x": x}), handle.infer("twice", {"x": ray.put(x)})]
    answers.append(asyncio.run(handle.infer_async("twice", {"x": x})))
    for answer in answers:
        np.testing.assert_array_equal(answer["y"][:, 0], x[:, 0] * 2)


def test_a_stream_of_grpc(served: Any) -> None:
    with Rpcs(served.grpc) as rpcs, talk(rpcs) as stream:
        for value in (1.0, 2.0, 3.0):
            x = np.array([[value]], np.float32)
            stream.say(infer_request("twice", {"x": ("FP32", x, x.tobytes())}))
            (answer,) = stream.hear(1)
            assert not answer.error_message
            assert np.frombuffer(outputs(answer.infer_response)["y"], np.float32)[0] == 2 * value


def test_an_oversized_body_is_refused_before_it_is_read(served: Any) -> None:
    with contextlib.closing(HTTPConnection("127.0.0.1", served.http, timeout=60)) as connection:
        connection.putrequest("POST", "/v2/models/twice/infer")
        connection.putheader("Content-Length", str((64 << 20) + 1))
        connection.endheaders()
        answer = connection.getresponse()
        assert (answer.status, "max_input_bytes" in json.loads(answer.read())["error"]) == (413, True)


def test_a_server_killed_under_load_fails_no_request(served: Any) -> None:
    """Every transport reaches every node, before and after."""
    with Load(served) as load:
        before = load.until_served_by(3)
        assert len(before) == 3
        model = min(before)
        kill_server(model)
        assert len(load.until_served_by(3, frozenset({model})) - before) == 1
    assert not load.failed


def test_a_node_killed_under_load_fails_only_its_sequences(served: Any) -> None:
    """Only requests of sequences fail, and a new node replaces the lost one."""
    with Load(served) as load, contextlib.ExitStack() as stack:
        before = load.until_served_by(3)
        victim = served.worker_node()
        lost = processes_of(victim)
        assert len(lost & before) == 1
        open_sequences = [(way, stack.enter_context(WAYS[way](served))) for way in WAYS for _ in range(4)]
        at = {number: send("sums", 1.0, number + 100, True)[1] for number, (_, send) in enumerate(open_sequences)}
        served.kill(victim)
        try:
            load.until_more(300)
            for number, (_, send) in enumerate(open_sequences):
                if at[number] in lost:
                    with pytest.raises(Failed, match=LOST):
                        send("sums", 2.0, number + 100, False, True)
                else:
                    assert send("sums", 2.0, number + 100, False, True) == (3.0, at[number])
        finally:
            served.add_node()  # also for the tests that follow
        after = load.until_served_by(3, frozenset(lost))
        assert len(after - before) == 1, "the new node serves"
    assert not load.failed
