"""Encoding of gRPC messages, compared with protobuf, the broker queries of each method, and large typed
contents, which are decoded in slices."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.dtypes import ITEM_BYTES, to_numpy
from shmserve.errors import Internal, InvalidRequest, NotFound, ServeError, Unsupported
from shmserve.gateway.auth.access import EndpointAccess
from shmserve.gateway.grpc import contents
from shmserve.gateway.grpc import wire as grpc_wire
from shmserve.gateway.grpc.methods import CALLS, Methods
from shmserve.gateway.grpc.plans import RpcPlan, RpcPlans, plan_in_slices, plan_of
from shmserve.gateway.grpc.rpcs import RPCS
from shmserve.gateway.grpc.services import Services, code_of
from shmserve.gateway.grpc.wire import IS_FINAL, ResponseEncoder, stream_error, streamed, take_apart
from shmserve.gateway.kserve.plans import InputPlan, RegionSlice, RequestOptions, RequestPlan
from shmserve.gateway.limits.turns import SLICE_BYTES
from shmserve.gateway.upstream.documents import BadLoad, BrokerQuery, query_of
from shmserve.gateway.upstream.regions import Regions
from shmserve.protocol.actions import Action
from shmserve.protocol.grpc.codes import Code, RpcError
from shmserve.protocol.grpc.messages import HEALTH, INFERENCE, filled, message_class, methods, read
from shmserve.protocol.messages import TENSORS, Tensor
from shmserve.protocol.roles import ROLES
from shmserve.session.encode import TopK
from shmserve.shm import strings
from tests.support.cases import cases
from tests.support.gateway.grpc_calls import Stream
from tests.support.gateway.rpc import message, parameter
from tests.support.gateway.sliced_work import finished, slices_of
from tests.support.hypothesis_profiles import examples

NAMES = st.text("abcXYZ_é", max_size=200)
BLOBS = st.binary(max_size=300)


@st.composite
def requests(draw: Any) -> Any:
    """A request and its bytes, whose fields may come in any order."""
    made = message("ModelInferRequest", model_name=draw(NAMES), model_version=draw(st.sampled_from(["", "7"])))
    made.id = draw(NAMES)
    for name in draw(st.lists(NAMES, max_size=3)):
        one = made.inputs.add(name=name, datatype=draw(st.sampled_from(["FP32", "BYTES", "?"])))
        one.shape.extend(draw(st.lists(st.integers(-2, 2**40), max_size=3)))
    for name in draw(st.lists(NAMES, max_size=2)):
        made.outputs.add(name=name)
    for name, value in draw(st.dictionaries(NAMES, st.booleans() | st.integers(-9, 9) | NAMES, max_size=3)).items():
        parameter(made.parameters[name], value)
    made.raw_input_contents.extend(draw(st.lists(BLOBS, max_size=4)))
    pieces = []
    for field, value in made.ListFields():
        if field.name == "parameters":
            pieces.append(message("ModelInferRequest", parameters=value).SerializeToString())
            continue
        several = field.name in ("inputs", "outputs", "raw_input_contents")
        for one in value if several else [value]:
            pieces.append(message("ModelInferRequest", **{field.name: [one] if several else one}).SerializeToString())
    data = b"".join(draw(st.permutations(pieces)))
    return message("ModelInferRequest").FromString(data), data


@given(requests(), st.sampled_from([bytes, bytearray, memoryview]))
def test_the_tensors_of_a_request_are_separated(case: tuple[Any, bytes], kind: Any) -> None:
    made, data = case
    taken = take_apart(kind(data))
    assert taken.id == made.id
    assert [bytes(one) for one in taken.raw] == list(made.raw_input_contents)
    del made.raw_input_contents[:]
    made.id = ""
    assert read(type(made), taken.head) == made


@given(
    st.binary(max_size=64) | requests().map(lambda case: case[1]),
    st.lists(st.tuples(st.integers(0), st.integers(0, 255)), max_size=3),
)
@settings(max_examples=examples(100))
def test_any_bytes_are_a_plan_or_refused(data: bytes, changes: list[tuple[int, int]]) -> None:
    """A plan has the fields that protobuf reads."""
    noise = bytearray(data)
    for at, value in changes:
        if noise:
            noise[at % len(noise)] = value
    with contextlib.suppress(InvalidRequest):
        taken = take_apart(bytes(noise))
        plan = plan_of(taken.head)
        whole = message("ModelInferRequest")
        whole.ParseFromString(bytes(noise))
        assert (plan.model, taken.id, len(taken.raw)) == (whole.model_name, whole.id, len(whole.raw_input_contents))


@cases(
    b"\x0a",
    b"\x0a\x05abc",
    b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
    b"\x1a\x01\xff",
    b"\x0b",
    b"\x0f",
    b"\x9a\x00\x01a",
)
def test_bytes_that_are_not_a_request_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="ModelInferRequest"):
        plan_of(take_apart(data).head)


def test_unknown_fields_are_ignored_up_to_a_number() -> None:
    known = message("ModelInferRequest", model_name="m", id="x", raw_input_contents=[b"abc"]).SerializeToString()
    more = b"\x50\x96\x01" + b"\x59" + bytes(8) + b"\x65" + bytes(4) + b"\x6a\x02hi" + b"\x82\x7d\x01z"
    taken = take_apart(more + known + more)
    assert (taken.id, taken.raw, plan_of(taken.head).model) == ("x", [b"abc"], "m")
    with pytest.raises(InvalidRequest, match="more than 1024"):
        take_apart(b"\x3a\x00" * 5000)


def set_all(made: Any, **parameters: Any) -> None:
    for name, value in parameters.items():
        parameter(made.parameters[name], value)


def test_all_fields_of_a_request() -> None:
    made = message("ModelInferRequest", model_name="m", model_version="3")
    made.inputs.add(name="a", datatype="FP32", shape=[2, 3])
    held = made.inputs.add(name="b", datatype="INT8", shape=[4])
    set_all(held, shared_memory_region="r", shared_memory_offset=8, shared_memory_byte_size=4)
    set_all(made.outputs.add(name="p"), shared_memory_region="r", shared_memory_byte_size=64)
    set_all(made.outputs.add(name="k"), classification=2)
    set_all(made, sequence_id=7, sequence_start=True, sequence_end=True, timeout=9, mine=1.5)
    set_all(made, triton_enable_empty_final_response=True)
    made.parameters["priority"].uint64_param = 4
    places = {"p": RegionSlice("r", 0, 64)}
    options = RequestOptions("", 4, 7, True, True, {"timeout": 9, "mine": 1.5})
    specs = (InputPlan("a", "FP32", (2, 3), 0), InputPlan("b", "INT8", (4,), 4, None, RegionSlice("r", 8, 4)))
    plan = RequestPlan(specs, 0, options, {"p": None, "k": TopK(2)}, {"p": False, "k": False}, places)
    assert plan_of(made.SerializeToString()) == RpcPlan("m", "3", plan, 1, "", True)


def one_input(**more: Any) -> Any:
    made = message("ModelInferRequest", model_name="m", model_version=more.pop("model_version", ""))
    made.inputs.add(**{"name": "a", "datatype": "FP32", "shape": [1]} | more)
    return made


def with_parameter(name: str, value: Any) -> Any:
    made = one_input()
    made.parameters[name].Clear()
    if value is not None:
        parameter(made.parameters[name], value)
    return made


@cases(
    (one_input(shape=[-1]), "dims must be from 0"),
    (one_input(model_version="new"), "failed to get model version from specified version string 'new'"),
    (one_input(contents={"int_contents": [1]}), "FP32, whose elements are in fp32_contents, and int_contents has"),
    (one_input(datatype="FP16", contents={}), "use raw_input_contents"),
    (one_input(datatype="INT8", contents={"int_contents": [128]}), "does not fit in INT8"),
    (one_input(datatype="UINT16", contents={"uint_contents": [65536]}), "does not fit in UINT16"),
    (with_parameter("x", None), "parameter 'x' of the request has no value"),
    (with_parameter("triton_x", 1), "reserved"),
    (with_parameter("triton_enable_empty_final_response", 1), "must be true or false"),
    (message("ModelInferRequest", inputs=[{}] * (TENSORS + 1)), "257 inputs; the limit is 256"),
    (message("ModelInferRequest", outputs=[{}] * (TENSORS + 1)), "257 outputs; the limit is 256"),
    (message("ModelInferRequest", outputs=[{"name": "o"}] * 2), "output 'o' already exists in request"),
    (message("ModelInferRequest", parameters={str(n): {"bool_param": True} for n in range(999)}), "limit is 128"),
)
def test_invalid_requests_are_refused(made: Any, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        plan_of(made.SerializeToString())


@pytest.mark.parametrize("dtype", list(contents.FIELDS))
def test_typed_contents_are_the_bytes_of_the_tensor(dtype: str) -> None:
    assert set(contents.FIELDS) == set(ITEM_BYTES) - {"FP16", "BF16"}
    if dtype == "BYTES":
        words = [b"", b"a", "é".encode(), b"\xff\x00"]
        data = contents.small_to_bytes("a", dtype, message("InferTensorContents", bytes_contents=words))
        assert data == bytes(strings.encode_bytes(np.array(words, object)))
        return
    kind = to_numpy(dtype)
    if kind.kind == "b":
        array = np.array([True, False, True])
    elif kind.kind == "f":
        array = np.array([0, -1.5, math.inf, -math.inf, math.nan, np.finfo(kind).tiny, np.finfo(kind).max], kind)
    else:
        array = np.array([np.iinfo(kind).min, 0, 1, np.iinfo(kind).max], kind)
    made = one_input(datatype=dtype, shape=array.shape, contents={contents.FIELDS[dtype]: array.tolist()})
    plan = plan_of(made.SerializeToString())
    assert (plan.contents, plan.raw) == ("a", 0)
    assert plan.plan.inputs[0].data == array.tobytes()


def test_plans_without_tensors_are_cached() -> None:
    plans = RpcPlans()
    plain = one_input().SerializeToString()
    assert plans.plan(plain) is plans.plan(bytes(bytearray(plain)))
    typed = one_input(contents={"fp32_contents": [1]}).SerializeToString()
    assert plans.plan(typed) is not plans.plan(typed)
    large = one_input(datatype="INT64", contents={"int64_contents": [1] * 2000}).SerializeToString()
    with pytest.raises(InvalidRequest, match="exceeds 5000 bytes of INT64; raise --grpc-max-input-size"):
        finished(plan_in_slices(large, 5000))
    strings_ = one_input(datatype="BYTES", contents={"bytes_contents": [b"a"] * 2000}).SerializeToString()
    assert finished(plan_in_slices(strings_, 5000)).plan.inputs[0].data == b"\1\0\0\0a" * 2000
    for number in range(3000):  # more than the cache holds
        plans.plan(one_input(name=str(number)).SerializeToString())
    assert plans.plan(plain) == plan_of(plain)


TENSOR = st.tuples(NAMES, st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 2**40), max_size=3), BLOBS)


@given(NAMES, st.integers(0, 2**62), NAMES, st.lists(TENSOR, max_size=4), st.booleans(), st.booleans())
def test_protobuf_reads_responses(
    model: str, version: int, request_id: str, tensors: list[Any], in_pieces: bool, final: bool
) -> None:
    outputs = [Tensor(name, dtype, tuple(shape), data) for name, dtype, shape, data in tensors]
    buffers = [[memoryview(t[3])[:7], memoryview(t[3])[7:]] for t in tensors] if in_pieces else None
    answers = ResponseEncoder()
    for _ in range(2):
        parts = answers.infer(model, version, request_id, IS_FINAL if final else b"", outputs, buffers)
        expected = message("ModelInferResponse", model_name=model, id=request_id)
        expected.model_version = str(version) if version else ""
        if final:
            expected.parameters["triton_final_response"].bool_param = True
        for name, dtype, shape, data in tensors:
            expected.outputs.add(name=name, datatype=dtype, shape=shape)
            expected.raw_output_contents.append(data)
        assert message("ModelInferResponse").FromString(b"".join(parts)) == expected
        found = message("ModelStreamInferResponse").FromString(b"".join(streamed(parts)))
        assert (found.infer_response, found.error_message) == (expected, "")


def test_tensors_are_not_copied_into_a_response() -> None:
    data = memoryview(bytes(100_000))
    parts = ResponseEncoder().infer("m", 1, "", b"", [Tensor("o", "UINT8", (100_000,), ())], [[data]])
    assert any(part is data for part in parts)
    with pytest.raises(Internal):
        ResponseEncoder().infer("m", 1, "", b"", [Tensor("o", "UINT8", (1,), 0)], None)


def test_protobuf_reads_the_error_of_a_stream() -> None:
    found = message("ModelStreamInferResponse").FromString(stream_error("no \udcff", "me"))
    assert (found.error_message, found.infer_response.id) == ("no ?", "me")


def test_protobuf_reads_the_parameters_of_a_response() -> None:
    parameters: dict[str, Any] = {"a": True, "b": -(2**63), "c": "é", "d": 0.5, "e": 2**63 - 1, "f": 2**64 - 1}
    found = message("ModelInferResponse").FromString(grpc_wire.parameters_of(parameters))
    shown = {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in found.parameters.items()}
    assert shown == parameters


INFER = Action.INFER


def test_every_method_has_a_row_and_a_handler() -> None:
    assert set(methods(INFERENCE)) == set(RPCS) | {"ModelInfer", "ModelStreamInfer"}
    assert Counter({*RPCS, *CALLS}) == Counter(method for action in Action for method in action.row.grpc)


def query(rpc_name: str, /, **fields: Any) -> BrokerQuery:
    rpc = RPCS[rpc_name]
    route, arguments = rpc.query(rpc.request(**fields))
    found = query_of(route, arguments, Regions(False), ("", ""))
    assert isinstance(found, BrokerQuery)
    return found


def body_of(question: BrokerQuery) -> bytes:
    assert question.body is not None
    return question.body.take()


def response(name: str, document: Any) -> Any:
    rpc = RPCS[name]
    return read(rpc.response, filled(rpc.response, rpc.shown(document)))


def test_documents_become_messages() -> None:
    question = query("ModelReady", name="m", version="2")
    assert (question.what, question.model, question.version) == ("ready", "m", "2")
    assert response("ModelReady", question.show({"ready": True})).ready is True
    assert response("ModelReady", question.failed(NotFound("?"))).ready is False
    models = [{"name": "a", "version": "1", "state": "READY", "reason": ""}, {"name": "b", "state": ""}]
    (model,) = response("RepositoryIndex", query("RepositoryIndex", ready=True).show(models)).models
    assert (model.name, model.version, model.state) == ("a", "1", "READY")
    statistics = {"model_stats": [{"name": "m", "last_inference": 2**60, "own": {"x": 1}, "batch_stats": []}]}
    assert response("ModelStatistics", statistics).model_stats[0].last_inference == 2**60
    region = {"name": "r", "key": "/k", "offset": 3, "byte_size": 2**40}
    assert response("SystemSharedMemoryStatus", [region]).regions["r"].byte_size == 2**40
    with pytest.raises(Internal):
        response("ServerMetadata", {"name": 3})


def test_loads_and_unloads() -> None:
    parameters = {"config": {"string_param": '{"backend": "python"}'}, "file:1/model.py": {"bytes_param": b"x"}}
    question = query("RepositoryModelLoad", model_name="m", parameters=parameters)
    assert body_of(question) == b'{"config": {"backend": "python"}, "files": [["1/model.py", 1]]}\nx'
    question = query("RepositoryModelLoad", model_name="m", parameters={"previous": {"bool_param": True}})
    assert (question.what, body_of(question)) == ("rollback", b"")
    with pytest.raises(BadLoad, match="failed to load 'm', failed to poll from model repository: wrong"):
        question.failed(InvalidRequest("wrong"))
    assert code_of(BadLoad("m", InvalidRequest("x"))) is Code.INTERNAL
    text = "load failed for model 'm': version 1 is at UNAVAILABLE state: no file"
    with pytest.raises(BadLoad, match=text):
        question.failed(InvalidRequest(text))
    for name in ("unload_dependents", "force"):
        question = query("RepositoryModelUnload", model_name="m", parameters={name: {"bool_param": True}})
        expected = {"unload_dependents": name == "unload_dependents", "wait": False}
        assert json.loads(body_of(question)) == expected | ({"force": True} if name == "force" else {})


def in_load(**parameters: Any) -> tuple[str, dict[str, Any]]:
    return "RepositoryModelLoad", {"parameters": {name.replace("_", ":"): one for name, one in parameters.items()}}


@cases(
    ("RepositoryIndex", {"repository_name": "r"}, Unsupported),
    ("RepositoryModelLoad", {"repository_name": "r"}, Unsupported),
    ("RepositoryModelUnload", {"repository_name": "r"}, Unsupported),
    (*in_load(config={"bytes_param": b"{}"}), InvalidRequest),
    (*in_load(config={"string_param": "no JSON"}), BadLoad),
    (*in_load(file_a={"bytes_param": b""}), BadLoad),
    (*in_load(other={"bytes_param": b""}), InvalidRequest),
    (*in_load(previous={"string_param": "true"}), InvalidRequest),
    ("RepositoryModelUnload", {"parameters": {"unload_dependents": {"string_param": "yes"}}}, InvalidRequest),
    ("RepositoryModelUnload", {"parameters": {"other": {"bool_param": True}}}, InvalidRequest),
    ("SystemSharedMemoryRegister", {"name": "r", "key": "/k", "byte_size": 1}, Unsupported),
    ("ModelConfig", {"name": "m", "version": "x"}, InvalidRequest),
    ("LogSettings", {"settings": {"log_info": {}}}, InvalidRequest),
)
def test_invalid_calls_are_refused(name: str, fields: dict[str, Any], kind: type[ServeError]) -> None:
    with pytest.raises(kind):
        query(name, **fields)


def test_settings() -> None:
    assert query("TraceSetting", model_name="m").what == "trace"
    values = {"trace_rate": {"value": ["1"]}, "trace_level": {"value": ["A", "B"]}, "log_frequency": {"value": []}}
    question = query("TraceSetting", settings=values)
    assert question.what == "set_trace"
    assert json.loads(body_of(question)) == {"trace_rate": ["1"], "trace_level": ["A", "B"], "log_frequency": None}
    shown = response("TraceSetting", {"trace_level": ["OFF"], "trace_rate": "1000"}).settings
    assert {name: list(one.value) for name, one in shown.items()} == {"trace_level": ["OFF"], "trace_rate": ["1000"]}
    changed = {"log_info": {"bool_param": False}, "log_verbose_level": {"uint32_param": 2}}
    question = query("LogSettings", settings=changed | {"log_format": {"string_param": "default"}})
    assert question.what == "set_log"
    document = json.loads(body_of(question))
    assert document == {"log_info": False, "log_verbose_level": 2, "log_format": "default"}
    shown = response("LogSettings", document).settings
    assert {name: getattr(one, one.WhichOneof("parameter_choice")) for name, one in shown.items()} == document


def test_access_is_denied_before_a_message_is_read() -> None:
    nothing: Any = None
    actions = {name: rpc.action for name, rpc in RPCS.items()} | {"ModelInfer": INFER, "ModelStreamInfer": INFER}
    paths = {f"/{INFERENCE}/{name}": action for name, action in actions.items()} | {f"/{HEALTH}/Check": Action.READY}
    for roles in (set(some) for count in range(4) for some in itertools.combinations(ROLES, count)):
        methods: Any = Methods(
            Services(nothing, 16 << 20, EndpointAccess(roles, option="--grpc-roles"), Regions(False))
        )
        for path, action in paths.items():
            if roles & set(action.row.roles):
                methods(Stream(path))
                continue
            with pytest.raises(RpcError, match="--grpc-roles") as caught:
                methods(Stream(path))
            assert caught.value.code == Code.PERMISSION_DENIED
        with pytest.raises(RpcError) as caught:
            methods(Stream("/inference.GRPCInferenceService/Nothing"))
        assert caught.value.code == Code.UNIMPLEMENTED


REQUEST = message_class("inference.ModelInferRequest")


def request(*inputs: tuple[str, str, list[Any]], **more: Any) -> bytes:
    made = REQUEST(model_name="m", id="me", **more)
    for number, (dtype, field, values) in enumerate(inputs):
        one = made.inputs.add(name=f"i{number}", datatype=dtype, shape=[len(values)])
        getattr(one.contents, field).extend(values)
    data: bytes = made.SerializeToString()
    return data


def tensors(plan: RpcPlan) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    return [(spec.name, spec.dtype, spec.shape, bytes(spec.data or b"")) for spec in plan.plan.inputs]


KINDS: dict[str, tuple[str, st.SearchStrategy[Any]]] = {
    "BOOL": ("bool_contents", st.booleans()),
    "INT8": ("int_contents", st.integers(-(2**31), 2**31 - 1) | st.integers(-128, 127)),
    "INT32": ("int_contents", st.integers(-(2**31), 2**31 - 1)),
    "INT64": ("int64_contents", st.integers(-(2**63), 2**63 - 1)),
    "UINT16": ("uint_contents", st.integers(0, 2**16 - 1)),
    "UINT64": ("uint64_contents", st.integers(0, 2**64 - 1)),
    "FP32": ("fp32_contents", st.floats(width=32)),
    "FP64": ("fp64_contents", st.floats()),
    "BYTES": ("bytes_contents", st.binary(max_size=300)),
}


@pytest.mark.parametrize("size", [16, SLICE_BYTES])
@settings(max_examples=examples(60))
@given(data=st.data())
def test_slices_give_the_plan_of_protobuf(monkeypatch: pytest.MonkeyPatch, size: int, data: st.DataObject) -> None:
    monkeypatch.setattr(contents, "SLICE_BYTES", size)
    kinds = data.draw(st.lists(st.sampled_from(sorted(KINDS)), max_size=3))
    text = request(*[(kind, KINDS[kind][0], data.draw(st.lists(KINDS[kind][1], max_size=30))) for kind in kinds])
    try:
        whole = plan_of(text)
    except InvalidRequest:
        with pytest.raises(InvalidRequest, match="does not fit"):
            finished(plan_in_slices(text))
        return
    cut = finished(plan_in_slices(text))
    assert tensors(cut) == tensors(whole)
    assert (cut.model, cut.raw, cut.contents) == (whole.model, whole.raw, whole.contents)


@settings(max_examples=examples(100))
@given(st.binary(max_size=40), st.integers(0, 60))
def test_any_bytes_give_the_plan_of_protobuf_or_are_refused(noise: bytes, place: int) -> None:
    text = request(("INT32", "int_contents", [1, -1, 300]), ("BYTES", "bytes_contents", [b"ab", b""]))
    for damaged in (text[:place] + noise + text[place:], text[:place] + noise, noise):
        try:
            found = finished(plan_in_slices(damaged))
        except InvalidRequest:
            continue
        assert tensors(found) == tensors(plan_of(damaged))


def test_contents_of_another_type_are_refused() -> None:
    for dtype, field in (("FP32", "int_contents"), ("INT8", "uint_contents"), ("BYTES", "int_contents")):
        with pytest.raises(InvalidRequest, match=f"{field} has some"):
            finished(plan_in_slices(request((dtype, field, [1]))))
    with pytest.raises(InvalidRequest, match="use raw_input_contents"):
        finished(plan_in_slices(request(("FP16", "fp32_contents", [1]))))


def test_the_elements_of_a_slice_are_limited() -> None:
    for dtype, values in (("INT8", [1] * 500_000), ("BYTES", [b""] * 250_000)):
        text = request((dtype, KINDS[dtype][0], values))
        assert slices_of(plan_in_slices(text)) >= len(text) // SLICE_BYTES


def test_the_bytes_and_fields_that_protobuf_parses_are_limited() -> None:
    parameters = {f"p{number}": {"string_param": "x" * 1000} for number in range(2000)}
    with pytest.raises(InvalidRequest, match="in addition to its tensors"):
        finished(plan_in_slices(request(("FP32", "fp32_contents", [1.0]), parameters=parameters)))
    with pytest.raises(InvalidRequest, match="more than 4096 fields"):
        finished(plan_in_slices(b"\x28\x01" * 5000))
