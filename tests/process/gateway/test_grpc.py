"""The gRPC endpoint of a real gateway, with grpcio and stubs generated from the .proto as its client."""

from __future__ import annotations

import json
import os
import secrets
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import posix_ipc
import pytest

from shmserve import Client
from shmserve.dtypes import ITEM_BYTES
from shmserve.testing import Server
from tests.conformance.client_ways import NUMBERS, data
from tests.support.gateway.rpc import INFERENCE, Rpcs, infer_request, message, outputs, parameter, refused, talk
from tests.support.gateway.running_gateway import Gateway, model, open_gate, talker, wait_in_flight
from tests.support.shared_server import SharedServer

pytestmark = pytest.mark.process

OVERRIDE = {
    "backend": "identity",
    "max_batch_size": 3,
    "input": [{"name": "i_FP32", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [{"name": "o_FP32", "data_type": "TYPE_FP32", "dims": [-1]}],
}


FAILED_LOAD = "failed to load 'spare', failed to poll from model repository"


@pytest.fixture(scope="module")
def server(shared_server: SharedServer, repository: Path, gate: Path) -> Iterator[Server]:
    model(repository, "types", list(ITEM_BYTES), "[ -1, -1 ]", 0)
    model(repository, "row", ["FP32"], "[ -1 ]", 8, "dynamic_batching { }\n")
    model(repository, "spare", ["FP32"], "[ -1 ]", 8)
    talker(repository)
    with shared_server.serving(repository) as running:
        yield running


@pytest.fixture(scope="module")
def gateway(server: Server) -> Iterator[Gateway]:
    options = ("--allow-client-shm", "--grpc-infer-response-compression-level=low")
    made = Gateway(server, "--grpc-roles=infer,observe,operate", *options)
    yield made
    log = made.stop().decode()
    assert "Traceback" not in log
    assert "ERROR" not in log


@pytest.fixture(scope="module")
def rpcs(gateway: Gateway) -> Iterator[Rpcs]:
    with Rpcs(gateway.grpc) as made:
        yield made


def succeeded(client: Client, model: str) -> int:
    """The number of requests to a model that have succeeded."""
    (found,) = client.statistics(model)["model_stats"]
    return int(found["inference_stats"]["success"]["count"])


def row(width: int, value: float = 0.0, name: str = "row", **more: Any) -> Any:
    array = np.full((1, width), value, np.float32)
    return infer_request(name, {"i_FP32": ("FP32", array, array.tobytes())}, **more)


def count(number: int, **more: Any) -> Any:
    array = np.array([number], np.int32)
    return infer_request("talker", {"count": ("INT32", array, array.tobytes())}, **more)


def test_health_documents_and_statistics(rpcs: Rpcs) -> None:
    assert rpcs.ServerLive(message("ServerLiveRequest")).live
    assert rpcs.ServerReady(message("ServerReadyRequest")).ready
    for name, version, ready in (("row", "", True), ("row", "1", True), ("row", "2", False), ("nothing", "", False)):
        assert rpcs.ModelReady(message("ModelReadyRequest", name=name, version=version)).ready is ready
    server = rpcs.ServerMetadata(message("ServerMetadataRequest"))
    assert server.name == "shmserve"
    known = {"classification", "sequence", "model_repository", "statistics", "parameters", "binary_tensor_data"}
    assert known | {"system_shared_memory", "cuda_shared_memory"} <= set(server.extensions)
    metadata = rpcs.ModelMetadata(message("ModelMetadataRequest", name="row"))
    (tensor,) = metadata.inputs
    assert (metadata.name, list(metadata.versions), metadata.platform) == ("row", ["1"], "identity")
    assert (tensor.name, tensor.datatype, list(tensor.shape)) == ("i_FP32", "FP32", [-1, -1])
    assert refused(rpcs.ModelConfig, message("ModelConfigRequest", name="nothing"))[0] == "NOT_FOUND"
    asked = message("ModelStatisticsRequest", name="row")
    (before,) = rpcs.ModelStatistics(asked).model_stats
    rpcs.ModelInfer(row(4))
    (after,) = rpcs.ModelStatistics(asked).model_stats
    assert after.inference_stats.success.count == before.inference_stats.success.count + 1
    watched = rpcs.Watch(message("grpc.health.v1.HealthCheckRequest", service=INFERENCE), timeout=60)
    assert next(watched).status == 1
    watched.cancel()


def test_load_and_unload(rpcs: Rpcs) -> None:
    def load(config: str) -> Any:
        given = {"config": {"string_param": config}}
        return message("RepositoryModelLoadRequest", model_name="spare", parameters=given)

    rpcs.RepositoryModelLoad(load(json.dumps(OVERRIDE)))
    assert rpcs.ModelConfig(message("ModelConfigRequest", name="spare")).config.max_batch_size == 3
    code, text = refused(rpcs.RepositoryModelLoad, load('{"nothing": 1}'))
    assert (code, text.partition(": ")[0]) == ("INTERNAL", FAILED_LOAD)
    rpcs.RepositoryModelUnload(message("RepositoryModelUnloadRequest", model_name="spare"))
    while "spare" in [one.name for one in rpcs.RepositoryIndex(message("RepositoryIndexRequest", ready=True)).models]:
        continue


@pytest.mark.parametrize("elements", [0, 6, 40_000])
def test_every_data_type_as_bytes(rpcs: Rpcs, elements: int) -> None:
    """All types in one request, in messages and in shared memory."""
    shape = (2, elements // 2)
    words = [b"\xff" * (number % 5) for number in range(elements)]
    inputs = {f"i_{dtype}": (dtype, data(dtype, shape), data(dtype, shape).tobytes()) for dtype in NUMBERS}
    lengths = b"".join(struct.pack("<I", len(word)) + word for word in words)
    inputs["i_BYTES"] = "BYTES", np.array(words, object).reshape(shape), lengths
    answer = rpcs.ModelInfer(infer_request("types", inputs))
    assert outputs(answer) == {f"o_{dtype}": inputs[f"i_{dtype}"][2] for dtype in ITEM_BYTES}
    assert [tuple(one.shape) for one in answer.outputs] == [shape] * len(ITEM_BYTES)


def test_tensors_in_shared_memory(rpcs: Rpcs) -> None:
    """Of a single request, and of one over a stream."""
    key = f"/test-{secrets.token_hex(8)}"
    memory = posix_ipc.SharedMemory(key, posix_ipc.O_CREX, size=1 << 16)
    try:
        array = np.arange(4096, dtype=np.float32).reshape(1, -1)
        os.pwrite(memory.fd, array.tobytes(), 0)
        registered = message("SystemSharedMemoryRegisterRequest", name="r", key=key, byte_size=1 << 16)
        rpcs.SystemSharedMemoryRegister(registered)
        request = message("ModelInferRequest", model_name="row")
        one = request.inputs.add(name="i_FP32", datatype="FP32", shape=array.shape)
        two = request.outputs.add(name="o_FP32")
        for tensor, offset in ((one, 0), (two, 1 << 15)):
            place = {"shared_memory_region": "r", "shared_memory_byte_size": 1 << 14, "shared_memory_offset": offset}
            for name, value in place.items():
                parameter(tensor.parameters[name], value)
        with talk(rpcs) as stream:

            def over_a_stream(request: Any) -> Any:
                stream.say(request)
                return stream.hear(1)[0].infer_response

            for infer in (rpcs.ModelInfer, over_a_stream):
                os.pwrite(memory.fd, bytes(1 << 14), 1 << 15)
                assert list(infer(request).raw_output_contents) == [b""]
                assert os.pread(memory.fd, 1 << 14, 1 << 15) == array.tobytes()
        rpcs.SystemSharedMemoryUnregister(message("SystemSharedMemoryUnregisterRequest"))
        assert refused(rpcs.ModelInfer, request) == ("NOT_FOUND", "Unable to find shared memory region: 'r'")
        assert not rpcs.SystemSharedMemoryStatus(message("SystemSharedMemoryStatusRequest")).regions
    finally:
        memory.close_fd()
        memory.unlink()


def test_large_messages_with_and_without_compression(rpcs: Rpcs) -> None:
    large = row(5_000_000, 1.5)
    for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
        assert outputs(rpcs.ModelInfer(large, compression=compression))["o_FP32"] == large.raw_input_contents[0]


def test_no_call_is_lost_when_a_connection_reaches_its_maximum_age(server: Server) -> None:
    """A call that grpcio was about to send when the connection ended fails in the client. None that the gateway has
    received does."""
    gateway = Gateway(server, "--grpc-max-connection-age", "50")
    with Rpcs(gateway.grpc) as rpcs, server.client() as client:
        before, answered = succeeded(client, "row"), 0
        states: list[Any] = []
        rpcs.channel.subscribe(states.append)
        while states.count(grpc.ChannelConnectivity.READY) < 4:
            sent = [row(500, number) for number in range(20)]
            calls = [rpcs.ModelInfer.future(request) for request in sent]
            for request, call in zip(sent, calls, strict=True):
                if call.exception(60) is None:
                    assert outputs(call.result())["o_FP32"] == request.raw_input_contents[0]
                    answered += 1
                else:
                    assert call.details().startswith("Stream removed"), call.details()
        assert answered == succeeded(client, "row") - before > 0
    assert "Traceback" not in gateway.stop().decode()


@pytest.mark.parametrize("way", ["cancel", "deadline", "stream", "channel"])
def test_a_disconnected_client_cancels_its_requests(gateway: Gateway, server: Server, gate: Path, way: str) -> None:
    with Rpcs(gateway.grpc) as rpcs:
        if way == "stream":
            with talk(rpcs) as stream:
                stream.say(*[row(4, name="gated") for _ in range(6)])
                wait_in_flight(server, 6, 6)
        else:
            calls = [rpcs.ModelInfer.future(row(30_000, name="gated"))]
            wait_in_flight(server, 1, 1)  # on a busy machine, none of those with a deadline might arrive
            limit = 0.5 if way == "deadline" else 60.0
            calls += [rpcs.ModelInfer.future(row(30_000, name="gated"), timeout=limit) for _ in range(5)]
            if way == "deadline":
                for call in calls[1:]:
                    assert call.exception(60).code() is grpc.StatusCode.DEADLINE_EXCEEDED
            else:
                wait_in_flight(server, 6, 6)
            if way != "channel":
                for call in calls:
                    call.cancel()
    wait_in_flight(server, 1, 2)  # the worker has one running and one waiting request, and reads orders when it is done
    open_gate(gate)
    wait_in_flight(server, 0, 0)


def test_a_stream_of_many_requests(rpcs: Rpcs) -> None:
    """More requests than may be in flight, small and large, with one error, are answered in order."""
    with talk(rpcs) as stream:
        widths = [20_000 if number % 7 == 0 else 4 for number in range(600)]
        for number, width in enumerate(widths):
            stream.say(row(width, number, id=str(number)) if number != 300 else row(4, name="nothing", id="300"))
        answers = stream.rest()
    assert [answer.infer_response.id for answer in answers] == [str(number) for number in range(600)]
    for number, (answer, width) in enumerate(zip(answers, widths, strict=True)):
        if number == 300:
            assert "'nothing'" in answer.error_message
            continue
        assert answer.infer_response.parameters["triton_final_response"].bool_param
        assert outputs(answer.infer_response)["o_FP32"] == np.full(width, number, np.float32).tobytes()


def numbers(answers: list[Any]) -> list[tuple[int | str | None, bool]]:
    """The number or error of each response, and whether it is the final one."""
    found: list[tuple[int | str | None, bool]] = []
    for one in answers:
        raw = one.infer_response.raw_output_contents
        final = "triton_final_response" in one.infer_response.parameters
        final = final and one.infer_response.parameters["triton_final_response"].bool_param
        found.append((one.error_message or (int(np.frombuffer(raw[0], np.int32)[0]) if raw else None), final))
    return found


def test_a_stream_of_a_decoupled_model(rpcs: Rpcs) -> None:
    empty = {"triton_enable_empty_final_response": True}
    with talk(rpcs) as stream:
        stream.say(count(3))
        assert numbers(stream.hear(3)) == [(0, False), (1, False), (2, False)]
        stream.say(count(2, parameters=empty))
        assert numbers(stream.hear(3)) == [(0, False), (1, False), (None, True)]
        stream.say(count(0))
        stream.say(count(0, parameters=empty))
        assert numbers(stream.hear(1)) == [(None, True)]
        stream.say(count(-2))
        *first, (error, _) = numbers(stream.hear(3))
        assert first == [(0, False), (1, False)]
        assert "no more today" in str(error)
        stream.say(count(1000), row(4))
        answers = stream.rest()
    assert len(answers) == 1001
    talked = [one for one in answers if one.infer_response.model_name == "talker"]
    assert [number for number, _ in numbers(talked)] == list(range(1000))
