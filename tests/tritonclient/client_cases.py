"""A case for each method of the clients, the same for all four.

A function has the name of the method that it tests, and removes what it has created on the server.
"""

from __future__ import annotations

import json
import queue
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from tests.tritonclient.faces import ABSENT, BYTES, A, B, Face, done, right

WAIT_S = 20


async def is_server_live(face: Face) -> None:
    assert await face.ask("is_server_live", headers={"test": "1"}) is True
    assert await face.ask("is_server_ready") is True


is_server_ready = is_server_live


async def is_model_ready(face: Face) -> None:
    assert await face.ask("is_model_ready", "simple") is True
    assert await face.ask("is_model_ready", "simple", "1") is True
    assert await face.ask("is_model_ready", ABSENT) is False
    assert await face.ask("is_model_ready", "simple", "7") is False


async def get_server_metadata(face: Face) -> None:
    found = await face.document("get_server_metadata")
    assert found["name"] == "triton"
    assert {"classification", "sequence", "model_repository", "statistics", "parameters"} <= set(found["extensions"])


async def get_model_metadata(face: Face) -> None:
    found = await face.document("get_model_metadata", "simple")
    assert (found["name"], found["versions"], found["platform"]) == ("simple", ["1"], "python")
    tensors = [(one["name"], one["datatype"], [int(dim) for dim in one["shape"]]) for one in found["inputs"]]
    assert tensors == [("INPUT0", "INT32", [-1, 16]), ("INPUT1", "INT32", [-1, 16])]
    assert [one["name"] for one in found["outputs"]] == ["OUTPUT0", "OUTPUT1"]
    assert "nothing" in await face.refused("404", "get_model_metadata", ABSENT)


async def get_model_config(face: Face) -> None:
    config = await face.config("simple")
    assert (config["name"], config["max_batch_size"]) == ("simple", 8)
    assert [one["dims"] for one in config["input"]] == ([["16"]] * 2 if face.grpc else [[16]] * 2)
    await face.refused("404", "get_model_config", ABSENT)


async def get_model_repository_index(face: Face) -> None:
    found = await face.document("get_model_repository_index")
    states = {one["name"]: one.get("state") for one in (found["models"] if face.grpc else found)}
    assert (states["simple"], states["simple_identity"]) == ("READY", "READY")


async def get_inference_statistics(face: Face) -> None:
    async def count() -> int:
        found = await face.document("get_inference_statistics", "simple", "1")
        (stats,) = found["model_stats"]
        assert (stats["name"], stats["version"]) == ("simple", "1")
        return int(stats["inference_stats"]["success"].get("count", 0))

    before = await count()
    right(await face.ask("infer", "simple", face.inputs()))
    assert await count() == before + 1
    names = {one["name"] for one in (await face.document("get_inference_statistics"))["model_stats"]}
    assert {"simple", "simple_identity"} <= names


def _setting(found: Any, name: str) -> Any:
    """A setting, which gRPC returns as a list of strings or as one of several fields."""
    if "settings" not in found:
        return found[name]
    (value,) = found["settings"][name].values()
    return value[0] if isinstance(value, list) and name != "trace_level" else value


async def get_trace_settings(face: Face) -> None:
    for model in (None, "simple"):
        found = await face.document("get_trace_settings", model)
        assert (_setting(found, "trace_level"), _setting(found, "trace_rate")) == (["OFF"], "1000")
    await face.refused("400|404", "get_trace_settings", ABSENT)
    for value, expected in (("500", "500"), (None, "1000")):
        found = await face.document("update_trace_settings", "simple", {"trace_rate": value})
        assert _setting(found, "trace_rate") == expected
        assert _setting(await face.document("get_trace_settings"), "trace_rate") == "1000"


async def get_log_settings(face: Face) -> None:
    assert _setting(await face.document("get_log_settings"), "log_info") is True
    for level, warns in ((1, False), (0, True)):
        for found in (
            await face.document("update_log_settings", {"log_verbose_level": level, "log_warning": warns}),
            await face.document("get_log_settings"),
        ):
            assert (_setting(found, "log_verbose_level"), _setting(found, "log_warning")) == (level, warns)


update_trace_settings, update_log_settings = get_trace_settings, get_log_settings


async def load_model(face: Face) -> None:
    await face.ask("load_model", "simple_string", config=json.dumps({"max_batch_size": 16}))
    assert (await face.config("simple_string"))["max_batch_size"] == 16
    await face.ask("unload_model", "simple_string", unload_dependents=True)
    assert await face.ask("is_model_ready", "simple_string") is False
    await face.ask("load_model", "simple_string")
    assert (await face.config("simple_string"))["max_batch_size"] == 8
    if (await face.config("simple_identity"))["backend"] == "identity":  # Triton has no such backend
        tensors = {
            kind: [{"name": name, "data_type": "TYPE_INT32", "dims": [16]}]
            for kind, name in (("input", "IN"), ("output", "OUT"))
        }
        config = json.dumps({"backend": "identity", "max_batch_size": 2, **tensors})
        await face.ask("load_model", "sent", config=config, files={"file:1/weights": b"\x00\xff"})
        result = await face.ask("infer", "sent", [face.one("IN", A, "INT32")])
        np.testing.assert_array_equal(result.as_numpy("OUT"), A)
        await face.ask("unload_model", "sent")
    assert "failed to load" in await face.refused("400|404|500", "load_model", ABSENT)
    await face.ask("unload_model", ABSENT)


