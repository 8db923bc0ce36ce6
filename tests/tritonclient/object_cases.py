"""A case for each method of the arguments and results of clients, and for the functions of `tritonclient.utils`.

Where a method has an effect on the server, the case checks the effect there.
"""

from __future__ import annotations

import importlib
import queue
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from tritonclient import utils
from tritonclient.utils import shared_memory as shm

from tests.tritonclient.faces import BYTES, A, B, Face, right
from tests.tritonclient.methods import FUNCTIONS

WAIT_S = 20
Case = Callable[[Face], Awaitable[None]]
CASES: dict[str, Case] = {}
"""Name in METHODS -> case. Its face is the module in the name; functions use HTTP."""


def case(*names: str) -> Callable[[Case], Case]:
    def known(function: Case) -> Case:
        CASES.update(dict.fromkeys(names, function))
        return function

    return known


def both(kind: str, *methods: str) -> Callable[[Case], Case]:
    return case(*[f"{face}.{kind}.{method}" for face in ("http", "grpc") for method in methods])


@both("InferInput", "name", "datatype", "shape", "set_shape", "set_data_from_numpy")
async def inputs(face: Face) -> None:
    pair = face.inputs()
    assert (pair[0].name(), pair[0].datatype(), pair[0].shape()) == ("INPUT0", "INT32", [1, 16])
    for one, array in zip(pair, (np.concatenate([A, B]), np.concatenate([B, B])), strict=True):
        one.set_shape([2, 16])
        one.set_data_from_numpy(array)
    result = await face.ask("infer", "simple", pair)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), np.concatenate([A + B, B + B]))
    if not face.grpc:
        one, other = face.inputs()
        other.set_data_from_numpy(B, binary_data=False)
        right(await face.ask("infer", "simple", [one, other]))


@both("InferInput", "set_shared_memory")
@both("InferRequestedOutput", "name", "set_shared_memory", "unset_shared_memory")
async def memory(face: Face) -> None:
    """The same objects, with and without shared memory."""
    inputs, outputs = face.inputs(), face.outputs()
    assert [output.name() for output in outputs] == ["OUTPUT0", "OUTPUT1"]
    async with face.regions(BYTES, BYTES) as (given, got):
        given.put(B)
        inputs[0].set_shared_memory(given.name, BYTES)
        outputs[0].set_shared_memory(got.name, BYTES)
        result = await face.ask("infer", "simple", inputs, outputs=outputs)
        np.testing.assert_array_equal(got.array(), B + B)
        np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), B - B)
        outputs[0].unset_shared_memory()
        inputs[0].set_data_from_numpy(A)
        right(await face.ask("infer", "simple", inputs, outputs=outputs))


@both("InferResult", "as_numpy", "get_output", "get_response")
async def result(face: Face) -> None:
    found = await face.ask("infer", "simple", face.inputs(), request_id="7")
    right(found)
    assert found.as_numpy("OUTPUT7") is None
    output, response = found.get_output("OUTPUT1"), found.get_response()
    if face.grpc:
        assert found.get_response(as_json=True)["model_name"] == "simple"
        output = {name: getattr(output, name) for name in ("name", "datatype", "shape")}
        response = {name: getattr(response, name) for name in ("model_name", "model_version", "id")}
    assert (output["name"], output["datatype"], list(output["shape"])) == ("OUTPUT1", "INT32", [1, 16])
    assert (response["model_name"], response["model_version"], response["id"]) == ("simple", "1", "7")


@case("http.InferResult.from_response_body")
async def from_body(face: Face) -> None:
    """A body that is only JSON."""
    text = b'{"model_name":"simple","outputs":[{"name":"OUTPUT0","datatype":"INT32","shape":[2],"data":[1,2]}]}'
    found = face.module.InferResult.from_response_body(text)
    assert found.as_numpy("OUTPUT0").tolist() == [1, 2]


@case("http.InferAsyncRequest.get_result")
async def asked(face: Face) -> None:
    request = face.client.async_infer("simple", face.inputs())
    right(request.get_result(block=True, timeout=WAIT_S))


