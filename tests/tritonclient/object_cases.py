"""Cases for the arguments and results of clients that have an effect on the server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import numpy as np
from tritonclient import utils
from tritonclient.utils import shared_memory as shm

from tests.tritonclient.client_cases import Answers
from tests.tritonclient.faces import BYTES, A, B, Face, right

Case = Callable[[Face], Awaitable[None]]


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


async def cancel(face: Face) -> None:
    """A cancelled request does not affect the next one."""
    answers = Answers()
    call = face.client.async_infer("simple", face.inputs(), answers.put)
    call.cancel()
    answer = answers.get()
    if isinstance(answer, Exception):
        assert answer.status() == "StatusCode.CANCELLED"  # type: ignore[attr-defined]
    right(face.client.infer("simple", face.inputs()))


async def keep_alive(face: Face) -> None:
    options = face.module.KeepAliveOptions(
        keepalive_time_ms=20_000, keepalive_permit_without_calls=True, http2_max_pings_without_data=0
    )
    client = face.made(keepalive_options=options)
    right(client.infer("simple", face.inputs()))
    client.close()


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


CASES: dict[str, tuple[Case, ...]] = {
    "http": (inputs, memory, result, words),
    "grpc": (inputs, memory, result, cancel, keep_alive),
}
"""Face -> its cases."""
