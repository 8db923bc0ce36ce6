"""Requests and responses of the KServe protocol in JSON, compared with numpy and the module `json`."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from shmserve.dtypes import ITEM_BYTES, to_numpy
from shmserve.errors import BY_CODE, ConnectionLost, Internal, InvalidRequest, NotFound, ServeError, Unsupported
from shmserve.gateway.auth.access import Unauthenticated
from shmserve.gateway.kserve import json_tensors, status
from shmserve.gateway.kserve.answers import Buffer, Held, response
from shmserve.gateway.kserve.plans import (
    InputPlan,
    RegionSlice,
    RequestOptions,
    RequestPlan,
    RequestPlans,
    plan_in_slices,
    plan_of,
    raw_plan,
)
from shmserve.protocol.grpc.codes import Code
from shmserve.protocol.messages import Handle, Reply, Tensor
from shmserve.session.encode import TopK
from tests.support.cases import cases
from tests.support.gateway.sliced_work import finished
from tests.support.hypothesis_profiles import examples

NUMBERS = [name for name in ITEM_BYTES if name not in ("BYTES", "FP16", "BF16")]


def request(**more: Any) -> bytes:
    document = {"inputs": [{"name": "x", "shape": [2], "datatype": "INT32", "data": [1, 2]}]} | more
    return json.dumps(document).encode()


def one_input(**more: Any) -> bytes:
    return request(inputs=[{"name": "x", "shape": [2], "datatype": "FP32"} | more])


def test_all_fields_of_a_request() -> None:
    found = plan_of(
        request(
            id="a",
            inputs=[
                {"name": "x", "shape": [1, 3], "datatype": "FP32", "parameters": {"binary_data_size": 12}},
                {"name": "y", "shape": [2], "datatype": "BYTES", "data": ["é", ""]},
            ],
            outputs=[
                {"name": "p", "parameters": {"binary_data": True}},
                {"name": "q", "parameters": {"classification": 3, "binary_data": False}},
                {"name": "listed"},
            ],
            parameters={
                "sequence_id": 7, "sequence_start": True, "sequence_end": False, "priority": 2, "timeout": 1000,
                "binary_data_output": True, "text": "t", "number": -5, "share": 0.5, "flag": False,
            },
        )
    )  # fmt: skip
    assert found.inputs == (
        InputPlan("x", "FP32", (1, 3), 12),
        InputPlan("y", "BYTES", (2,), 10, b"\x02\0\0\0\xc3\xa9\0\0\0\0"),
    )
    zero = plan_of(request(parameters={"sequence_id": 0, "sequence_start": True, "sequence_end": True})).options
    assert (zero.sequence, zero.sequence_start, zero.sequence_end) == (None, False, False), "not a sequence"
    assert found.binary_bytes == 12
    assert found.outputs == {"p": None, "q": TopK(3), "listed": None}
    assert found.options == RequestOptions(
        "a", 2, 7, True, False, {"timeout": 1000, "text": "t", "number": -5, "share": 0.5, "flag": False}, True
    )
    binary = {name: found.is_binary(name) for name in ("p", "q", "listed", "other")}
    assert binary == {"p": True, "q": False, "listed": False, "other": True}


BAD = {
    "not JSON": (b"{", "failed to parse the request JSON buffer"),
    "not an object": (b"[]", "failed to parse the request JSON buffer"),
    "half a character": (request().replace(b'"x"', b'"\\ud800"'), "failed to parse"),
    "half a character beside NaN": (
        b'{"inputs":[{"name":"\\ud800","shape":[1],"datatype":"FP32","data":[NaN]}]}', "lone surrogate"),
    "no inputs": (b"{}", "missing required field `inputs`"),
    "nested": (b'{"inputs":' + b"[" * 5000 + b"]" * 5000 + b"}", "JSON nesting depth exceeds"),
    "nested in an unknown field": (request()[:-1] + b',"z":' + b"[" * 5000 + b"]" * 5000 + b"}", "nesting depth"),
    "nested data": (one_input(data="@").replace(b'"@"', b"[" * 150 + b"1" + b"]" * 150), "JSON nesting depth exceeds"),
    "mixed data": (one_input(data=[1, [2]]), "mixes"),
    "too few": (one_input(data=[1]), "has 2 elements, and 1 are given"),
    "of another type": (one_input(data=[1, "a"]), "is of FP32, and some of its data is a string"),
    "true is no number": (one_input(data=[1, True]), "true or false"),
    "too large": (one_input(datatype="INT8", data=[1, 128]), "does not fit in INT8"),
    "much too large": (one_input(data=[1, 10**400]), "does not fit in FP32"),
    "negative": (one_input(datatype="UINT32", data=[1, -1]), "does not fit in UINT32"),
    "a fraction": (one_input(datatype="INT32", data=[1, 1.5]), "with a fraction"),
    "FP16": (one_input(datatype="FP16", data=[1, 2]), "cannot be given as JSON"),
    "unknown type": (one_input(datatype="FP8", data=[1, 2]), "unknown data-type 'FP8'"),
    "no data": (one_input(), "neither 'data' nor"),
    "data twice": (one_input(data=[1, 2], parameters={"binary_data_size": 8}), "both"),
    "a size that is none": (one_input(parameters={"binary_data_size": -1}), "from 0 to"),
    "a size of text": (one_input(parameters={"binary_data_size": "8"}), "must be a number"),
    "too many elements": (
        one_input(shape=[2**4, 2**60 + 2]), "causes total element count to exceed maximum size of 9223372036854775807",
    ),
    "too many bytes": (one_input(shape=[2**2, 2**60 + 2]), "byte size overflow for input"),
    "large dim": (one_input(shape=[2**64], parameters={"binary_data_size": 8}), "dims must be from 0"),
    "many dims": (one_input(shape=[1] * 33, parameters={"binary_data_size": 8}), "33 dims"),
    "a long name": (one_input(name="x" * 129, data=[1, 2]), "the limit is 128"),
    "many inputs": (request(inputs=[{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}] * 257), "257"),
    "many outputs": (request(outputs=[{"name": str(n)} for n in range(257)]), "257"),
    "an output twice": (request(outputs=[{"name": "p"}, {"name": "p"}]), "output 'p' already exists in request"),
    "classes of nothing": (request(outputs=[{"name": "p", "parameters": {"classification": 0}}]), "from 1 to 1000000"),
    "classes in a region": (request(outputs=[{"name": "p", "parameters": {
        "classification": 1, "shared_memory_region": "r"}}]), "shared memory region"),
    "nested parameter": (request(parameters={"a": {"b": 1}}), "failed to parse"),
    "reserved": (request(parameters={"triton_x": 1}), "'triton_x' is reserved for Triton usage"),
    "reserved too": (request(parameters={"headers": "x"}), "'headers' is reserved for Triton usage"),
    "large parameter": (request(parameters={"a": 2**63}), "64 bits"),
    "many parameters": (request(parameters={str(n): n for n in range(65)}), "65"),
    "negative priority": (request(parameters={"priority": -1}), "'priority' must be a number from 0"),
    "negative timeout": (request(parameters={"timeout": -1}), "'timeout' must be a number from 0"),
    "start of text": (request(parameters={"sequence_id": 1, "sequence_start": "yes"}), "must be true or false"),
    "a long id": (request(id="x" * 129), "the limit is 128"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_invalid_requests_are_refused(text: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message.replace("[", r"\[")):
        plan_of(text)


def region(**more: Any) -> dict[str, Any]:
    return {"shared_memory_region": "r", "shared_memory_byte_size": 8} | more


def test_tensors_in_shared_memory() -> None:
    tensor = {"name": "x", "shape": [2], "datatype": "FP32", "parameters": region(shared_memory_offset=4)}
    found = plan_of(request(inputs=[tensor], outputs=[{"name": "p", "parameters": region()}, {"name": "q"}]))
    assert found.inputs == (InputPlan("x", "FP32", (2,), 8, None, RegionSlice("r", 4, 8)),)
    assert found.binary_bytes == 0
    assert found.places == {"p": RegionSlice("r", 0, 8)}
    assert found.outputs == ["p", "q"]


@cases(
    {"parameters": region(), "data": [1, 2]},
    {"parameters": region(binary_data_size=8)},
    {"parameters": region(shared_memory_byte_size=-1)},
    {"parameters": region(shared_memory_offset=2**64)},
    {"parameters": region(shared_memory_region=1)},
    {"parameters": {"shared_memory_region": "r"}},
)
def test_invalid_tensors_in_shared_memory_are_refused(given_input: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        plan_of(one_input(**given_input))


def test_plans_without_data_are_cached() -> None:
    plans = RequestPlans()
    same = one_input(parameters={"binary_data_size": 8})
    found = plans.plan(same)
    assert plans.plan(bytes(bytearray(same))) is found
    assert plans.plan(request()) is not plans.plan(request()), "a plan with data is not cached"
    for number in range(1100):
        plans.plan(one_input(parameters={"binary_data_size": 8, "n": number}))
    assert plans.plan(same) is not found, "the cache is bounded"


SHAPES = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)


@settings(max_examples=examples(60))
@given(st.sampled_from(NUMBERS).flatmap(lambda name: st.tuples(st.just(name), arrays.arrays(to_numpy(name), SHAPES))))
def test_numbers_roundtrip(case: tuple[str, np.ndarray[Any, Any]]) -> None:
    name, array = case
    raw = bytes(json_tensors.to_json("y", name, array.shape, array.tobytes()))
    flat = json.loads(raw)
    np.testing.assert_array_equal(np.array(flat, array.dtype).reshape(array.shape), array)
    for data in (flat, array.tolist()):
        text = json.dumps({"inputs": [{"name": "x", "shape": array.shape, "datatype": name, "data": data}]})
        found = plan_of(text.encode()).inputs[0].data
        assert found is not None
        np.testing.assert_array_equal(np.frombuffer(found, array.dtype).reshape(array.shape), array)


@given(st.lists(st.text(st.characters(exclude_categories=()), max_size=5)))
def test_strings_roundtrip(words: list[str]) -> None:
    text = json.dumps({"inputs": [{"name": "x", "shape": [len(words)], "datatype": "BYTES", "data": words}]})
    try:
        data = bytes(plan_of(text.encode()).inputs[0].data or b"")
    except InvalidRequest:
        assert any("\ud800" <= letter <= "\udfff" for word in words for letter in word)
        return
    assert data == b"".join(len(word.encode()).to_bytes(4, "little") + word.encode() for word in words)
    assert json.loads(bytes(json_tensors.to_json("y", "BYTES", (len(words),), data))) == words


@cases(
    ("FP32", [0.1, -0.0, 1, 3.5e38, -1e-46, 2**70]),
    ("FP64", [0.1, -0.0, 1, 1e308]),
    ("INT64", [-(2**63), 2**63 - 1]),
    ("UINT64", [2**64 - 1]),
    ("BOOL", [True, False]),
)
def test_json_numbers_are_converted_as_numpy_does_it(dtype: str, values: list[Any]) -> None:
    with np.errstate(over="ignore"):
        array = np.array(values, to_numpy(dtype))
    assert json_tensors.to_bytes("x", dtype, (len(values),), values) == array.tobytes()
    found = json.loads(bytes(json_tensors.to_json("y", dtype, (len(values),), array.tobytes())))
    assert {type(value) for value in found} == {type(array.tolist()[0])}


def test_outputs_that_need_binary_data() -> None:
    for name in ("FP16", "BF16"):
        with pytest.raises(InvalidRequest, match="request it as binary data"):
            json_tensors.to_json("y", name, (1,), b"\0\0")
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        json_tensors.to_json("y", "BYTES", (1,), b"\x01\0\0\0\xff")


def test_a_response_in_json_and_binary() -> None:
    reply = Reply(1, 3, (Tensor("p", "INT16", (2,), b"\1\0\2\0"), Tensor("q", "BYTES", (1,), b"\2\0\0\0hi")), {"k": 1})
    plan = RequestPlan((), 0, RequestOptions("me"), None, {"p": True})
    length, parts = response("m", plan, reply)
    text = bytes(parts[0])
    assert length == len(text)
    assert json.loads(text) == {
        "model_name": "m",
        "model_version": "3",
        "id": "me",
        "parameters": {"k": 1},
        "outputs": [
            {"name": "p", "datatype": "INT16", "shape": [2], "parameters": {"binary_data_size": 4}},
            {"name": "q", "datatype": "BYTES", "shape": [1], "data": ["hi"]},
        ],
    }
    assert parts[1:] == [b"\1\0\2\0"]
    pieces: dict[str, list[Buffer]] = {"q": [b'"h', b'i"']}
    assert b"".join(response("m", plan, reply, pieces=pieces)[1]) == b"".join(parts)
    assert response("m", plan, reply, pieces=pieces)[0] == length
    length, parts = response("m", RequestPlan((), 0, RequestOptions()), reply)
    assert length is None
    assert [output["data"] for output in json.loads(bytes(parts[0]))["outputs"]] == [[1, 2], ["hi"]]


def test_a_response_in_shared_memory_is_not_copied() -> None:
    views = [np.arange(6, dtype=np.uint8).data, np.arange(2, dtype=np.uint8).data]
    reply = Reply(1, 1, (Tensor("p", "UINT8", (8,), (Handle(1, 0, 6), Handle(1, 64, 2))),))
    length, parts = response("m", RequestPlan((), 0, RequestOptions(binary=True)), Held(reply, [list(views)]))
    assert length is not None
    assert parts[1] is views[0]
    assert parts[2] is views[1]
    length, parts = response("m", RequestPlan((), 0, RequestOptions()), Held(reply, [list(views)]))
    assert json.loads(bytes(parts[0]))["outputs"][0]["data"] == [0, 1, 2, 3, 4, 5, 0, 1]


def test_an_output_is_written_to_its_region() -> None:
    written = {}
    reply = Reply(1, 1, (Tensor("p", "UINT8", (4,), b"abcd"), Tensor("q", "UINT8", (1,), b"e")))
    plan = RequestPlan((), 0, RequestOptions(), None, {}, {"p": RegionSlice("r", 3, 6)})
    region: Any = SimpleNamespace(write=lambda place, buffers: written.update({place: b"".join(buffers)}))
    length, parts = response("m", plan, reply, {"p": region})
    assert length is None
    assert written == {RegionSlice("r", 3, 6): b"abcd"}
    first, second = json.loads(bytes(parts[0]))["outputs"]
    assert first == {"name": "p", "datatype": "UINT8", "shape": [4]}
    assert second["data"] == [101]
    small = RequestPlan((), 0, RequestOptions(), None, {}, {"p": RegionSlice("r", 0, 3)})
    with pytest.raises(InvalidRequest, match=r"output 'p' \(3 bytes\) should be at least 4 bytes to hold"):
        response("m", small, reply, {"p": region})


def config(dtype: str, dims: list[Any], batch: int = 0, count: int = 1) -> dict[str, Any]:
    return {"max_batch_size": batch, "input": [{"name": "x", "data_type": f"TYPE_{dtype}", "dims": dims}] * count}


@pytest.mark.parametrize("values", [1, 10_000])
def test_negative_dims_are_an_internal_error_as_in_triton(values: int) -> None:
    text = one_input(shape=[2, -5], data=[1.0] * values)
    said = "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned"
    with pytest.raises(Internal, match=said):
        plan_of(text)
    with pytest.raises(Internal, match=said):
        finished(plan_in_slices(text, 1 << 20))


@cases(
    ("FP32", [4], 0, 16, (4,), b""),
    ("FP32", ["-1"], 0, 12, (3,), b""),
    ("FP32", [-1, 2], 8, 24, (1, 3, 2), b""),
    ("UINT8", [3], 1, 3, (1, 3), b""),
    ("STRING", [1], 0, 5, (1,), b"\5\0\0\0"),
    ("STRING", [1], 4, 0, (1, 1), b"\0\0\0\0"),
    ("STRING", [1], 0, 300, (1,), b"\x2c\1\0\0"),
)
def test_a_raw_request(
    dtype: str, dims: list[Any], batch: int, size: int, shape: tuple[int, ...], prefix: bytes
) -> None:
    plan, found = raw_plan("m", config(dtype, dims, batch), size)
    assert (plan.inputs[0].shape, found) == (shape, prefix)
    assert plan.inputs[0].size == size + len(prefix)
    assert plan.is_binary("anything")


@cases(
    (config("FP32", [1], count=2), r"must only have 1 input \(found 1\) to be deduced but got 2 inputs in 'm'"),
    (config("STRING", [2]), "For BYTE datatype raw input 'x', the model must have input shape"),
    (config("STRING", [-1]), "For BYTE datatype raw input 'x', the model must have input shape"),
    (config("FP32", [-1, -1]), "more than one variable-sized"),
    (config("FP32", [-1, 3]), "8 bytes of raw input 'x' are not a multiple of its row size of 12 bytes"),
    (config("FP32", [-1, 0]), "not a multiple"),
)
def test_invalid_raw_requests_are_refused(model_config: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        raw_plan("m", model_config, 8)


def test_every_error_has_a_status() -> None:
    assert set(status.STATUSES) == {*BY_CODE, Unauthenticated.code}
    for http, grpc in status.STATUSES.values():
        assert http in status.REASONS
        assert grpc in Code.__members__


@cases(
    (NotFound("Request for unknown model: 'x' is not found"), 404, "Request for unknown model: 'x' is not found"),
    (InvalidRequest("no"), 400, "[request id: me] no"),
    (
        InvalidRequest("unexpected inference output 'z' for model 'm'"),
        400,
        "unexpected inference output 'z' for model 'm'",
    ),
    (ConnectionLost("no server at unix:///run/secret/lane.sock"), 503, status.UNREACHABLE),
    (
        Unsupported("model 'm' has a decoupled transaction policy: it"),
        501,
        "HTTP end point doesn't support models with decoupled transaction policy: model 'm' has a decoupled "
        "transaction policy: it",
    ),
    (Unsupported("no"), 501, "no"),
)
def test_status_and_text_of_errors(error: ServeError, http: int, text: str) -> None:
    assert status.http_of(error) == http
    assert status.http_text_of(error, "me") == text
    assert status.grpc_of(error) == status.STATUSES[error.code][1]
