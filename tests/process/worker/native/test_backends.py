"""Backends in C as a caller sees them: what they read, answer, report and break. One server has all models."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest

import shmserve
from shmserve.errors import InvalidRequest, ModelFailed, ServeError
from shmserve.testing import Server
from tests.support.cases import cases
from tests.support.ensemble_models import config_text, ensemble
from tests.support.shared_server import SharedServer
from tests.support.workers.native_backends import compiled, model

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("native")]
HERE = Path(__file__).parent
ECHO = config_text("probe", "IN TEXT:STRING:[-1]:optional:true", "OUT TEXT:STRING", "max_batch_size: 8 ")
NUMBERS = config_text("probe", "IN:FP32:[1]", "OUT:FP32:[1]", "max_batch_size: 8 ")
SUM = """
sequence_batching {
  state { input_name: "SUM_IN" output_name: "SUM_OUT" data_type: TYPE_FP32 dims: [ 1 ]
          initial_state { data_type: TYPE_FP32 dims: [ 1 ] zero_data: true name: "zero" } }
}
"""
SLOTS = """
sequence_batching {
  direct { }
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY fp32_false_true: [ 0, 1 ] } }
}
parameters { key: "do" value { string_value: "always count by place" } }
"""
WARM = """
model_warmup {
  name: "w" batch_size: 1
  inputs { key: "IN" value { data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } }
}
"""
X = np.arange(6, dtype=np.float32).reshape(2, 3)
BIG = np.arange(8000, dtype=np.float32).reshape(1, 8000)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(HERE / "backend.c", tmp_path_factory.mktemp("library") / "libtriton_probe.so")


@pytest.fixture(scope="module")
def server(
    library: Path, shared_server: SharedServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedServer]:
    root = tmp_path_factory.mktemp("models")
    model(root, "echo", library, ECHO + "dynamic_batching { }")
    model(root, "caller", library, ECHO)
    plain = NUMBERS.replace("[1]", "[-1]") + "dynamic_batching { }"
    model(root, "plain", library, plain)
    for what in ("late", "fail"):
        model(root, what, library, f'{plain} parameters {{ key: "do" value {{ string_value: "always {what}" }} }}')
    model(root, "stream", library, NUMBERS + "model_transaction_policy { decoupled: true }")
    model(root, "sum", library, NUMBERS + SUM)
    model(
        root, "shared", library, NUMBERS + SUM.replace("state {", "state { use_same_buffer_for_input_output: true", 1)
    )
    iterated = NUMBERS + SUM.replace("{", "{ iterative_sequence: true", 1)
    model(root, "slots", library, NUMBERS + SLOTS)
    model(root, "iterated", library, iterated)
    model(root, "iterated_stream", library, f"{iterated} model_transaction_policy {{ decoupled: true }}")
    model(root, "warm", library, NUMBERS + WARM)
    model(root, "warm_stream", library, f"{NUMBERS} {WARM} model_transaction_policy {{ decoupled: true }}")
    ensemble(root, "twice", "X", "Y", "echo(IN:X)->(OUT:t)", "echo(IN:t)->(OUT:Y)", more="max_batch_size: 8")
    model(root, "completed", library, 'backend: "probe"')
    with shared_server.serving(root) as running:
        with running.client() as client:
            client.infer("echo", {"IN": BIG})  # maps the memory that the tests use before the leak check starts
        yield running


def do(client: shmserve.Client, what: str, x: Any = X, **more: Any) -> shmserve.Result:
    return client.infer("echo", {"IN": x}, parameters={"do": what}, **more)


def served_again(client: shmserve.Client) -> None:
    np.testing.assert_array_equal(client.infer("echo", {"IN": X})["OUT"], X)


@pytest.mark.parametrize("x", [X, BIG, np.empty((1, 0), np.float32)], ids=["inline", "shared", "empty"])
def test_an_input_of_any_size_is_read_in_place(client: shmserve.Client, x: Any) -> None:
    result = client.infer("echo", {"IN": x}, outputs=["OUT"])
    np.testing.assert_array_equal(result["OUT"], x)
    assert result.parameters["buffers"] == (x.size > 0)


def test_text_and_an_optional_input(client: shmserve.Client) -> None:
    words = np.array([["a", "", "ü" * 3000]], object)
    result = client.infer("echo", {"IN": X[:1], "TEXT": words}, request_id="seven")
    assert [word.decode() for word in result["TEXT"][0]] == list(words[0])
    assert result.parameters["id"] == "seven"
    assert "TEXT" not in client.infer("echo", {"IN": X})


def test_an_output_is_written_where_the_caller_wants_it(client: shmserve.Client) -> None:
    place = client.empty(BIG.shape)
    client.infer("echo", {"IN": BIG}, outputs={"OUT": place})
    np.testing.assert_array_equal(place, BIG)


def test_an_output_that_does_not_fit_is_not_written(client: shmserve.Client) -> None:

    error = client.submit("echo", {"IN": BIG}, outputs={"OUT": client.empty((1, 1000))}).exception()
    assert "has 32000 bytes; the memory given for it has 4000" in str(error)


@pytest.mark.parametrize("width", [5, 9000], ids=["inline", "shared"])
@pytest.mark.parametrize("name", ["echo", "plain", "late"])
def test_requests_of_a_batch_are_answered_one_by_one(client: shmserve.Client, name: str, width: int) -> None:
    inputs = [np.full((number % 3 + 1, width), number, np.float32) for number in range(40)]
    futures = [client.submit(name, {"IN": x}) for x in inputs]
    for x, future in zip(inputs, futures, strict=True):
        result = future.result()
        np.testing.assert_array_equal(result["OUT"], x)
        assert result.parameters["buffers"] == 1


def test_a_refused_batch_is_an_error_of_each_request(client: shmserve.Client) -> None:
    for future in [client.submit("fail", {"IN": X}) for _ in range(10)]:
        assert str(future.exception()) == "the backend refuses this batch"


@cases(
    ("error", InvalidRequest, "^the backend refuses this request$"),
    ("long error", InvalidRequest, "^x{3000}$"),
    ("fail", InvalidRequest, "^the backend refuses this batch$"),
    ("never", ModelFailed, "released the request without a final response"),
    ("unknown", ModelFailed, "unexpected output 'NOWHERE': the outputs of the model are OUT, TEXT"),
    ("abort", ServeError, r"instance 'echo_0_0' ended .* \(signal SIGABRT\)"),
    ("segfault", ServeError, r"instance 'echo_0_0' ended .* \(signal SIGSEGV\)"),
    ("sent", ServeError, r"\(signal SIGABRT\)"),
    ("released", ServeError, r"\(signal SIGABRT\)"),
)
def test_a_fault_fails_its_request(what: str, kind: type[ServeError], text: str, client: shmserve.Client) -> None:
    with pytest.raises(kind, match=text):
        do(client, what)
    served_again(client)


def test_the_first_of_two_responses_counts(client: shmserve.Client) -> None:
    np.testing.assert_array_equal(do(client, "twice", BIG)["OUT"], BIG)
    text = "answered a request twice: Unable to send response. Non-decoupled model cannot send more than one response."
    records: list[str] = []
    while not any(text in record for record in records):
        records = [record["text"] for record in client.logs("echo")["records"]]


def test_a_deleted_response_gives_its_memory_back(client: shmserve.Client) -> None:
    for _ in range(50):
        np.testing.assert_array_equal(do(client, "delete", BIG)["OUT"], BIG)


def test_a_stream_ends_with_the_final_flag_alone(client: shmserve.Client) -> None:
    one = {"IN": np.ones((1, 1), np.float32)}
    results = [float(part["OUT"][0, 0]) for part in client.stream("stream", one, parameters={"do": "three"})]
    assert results == [0, 1, 2]


def test_a_cancelled_stream_is_seen_by_the_thread_that_sends_it(client: shmserve.Client, server: Server) -> None:
    one = {"IN": np.ones((1, 1), np.float32)}
    for _ in client.stream("stream", one, parameters={"do": "endless"}):
        break
    while not any("the stream was cancelled" in record["text"] for record in client.logs("stream")["records"]):
        assert len(list(client.stream("stream", one))) == 1


@pytest.mark.parametrize(("name", "what"), [("sum", "count"), ("shared", "count in place")])
def test_the_state_of_a_sequence_is_kept_by_the_server(client: shmserve.Client, name: str, what: str) -> None:
    sums = [
        client.infer(
            name,
            {"IN": np.full((1, 1), number, np.float32)},
            parameters={"do": what},
            sequence=7,
            sequence_start=number == 1,
            sequence_end=number == 4,
        )["OUT"][0, 0]
        for number in (1, 2, 3, 4)
    ]
    assert sums == [1, 3, 6, 10]


def test_a_sequence_keeps_its_place_in_the_batch(client: shmserve.Client) -> None:
    sums: dict[int, float] = {}
    for sequence, number, start in [(1, 1, True), (2, 10, True), (2, 20, False), (1, 2, False), (2, 30, False)]:
        x = {"IN": np.full((1, 1), number, np.float32)}
        sums[sequence] = client.infer("slots", x, sequence=sequence, sequence_start=start)["OUT"][0, 0]
    assert sums == {1: 3, 2: 60}


def test_a_request_runs_again_until_it_is_answered(client: shmserve.Client) -> None:
    two = {"IN": np.full((1, 1), 2, np.float32)}
    once = client.infer("iterated", two, parameters={"do": "iterate"})
    assert once["OUT"][0, 0] == 10
    parts = client.stream("iterated_stream", two, parameters={"do": "iterate and stream"})
    assert [part["OUT"][0, 0] for part in parts] == [2, 4, 6, 8, 10]
    with pytest.raises(InvalidRequest, match="TRITONSERVER_REQUEST_RELEASE_RESCHEDULE"):
        client.infer("sum", two, parameters={"do": "iterate"}, sequence=8, sequence_start=True, sequence_end=True)


def test_a_backend_completes_its_configuration(client: shmserve.Client) -> None:
    found = client.config("completed")
    assert (found["max_batch_size"], found["input"][0]["dims"]) == (4, [2])
    x = np.ones((1, 2), np.float32)
    np.testing.assert_array_equal(client.infer("completed", {"IN": x})["OUT"], x)


def test_a_backend_calls_another_model(client: shmserve.Client) -> None:
    for x in (X, np.tile(BIG, (2, 1))):
        result = client.infer("caller", {"IN": x}, parameters={"do": "call", "model": "echo", "then": ""})
        np.testing.assert_array_equal(result["OUT"], x)
    for model_name, what, text in [
        ("echo", "error", "^the backend refuses this request$"),
        ("no", "", "unknown model: 'no'"),
        ("echo", "type", r"input 'IN' cannot be of an invalid type \[2, 3\]"),
    ]:
        with pytest.raises(ServeError, match=text):
            client.infer("caller", {"IN": X}, parameters={"do": "call", "model": model_name, "then": what})


def test_a_thread_calls_a_model_while_its_own_has_no_request(client: shmserve.Client) -> None:
    client.infer("caller", {"IN": X}, parameters={"do": "call alone", "model": "plain"})
    records: list[str] = []
    while not any("the calls of a thread were answered" in text for text in records):
        records = [record["text"] for record in client.logs("caller")["records"]]


def test_metrics_of_a_backend_are_those_of_the_server(server: Server, client: shmserve.Client) -> None:
    def counted() -> float:
        page = urlopen(f"http://{server.endpoints['metrics']}/metrics").read().decode()
        found = re.search(r'^probe_requests\{.*place="here".*\} (\S+)$', page, re.MULTILINE)
        assert found is not None
        return float(found[1])

    before = counted()
    client.infer("echo", {"IN": X})
    assert counted() == before + 1


@pytest.mark.parametrize("x", [X, BIG], ids=["inline", "shared"])
def test_two_steps_of_an_ensemble(client: shmserve.Client, x: Any) -> None:
    np.testing.assert_array_equal(client.infer("twice", {"X": x})["Y"], x)


def test_a_model_runs_its_warm_up(client: shmserve.Client) -> None:
    one = {"IN": np.ones((1, 1), np.float32)}
    assert client.infer("warm", one)["OUT"] == 1
    assert [part["OUT"] for part in client.stream("warm_stream", one)] == [1]


@pytest.mark.parametrize("place", ["model", "instance"])
def test_an_error_of_its_life_is_the_reason_why_a_model_is_not_served(
    shared_server: SharedServer, library: Path, tmp_path: Path, place: str
) -> None:
    config = f'{NUMBERS} parameters {{ key: "fail" value {{ string_value: "at {place}" }} }}'
    model(tmp_path, "failing", library, config)
    with pytest.raises(ServeError, match=f"the backend refuses this {place}"), shared_server.serving(tmp_path):
        pass