unload_model = load_model


async def register_system_shared_memory(face: Face) -> None:
    async with face.regions(2 * BYTES, 2 * BYTES) as (given, got):
        given.put(A, B)
        await face.refused("400|500", "register_system_shared_memory", "bad", given.key, 1 << 30)
        inputs, outputs = face.inputs(), face.outputs()
        for index in range(2):
            inputs[index].set_shared_memory(given.name, BYTES, index * BYTES)
            outputs[index].set_shared_memory(got.name, BYTES, index * BYTES)
        await face.ask("infer", "simple", inputs, outputs=outputs)
        np.testing.assert_array_equal(got.array(), A + B)
        np.testing.assert_array_equal(got.array(BYTES), A - B)


async def get_system_shared_memory_status(face: Face) -> None:
    async with face.regions(BYTES // 2) as (one,):
        (found,) = await face.mapped(one.name)
        assert (found["name"], found["key"], int(found["byte_size"])) == (one.name, one.key, BYTES // 2)
        await face.ask("unregister_system_shared_memory", one.name)
        assert await face.mapped() == []
        inputs = face.inputs()
        inputs[0].set_shared_memory(one.name, BYTES // 2)
        assert one.name in await face.refused("404", "infer", "simple", inputs)
    async with face.regions(BYTES, BYTES):
        await face.ask("unregister_system_shared_memory")
        assert await face.mapped() == []


unregister_system_shared_memory = get_system_shared_memory_status


async def register_cuda_shared_memory(face: Face) -> None:
    """An invalid handle is refused. A valid one needs a GPU."""
    await face.refused("400|404|500", "register_cuda_shared_memory", "cuda", b"A" * 88, 0, BYTES)
    found = await face.document("get_cuda_shared_memory_status")
    assert (found.get("regions", {}) if face.grpc else found) in ({}, [])
    await face.ask("unregister_cuda_shared_memory", "cuda")
    await face.ask("unregister_cuda_shared_memory")


get_cuda_shared_memory_status = unregister_cuda_shared_memory = register_cuda_shared_memory


async def infer(face: Face) -> None:
    right(await face.ask("infer", "simple", face.inputs()))
    result = await face.ask("infer", "simple", face.inputs(), "1", outputs=face.outputs()[1:], request_id="me")
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), A - B)
    assert result.as_numpy("OUTPUT0") is None
    response = result.get_response()
    assert (response.id if face.grpc else response["id"]) == "me"
    for algorithm in ("gzip", "deflate"):
        ways = [""] if face.grpc else ["request_", "response_"]
        options = {f"{way}compression_algorithm": algorithm for way in ways}
        right(await face.ask("infer", "simple", face.inputs(), priority=1, timeout=5_000_000, **options))
    classes = face.module.InferRequestedOutput("OUTPUT0", class_count=2)
    (found,) = (await face.ask("infer", "simple", face.inputs(), outputs=[classes])).as_numpy("OUTPUT0")
    assert [text.split(b":") for text in found] == [[found[0].split(b":")[0], b"15"], [found[1].split(b":")[0], b"14"]]
    large = np.arange(400_000, dtype=np.int32).reshape(1, -1)
    result = await face.ask("infer", "custom_identity_int32", [face.one("INPUT0", large, "INT32")])
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), large)
    words = np.array([[b"he\x00llo", b"", "wörld".encode()]], object)
    result = await face.ask("infer", "simple_identity", [face.one("INPUT0", words, "BYTES")])
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), words)
    await face.refused("404", "infer", ABSENT, face.inputs())
    assert "expected 2 inputs but got 1" in await face.refused("400", "infer", "simple", face.inputs()[:1])
    for shape, text in (((1, 17), "unexpected shape for input"), ((9, 16), "<= 8")):
        wrong = [face.one(name, np.zeros(shape, np.int32), "INT32") for name in ("INPUT0", "INPUT1")]
        assert text in await face.refused("400", "infer", "simple", wrong)
    for sequence in (42, "of words"):
        for value, start, end in ((5, True, False), (6, False, False), (7, False, True)):
            given = [face.one("INPUT", np.array([[value]], np.int32), "INT32")]
            result = await face.ask(
                "infer", "simple_sequence", given, sequence_id=sequence, sequence_start=start, sequence_end=end
            )
            assert result.as_numpy("OUTPUT").tolist() == [[value + start]]