@case("grpc.CallContext.cancel")
async def cancel(face: Face) -> None:
    """A cancelled request does not affect the next one."""
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    given = [face.one("INPUT", np.array([[5]], np.int32), "INT32")]
    face.client.infer("simple_sequence", given, sequence_id=77, sequence_start=True)
    call = face.client.async_infer("simple", face.inputs(), lambda result, error: answers.put((result, error)))
    call.cancel()
    result, error = answers.get(timeout=WAIT_S)
    assert result is not None or error.status() == "StatusCode.CANCELLED"
    right(face.client.infer("simple", face.inputs()))
    face.client.infer("simple_sequence", given, sequence_id=77, sequence_end=True)


@case("grpc.KeepAliveOptions.use")
async def keep_alive(face: Face) -> None:
    options = face.module.KeepAliveOptions(
        keepalive_time_ms=20_000, keepalive_permit_without_calls=True, http2_max_pings_without_data=0
    )
    client = face.made(keepalive_options=options)
    right(client.infer("simple", face.inputs()))
    client.close()


@case("http.auth.BasicAuth.use", "grpc.auth.BasicAuth.use")
async def basic_auth(face: Face) -> None:
    """It adds a header, which an endpoint without access control ignores."""
    auth = importlib.import_module(f"tritonclient.{face.name}.auth").BasicAuth("user", "word")
    face.client.register_plugin(auth)
    right(face.client.infer("simple", face.inputs()))
    face.client.unregister_plugin()


# ---------------------------------------------------------------------------------------- functions

TYPES = {
    "BOOL": np.bool_, "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64, "UINT8": np.uint8,
    "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64, "FP16": np.float16, "FP32": np.float32,
    "FP64": np.float64, "BYTES": np.object_,
}  # fmt: skip


@case("utils.np_to_triton_dtype", "utils.triton_to_np_dtype")
async def types(face: Face) -> None:
    assert all(np.dtype(utils.triton_to_np_dtype(name)) == kind for name, kind in TYPES.items())
    assert [utils.np_to_triton_dtype(np.dtype(kind)) for kind in TYPES.values()] == list(TYPES)
    for one in (await face.document("get_model_metadata", "simple"))["inputs"]:
        assert utils.triton_to_np_dtype(one["datatype"]) == A.dtype


@case("utils.serialize_byte_tensor", "utils.deserialize_bytes_tensor", "utils.serialized_byte_size")
async def words(face: Face) -> None:
    """Strings in a region, serialized and deserialized by the functions."""
    given = np.array([[b"one", b"", b"three"]], object)
    packed = utils.serialize_byte_tensor(given)
    size = utils.serialized_byte_size(packed)
    async with face.regions(size) as (region,):
        region.put(packed)
        sent = face.module.InferInput("INPUT0", [1, 3], "BYTES")
        wanted = face.module.InferRequestedOutput("OUTPUT0", binary_data=True)
        for one in (sent, wanted):
            one.set_shared_memory(region.name, size)
        await face.ask("infer", "simple_identity", [sent], outputs=[wanted])
        found = shm.get_contents_as_numpy(region.handle, np.object_, [1, 3])
        np.testing.assert_array_equal(found, given)
    assert utils.deserialize_bytes_tensor(packed.item()).tolist() == given[0].tolist()


@case("utils.raise_error")
async def error(face: Face) -> None:
    text = ""
    try:
        utils.raise_error("so")
    except utils.InferenceServerException as raised:
        text = raised.message()
    assert text == "so"


@case(*[f"utils.shared_memory.{name}" for name in FUNCTIONS["utils.shared_memory"]])
async def regions(face: Face) -> None:
    """One region with both inputs and both outputs in it."""
    async with face.regions(4 * BYTES) as (region,):
        assert shm.mapped_shared_memory_regions() == [region.key]
        region.put(A, B)
        inputs, outputs = face.inputs(), face.outputs()
        for index in range(2):
            inputs[index].set_shared_memory(region.name, BYTES, index * BYTES)
            outputs[index].set_shared_memory(region.name, BYTES, (2 + index) * BYTES)
        await face.ask("infer", "simple", inputs, outputs=outputs)
        np.testing.assert_array_equal(region.array(2 * BYTES), A + B)
        np.testing.assert_array_equal(region.array(3 * BYTES), A - B)
    assert shm.mapped_shared_memory_regions() == []
