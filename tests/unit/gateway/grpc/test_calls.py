"""Unary gRPC calls and health, with a fake stream and a fake session."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from shmserve.errors import Unavailable
from shmserve.gateway.auth.access import EndpointAccess
from shmserve.gateway.grpc.methods import Methods
from shmserve.protocol.grpc.codes import Code, RpcError
from shmserve.protocol.grpc.messages import HEALTH, INFERENCE
from shmserve.protocol.messages import Reply, Tensor
from shmserve.session import Session
from tests.support.cases import cases
from tests.support.gateway.grpc_calls import Case, Stream
from tests.support.gateway.rpc import POOL, message


def test_an_inference() -> None:
    case = Case("ModelInfer")
    made = message("ModelInferRequest", model_name="m", model_version="2", id="me", raw_input_contents=[b"abcd"])
    made.inputs.add(name="i", datatype="FP32", shape=[1])
    made.outputs.add(name="o")
    case.call.message(made.SerializeToString())
    case.call.half_closed()
    ((ticket, asked),) = case.link.asked
    assert asked[:2] == ("m", ((Tensor("i", "FP32", (1,), b"abcd"),), None, 4))
    assert (asked[3], asked[4], asked[11]) == (["o"], "2", "me")
    ticket.settle(Reply(0, 2, (Tensor("o", "INT8", (2,), b"hi"),), {"x": 1}))
    answer = message("ModelInferResponse").FromString(case.stream.sent[0])
    assert (answer.model_name, answer.model_version, answer.id) == ("m", "2", "me")
    assert (answer.parameters["x"].int64_param, answer.raw_output_contents[0]) == (1, b"hi")
    assert case.stream.end == (0, "")


@cases(
    (
        {"inputs": [{"name": "i", "datatype": "FP32", "contents": {}}]},
        "contents field must not be specified when using raw_input_contents for 'i' for model 'm'",
    ),
    ({"inputs": [{"name": "i", "datatype": "FP32"}] * 2}, "has 1 tensors, and 2 inputs for model 'm'"),
    ({}, "has 1 tensors, and 0 inputs"),
)
def test_raw_contents_that_do_not_fit_the_inputs_are_refused(fields: dict[str, Any], text: str) -> None:
    case = Case("ModelInfer")
    made = message("ModelInferRequest", model_name="m", id="me", raw_input_contents=[b"abcd"], **fields)
    with pytest.raises(RpcError, match=text) as caught:
        case.call.message(made.SerializeToString())
    assert caught.value.code == Code.INVALID_ARGUMENT
    assert caught.value.text.startswith("[request id: me] ")
    assert not case.link.asked


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_metadata_is_forwarded_to_the_model(method: str) -> None:
    case = Case(method, **{"x-who": "me", "authorization": "secret"})
    case.ask(**dict[str, Any](mine=1, **{"x-who": "you"}))
    assert case.link.asked[0][1][10] == {"x-who": "me", "mine": 1}


def test_a_call_has_one_valid_request_and_is_cancelled_with_it() -> None:
    with pytest.raises(RpcError, match="not this one"):
        Case("ModelInfer").ask("refused")
    with pytest.raises(RpcError, match="received none"):
        Case("ModelInfer").call.half_closed()
    several, cancelled = Case("ModelInfer"), Case("ModelInfer")
    tickets = [several.ask(), cancelled.ask()]
    with pytest.raises(RpcError, match="received another"):
        several.ask()
    for _ in range(2):
        cancelled.call.cancelled()
    assert [several.link.cancelled, cancelled.link.cancelled] == [[ticket] for ticket in tickets]


@pytest.mark.parametrize(("method", "service"), [("ServerMetadata", INFERENCE), ("Check", HEALTH)])
def test_a_query_over_its_share_is_refused_and_not_cancelled(method: str, service: str) -> None:
    case = Case(method, service)
    queries = case.stream.payer("").queries
    with suppress(Unavailable):
        while True:
            queries.take(0)
    with pytest.raises(RpcError, match="its share"):
        case.call.message(b"")
    case.call.cancelled()
    assert not case.link.cancelled


def test_a_role_that_depends_on_the_message_is_checked() -> None:
    reads, case = Case("TraceSetting"), Case("TraceSetting")
    reads.services.access = case.services.access = EndpointAccess({"infer", "observe"}, option="--grpc-roles")
    reads.call.message(b"")
    assert reads.link.asked[0][1][0] == "trace"
    with pytest.raises(RpcError, match="operate") as caught:
        case.call.message(message("TraceSettingRequest", settings={"trace_rate": {"value": ["1"]}}).SerializeToString())
    assert caught.value.code == Code.PERMISSION_DENIED
    assert not case.link.asked


def test_the_size_of_a_query_is_limited_except_for_loads() -> None:
    case = Case("TraceSetting")
    long = message("TraceSettingRequest", settings={"x": {"value": [""] * 40_000}}).SerializeToString()
    with pytest.raises(RpcError, match=r"TraceSettingRequest has .* bytes; the limit is 65536"):
        case.call.message(long)
    case = Case("RepositoryModelLoad")
    parameters = {"config": {"string_param": "{}"}, "file:1/x": {"bytes_param": bytes(100_000)}}
    load = message("RepositoryModelLoadRequest", model_name="m", parameters=parameters)
    case.call.message(load.SerializeToString())
    assert case.link.asked[0][1][0] == "load"


METHODS = [method.name for method in POOL.FindServiceByName(INFERENCE).methods]
PATHS = [(name, INFERENCE) for name in METHODS if name != "ModelStreamInfer"]


@pytest.mark.parametrize(("method", "service"), [*PATHS, ("Check", HEALTH), ("Watch", HEALTH)])
def test_a_message_that_protobuf_cannot_read_is_refused(method: str, service: str) -> None:
    case = Case(method, service)
    with pytest.raises(RpcError) as caught:
        case.call.message(b"\xff")
    assert caught.value.code == Code.INVALID_ARGUMENT
    assert not case.link.asked


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
@pytest.mark.parametrize("name", ["i", "input"])
def test_a_large_tensor_is_received_in_shared_memory(method: str, name: str) -> None:
    """The first of two tensors is not copied, at any position in the message; the second is."""
    case = Case(method)
    case.link.memory = Session("memfd").memory
    tensors = [bytes([number]) * 9001 for number in (1, 2)]
    made = message("ModelInferRequest", model_name="m", id="me", raw_input_contents=tensors)
    for number in range(2):
        made.inputs.add(name=f"{name}{number}", datatype="UINT8", shape=[9001])
    data = made.SerializeToString()
    assert case.call.room(len(data), data[:40]) is None
    room = case.call.room(len(data), data[:2000])
    assert room is not None
    room.memory[:] = data
    case.call.message(room.memory)
    ((_, asked),) = case.link.asked
    inputs, kept, _ = asked[1]
    assert [bytes(array) for array in kept.arrays] == tensors
    assert [np.shares_memory(array, np.frombuffer(room.memory, np.uint8)) for array in kept.arrays] == [True, False]
    assert [case.link.memory.locate(array)[0] for array in kept.arrays] == [tensor.data[0] for tensor in inputs]
    assert all(tensor.data[0].offset % 64 == 0 for tensor in inputs)
    again = Case(method)
    again.link.memory = case.link.memory
    assert again.call.room(len(data), data[:2000]) is not None
    again.call.message(memoryview(data))  # received elsewhere
    assert [bytes(array) for array in again.link.asked[0][1][1][1].arrays] == tensors


def test_a_message_is_refused_when_shared_memory_is_used_up() -> None:
    case = Case("ModelInfer")
    case.link.memory = Session("memfd", memory_bytes=1 << 16).memory
    made = message("ModelInferRequest", model_name="m", raw_input_contents=[bytes(1 << 20)])
    made.inputs.add(name="i", datatype="UINT8", shape=[1 << 20])
    data = made.SerializeToString()
    assert case.call.room(len(data), data[:2000]) is None
    with pytest.raises(RpcError) as caught:
        case.call.message(data)
    assert caught.value.code == Code.UNAVAILABLE


UNKNOWN_SERVICE = message("grpc.health.v1.HealthCheckRequest", service="x").SerializeToString()


def health(sent: bytes) -> int:
    status: int = message("grpc.health.v1.HealthCheckResponse").FromString(sent).status
    return status


def test_health() -> None:
    for service, settle, status in ((INFERENCE, {"ready": True}, 1), ("", {"ready": False}, 2), ("", None, 2)):
        case = Case("Check", HEALTH)
        case.call.message(message("grpc.health.v1.HealthCheckRequest", service=service).SerializeToString())
        ticket, _ = case.link.asked[0]
        ticket.settle(settle) if settle else ticket.fail(Unavailable("gone"))
        assert (health(case.stream.sent[0]), case.stream.end) == (status, (0, ""))
    with pytest.raises(RpcError) as caught:
        Case("Check", HEALTH).call.message(UNKNOWN_SERVICE)
    assert caught.value.code == Code.NOT_FOUND


def test_a_watch_reports_changes() -> None:
    case, second = Case("Watch", HEALTH), Stream(f"/{HEALTH}/Watch")
    other: Any = second
    case.call.message(b"")
    case.call.half_closed()
    Methods(case.services)(other).message(b"")
    for answer in ({"ready": True}, {"ready": True}, None, {"ready": True}):
        ((ticket, _),) = case.link.asked  # one query for all watches
        case.link.asked.clear()
        if answer is None:
            ticket.fail(Unavailable("gone"))
        else:
            ticket.settle(answer)
        case.link.later.pop()()
    assert [health(sent) for sent in case.stream.sent] == [health(sent) for sent in second.sent] == [1, 2, 1]
    case.services.close()
    for stream in (case.stream, second):
        assert health(stream.sent[-1]) == 2
        assert stream.end == (Code.UNAVAILABLE, "the gateway is stopping")
    assert len(case.link.cancelled) == 1
    assert not case.link.later
    case = Case("Watch", HEALTH)
    case.call.message(UNKNOWN_SERVICE)
    assert health(case.stream.sent[0]) == 3
    case.call.cancelled()
    assert not case.services.long_calls
    case = Case("Watch", HEALTH)
    case.services.close()
    with pytest.raises(RpcError, match="the gateway is stopping"):
        case.call.message(b"")