async def async_infer(face: Face) -> None:
    if not face.grpc:
        for request in [face.client.async_infer("simple", face.inputs()) for _ in range(4)]:
            right(request.get_result(timeout=WAIT_S))
        return
    answers = Answers()
    for model in (*["simple"] * 4, ABSENT):
        face.client.async_infer(model, face.inputs(), answers.put)
    found = [answers.get() for _ in range(5)]
    (error,) = [one for one in found if isinstance(one, Exception)]
    assert error.status() == "StatusCode.NOT_FOUND"  # type: ignore[attr-defined]
    for result in found:
        if result is not error:
            right(result)


def _repeat(face: Face) -> list[Any]:
    arrays = {"IN": np.array([7, 8, 9], np.int32), "DELAY": np.zeros(3, np.uint32), "WAIT": np.zeros(1, np.uint32)}
    return [face.one(name, array, "INT32" if name == "IN" else "UINT32") for name, array in arrays.items()]


class Answers:
    """The results and errors that a client reports to its callback."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Any] = queue.Queue()

    def put(self, result: Any, error: Any) -> None:
        self._queue.put(error or result)

    def get(self) -> Any:
        return self._queue.get(timeout=WAIT_S)


async def async_stream_infer(face: Face) -> None:
    """Responses of models that are not decoupled have the order of the requests; others arrive when sent."""
    answers = Answers()
    face.client.start_stream(answers.put)
    face.client.async_stream_infer("simple", face.inputs(), request_id="1")
    face.client.async_stream_infer(ABSENT, face.inputs(), request_id="2")
    face.client.async_stream_infer("repeat_int32", _repeat(face), request_id="3", enable_empty_final_response=True)
    found: list[int] = []
    once: list[Any] = []
    last = False
    while not last or len(once) < 2:
        result = answers.get()
        if isinstance(result, Exception) or result.get_response().id == "1":
            once.append(result)
            continue
        last = result.get_response().parameters["triton_final_response"].bool_param
        found += [] if result.as_numpy("OUT") is None else result.as_numpy("OUT").tolist()
    assert found == [7, 8, 9]
    right(once[0])
    assert "nothing" in once[1].message()
    for value, start, end in ((5, True, False), (6, False, True)):
        given = [face.one("INPUT", np.array([[value]], np.int32), "INT32")]
        face.client.async_stream_infer("simple_sequence", given, sequence_id=9, sequence_start=start, sequence_end=end)
    assert [answers.get().as_numpy("OUTPUT").item() for _ in range(2)] == [6, 6]
    face.client.stop_stream()


async def stop_stream(face: Face) -> None:
    """It waits for requests in flight, or cancels them."""
    answers = Answers()
    for cancel in (False, True):
        face.client.start_stream(answers.put, headers={"test": "1"})
        face.client.async_stream_infer("simple", face.inputs())
        face.client.stop_stream(cancel_requests=cancel)
        if not cancel:
            right(answers.get())
    face.client.start_stream(answers.put)
    face.client.stop_stream()
    assert face.client.is_server_live()


start_stream = stop_stream


async def stream_infer(face: Face) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "simple", "inputs": face.inputs()}
        yield {"model_name": ABSENT, "inputs": face.inputs()}
        yield {"model_name": "repeat_int32", "inputs": _repeat(face)}

    once, found = [], []
    async for result, error in face.client.stream_infer(requests()):
        if error is not None or result.get_response().model_name == "simple":
            once.append(error or result)
        else:
            found.append(result.as_numpy("OUT").item())
    assert found == [7, 8, 9]
    right(once[0])
    assert "nothing" in once[1].message()


async def generate_request_body(face: Face) -> None:
    """The body is sent with another HTTP client."""
    body, length = face.module.InferenceServerClient.generate_request_body(face.inputs(), outputs=face.outputs())
    asked = urllib.request.Request(f"http://{face.url}/v2/models/simple/infer", bytes(body))
    asked.add_header("Content-Type", "application/octet-stream")
    asked.add_header("Inference-Header-Content-Length", str(length))
    with urllib.request.urlopen(asked, timeout=WAIT_S) as answer:
        length = int(answer.headers["Inference-Header-Content-Length"])
        right(face.module.InferenceServerClient.parse_response_body(answer.read(), header_length=length))


parse_response_body = generate_request_body


async def close(face: Face) -> None:
    client = face.made()
    assert await done(client.is_server_live()) is True
    await done(client.close())


async def plugin(face: Face) -> None:
    """A plug-in sees every request, and what it adds is sent."""
    seen: list[str] = []

    class Marks(face.module.InferenceServerClientPlugin):  # type: ignore[misc, name-defined]
        def __call__(self, request: Any) -> None:
            request.headers["x-mark"] = "7"
            seen.append("asked")

    made = Marks()
    face.client.register_plugin(made)
    assert face.client.plugin() is made
    assert await face.ask("is_server_live") is True
    right(await face.ask("infer", "simple", face.inputs()))
    face.client.unregister_plugin()
    assert face.client.plugin() is None
    assert await face.ask("is_server_live") is True
    assert seen == ["asked", "asked"]


register_plugin = unregister_plugin = plugin
