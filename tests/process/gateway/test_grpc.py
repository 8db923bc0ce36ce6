"""The gRPC endpoint of a real gateway, with grpcio and stubs generated from the .proto as its client."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import posix_ipc
import pytest

from shmserve.dtypes import ITEM_BYTES
from shmserve.gateway.kserve.json_tensors import CONTENTS
from shmserve.testing import Server
from tests.conformance.client_ways import data
from tests.support.gateway.rpc import INFERENCE, POOL, Rpcs, infer_request, message, outputs, parameter, refused, talk
from tests.support.gateway.running_gateway import (
    Gateway,
    metric,
    model,
    open_gate,
    talker,
    wait_in_flight,
)
from tests.support.model_files import write_model

pytestmark = pytest.mark.process

SUMMER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        answers = []
        for request in requests:
            value, start, key = (
                int(pb_utils.get_input_tensor_by_name(request, name).as_numpy().ravel()[0]) for name in ("i", "S", "K")
            )
            self.sums[key] = value + (0 if start else self.sums[key])
            total = pb_utils.get_input_tensor_by_name(request, "i").as_numpy() * 0 + self.sums[key]
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("o", total)]))
        return answers
"""
SUMS = """
name: "summer" backend: "python" max_batch_size: 4
input [ { name: "i" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "o" data_type: TYPE_INT32 dims: [ 1 ] } ]
sequence_batching { control_input [
  { name: "S" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
  { name: "K" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] }
] }
"""

OVERRIDE = {
    "backend": "identity",
    "max_batch_size": 3,
    "input": [{"name": "i_FP32", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [{"name": "o_FP32", "data_type": "TYPE_FP32", "dims": [-1]}],
}


@pytest.fixture(scope="module")
def server(repository: Path, gate: Path) -> Iterator[Server]:
    model(repository, "types", list(ITEM_BYTES), "[ -1, -1 ]", 0)
    model(repository, "typed", list(CONTENTS), "[ -1, -1 ]", 0)
    model(repository, "row", ["FP32"], "[ -1 ]", 8, "dynamic_batching { }\n")
    model(repository, "row, too", ["FP32"], "[ -1 ]", 8)
    model(repository, "spare", ["FP32"], "[ -1 ]", 8)
    talker(repository)
    write_model(repository, "summer", SUMS, SUMMER)
    with Server(repository, "--model-control-mode", "explicit", "--load-model", "*") as running:
        yield running


@pytest.fixture(scope="module")
def gateway(server: Server) -> Iterator[Gateway]:
    made = Gateway(server, "--grpc-roles=infer,observe,operate", "--allow-client-shm")
    yield made
    log = made.stop().decode()
    assert "Traceback" not in log
    assert "ERROR" not in log


@pytest.fixture(scope="module")
def rpcs(gateway: Gateway) -> Iterator[Rpcs]:
    with Rpcs(gateway.grpc) as made:
        yield made


def row(width: int, value: float = 0.0, name: str = "row", **more: Any) -> Any:
    array = np.full((1, width), value, np.float32)
    return infer_request(name, {"i_FP32": ("FP32", array, array.tobytes())}, **more)


def count(number: int, **more: Any) -> Any:
    array = np.array([number], np.int32)
    return infer_request("talker", {"count": ("INT32", array, array.tobytes())}, **more)


# ---------------------------------------------------------------------------------------- queries


def test_health_and_documents(rpcs: Rpcs) -> None:
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
    config = rpcs.ModelConfig(message("ModelConfigRequest", name="summer")).config
    control = config.sequence_batching.control_input[1].control[0]
    assert (config.max_batch_size, control.kind, control.data_type) == (4, 3, 5)
    assert refused(rpcs.ModelConfig, message("ModelConfigRequest", name="nothing"))[0] == "NOT_FOUND"
    asked = message("grpc.health.v1.HealthCheckRequest", service=INFERENCE)
    assert rpcs.Check(asked).status == 1
    watched = rpcs.Watch(asked, timeout=60)
    assert next(watched).status == 1
    watched.cancel()


def test_statistics(rpcs: Rpcs) -> None:
    asked = message("ModelStatisticsRequest", name="row")
    (before,) = rpcs.ModelStatistics(asked).model_stats
    rpcs.ModelInfer(row(4))
    (after,) = rpcs.ModelStatistics(asked).model_stats
    assert after.inference_count == before.inference_count + 1
    assert after.inference_stats.success.count == before.inference_stats.success.count + 1
    assert after.inference_stats.success.ns > before.inference_stats.success.ns
    everything = rpcs.ModelStatistics(message("ModelStatisticsRequest")).model_stats
    assert {"row", "types", "gated"} <= {one.name for one in everything}


def test_a_model_name_with_a_comma(rpcs: Rpcs) -> None:
    assert rpcs.ModelReady(message("ModelReadyRequest", name="row, too")).ready
    assert rpcs.ModelInfer(row(3, name="row, too")).model_name == "row, too"


def test_trace_and_log_settings(rpcs: Rpcs) -> None:
    def traces(model: str = "", **settings: list[str]) -> dict[str, list[str]]:
        given = {name: {"value": value} for name, value in settings.items()}
        found = rpcs.TraceSetting(message("TraceSettingRequest", model_name=model, settings=given)).settings
        return {name: list(one.value) for name, one in found.items()}

    before = traces()
    assert (before["trace_level"], before["trace_rate"]) == (["OFF"], ["1000"])
    assert traces("row", trace_rate=["7"])["trace_rate"] == ["7"]
    assert traces()["trace_rate"] == ["1000"]
    assert traces("row", trace_rate=[])["trace_rate"] == ["1000"]
    wrong = message("TraceSettingRequest", settings={"trace_rate": {"value": ["x"]}})
    assert refused(rpcs.TraceSetting, wrong)[0] == "INVALID_ARGUMENT"

    def log(**settings: dict[str, Any]) -> dict[str, Any]:
        found = rpcs.LogSettings(message("LogSettingsRequest", settings=settings)).settings
        return {name: getattr(one, one.WhichOneof("parameter_choice")) for name, one in found.items()}

    shown = log()
    assert (shown["log_info"], shown["log_verbose_level"], shown["log_format"]) == (True, 0, "default")
    assert log(log_verbose_level={"uint32_param": 1}, log_warning={"bool_param": False})["log_verbose_level"] == 1
    assert log(log_verbose_level={"uint32_param": 0}, log_warning={"bool_param": True}) == shown


def test_load_and_unload(rpcs: Rpcs) -> None:
    def state() -> dict[str, str]:
        found = rpcs.RepositoryIndex(message("RepositoryIndexRequest")).models
        return {one.name: one.state for one in found}

    rpcs.RepositoryModelUnload(message("RepositoryModelUnloadRequest", model_name="spare"))
    while state()["spare"] != "UNAVAILABLE":
        continue
    ready = rpcs.RepositoryIndex(message("RepositoryIndexRequest", ready=True)).models
    assert "spare" not in {one.name for one in ready}
    rpcs.RepositoryModelUnload(message("RepositoryModelUnloadRequest", model_name="nothing"))
    config = {"config": {"string_param": json.dumps(OVERRIDE)}}
    rpcs.RepositoryModelLoad(message("RepositoryModelLoadRequest", model_name="spare", parameters=config))
    assert rpcs.ModelConfig(message("ModelConfigRequest", name="spare")).config.max_batch_size == 3
    for parameters in ({"config": {"string_param": "?"}}, {"config": {"string_param": '{"nothing": 1}'}}):
        wrong = message("RepositoryModelLoadRequest", model_name="spare", parameters=parameters)
        code, text = refused(rpcs.RepositoryModelLoad, wrong)
        assert code == "INTERNAL"
        assert text.startswith("failed to load 'spare', failed to poll from model repository: ")
    load = message("RepositoryModelLoadRequest", model_name="spare")
    rpcs.RepositoryModelLoad(load)
    assert rpcs.ModelConfig(message("ModelConfigRequest", name="spare")).config.max_batch_size == 3
    rpcs.RepositoryModelUnload(message("RepositoryModelUnloadRequest", model_name="spare"))
    rpcs.RepositoryModelLoad(load)
    assert rpcs.ModelConfig(message("ModelConfigRequest", name="spare")).config.max_batch_size == 8
    code, _ = refused(rpcs.RepositoryIndex, message("RepositoryIndexRequest", repository_name="r"))
    assert code == "UNIMPLEMENTED"


# ---------------------------------------------------------------------------------------- inference


def tensor(dtype: str, shape: tuple[int, ...]) -> tuple[Any, bytes]:
    """An array, and its bytes in a message."""
    if dtype != "BYTES":
        array = data(dtype, shape)
        return array, array.tobytes()
    words = [b"\xff" * (number % 5) for number in range(int(np.prod(shape)))]
    return np.array(words, object).reshape(shape), b"".join(struct.pack("<I", len(word)) + word for word in words)


@pytest.mark.parametrize("elements", [0, 6, 40_000])
def test_every_data_type_as_bytes(rpcs: Rpcs, elements: int) -> None:
    """All types in one request, in messages and in shared memory."""
    inputs = {}
    for dtype in ITEM_BYTES:
        array, raw = tensor(dtype, (2, elements // 2))
        inputs[f"i_{dtype}"] = dtype, array, raw
    answer = rpcs.ModelInfer(infer_request("types", inputs))
    assert outputs(answer) == {f"o_{dtype}": inputs[f"i_{dtype}"][2] for dtype in ITEM_BYTES}
    assert [tuple(one.shape) for one in answer.outputs] == [(2, elements // 2)] * len(ITEM_BYTES)


def test_every_data_type_as_contents(rpcs: Rpcs) -> None:
    request = message("ModelInferRequest", model_name="typed")
    expected = {}
    for dtype, field in CONTENTS.items():
        array, expected[f"o_{dtype}"] = tensor(dtype, (2, 3))
        one = request.inputs.add(name=f"i_{dtype}", datatype=dtype, shape=[2, 3])
        getattr(one.contents, field).extend(array.ravel().tolist())
    assert outputs(rpcs.ModelInfer(request)) == expected


def test_request_options_and_classification(rpcs: Rpcs) -> None:
    request = row(4, 3.0, id="me", model_version="1", parameters={"mine": "x", "timeout": 10_000_000})
    parameter(request.outputs.add(name="o_FP32").parameters["classification"], 2)
    request.raw_input_contents[0] = np.array([1, 4, 2, 3], np.float32).tobytes()
    answer = rpcs.ModelInfer(request)
    assert (answer.model_name, answer.model_version, answer.id) == ("row", "1", "me")
    assert (answer.outputs[0].datatype, list(answer.outputs[0].shape)) == ("BYTES", [1, 2])
    assert answer.raw_output_contents[0] == b"\x0a\0\0\x004.000000:1\x0a\0\0\x003.000000:3"


def test_errors(rpcs: Rpcs) -> None:
    decoupled = "ModelInfer RPC doesn't support models with decoupled transaction policy"
    for request, code, expected in (
        (row(4, name="nothing"), "NOT_FOUND", "unknown model: 'nothing'"),
        (row(4, model_version="9"), "NOT_FOUND", "version 9"),
        (message("ModelInferRequest", model_name="row"), "INVALID_ARGUMENT", "expected 1 inputs"),
        (count(1), "UNIMPLEMENTED", decoupled),
        (row(50_000, parameters={"x": "y" * 100_001}), "INVALID_ARGUMENT", "over the limit of 65536"),
    ):
        found, text = refused(rpcs.ModelInfer, request)
        assert (found, expected in text) == (code, True), text
    unknown = rpcs.channel.unary_unary(f"/{INFERENCE}/Nothing")
    with pytest.raises(grpc.RpcError) as caught:
        unknown(b"", timeout=60)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def ended(call: Any) -> tuple[str, str]:
    """The status and text with which a call ends."""
    with contextlib.suppress(grpc.RpcError):
        list(call)
    return call.code().name, call.details() or ""


def test_malformed_messages_do_not_affect_other_requests(rpcs: Rpcs) -> None:
    """Sends noise, and real requests with a changed byte, to every method."""
    chance = random.Random(7)
    good = row(4, id="me", parameters={"x": 1}).SerializeToString()
    for method in POOL.FindServiceByName(INFERENCE).methods:
        call = rpcs.channel.stream_stream(f"/{INFERENCE}/{method.name}")
        for _ in range(8):
            noise = bytearray(good if chance.random() < 0.5 else chance.randbytes(chance.randrange(1, 40)))
            noise[chance.randrange(len(noise))] ^= chance.randrange(1, 256)
            code, text = ended(call(iter([bytes(noise)]), timeout=60))
            assert code != "UNKNOWN"
            assert "Traceback" not in text
    rpcs.RepositoryModelLoad(message("RepositoryModelLoadRequest", model_name="row"))
    assert outputs(rpcs.ModelInfer(row(4, 1.0)))["o_FP32"] == np.ones(4, np.float32).tobytes()


def test_tensors_in_shared_memory(rpcs: Rpcs) -> None:
    key = f"/test-{secrets.token_hex(8)}"
    memory = posix_ipc.SharedMemory(key, posix_ipc.O_CREX, size=1 << 16)
    try:
        array = np.arange(4096, dtype=np.float32).reshape(1, -1)
        os.pwrite(memory.fd, array.tobytes(), 0)
        rpcs.SystemSharedMemoryRegister(
            message("SystemSharedMemoryRegisterRequest", name="r", key=key, byte_size=1 << 16)
        )
        found = rpcs.SystemSharedMemoryStatus(message("SystemSharedMemoryStatusRequest", name="r")).regions["r"]
        assert (found.name, found.key, found.offset, found.byte_size) == ("r", key, 0, 1 << 16)
        request = message("ModelInferRequest", model_name="row")
        one = request.inputs.add(name="i_FP32", datatype="FP32", shape=array.shape)
        two = request.outputs.add(name="o_FP32")
        for tensor, offset in ((one, 0), (two, 1 << 15)):
            place = {"shared_memory_region": "r", "shared_memory_byte_size": 1 << 14, "shared_memory_offset": offset}
            for name, value in place.items():
                parameter(tensor.parameters[name], value)
        answer = rpcs.ModelInfer(request)
        assert list(answer.raw_output_contents) == [b""]
        assert os.pread(memory.fd, 1 << 14, 1 << 15) == array.tobytes()
        with talk(rpcs) as stream:
            os.pwrite(memory.fd, bytes(1 << 14), 1 << 15)
            stream.say(request)
            assert list(stream.hear(1)[0].infer_response.raw_output_contents) == [b""]
            assert os.pread(memory.fd, 1 << 14, 1 << 15) == array.tobytes()
        rpcs.SystemSharedMemoryUnregister(message("SystemSharedMemoryUnregisterRequest"))
        assert refused(rpcs.ModelInfer, request) == ("NOT_FOUND", "Unable to find shared memory region: 'r'")
        assert not rpcs.SystemSharedMemoryStatus(message("SystemSharedMemoryStatusRequest")).regions
        assert not rpcs.CudaSharedMemoryStatus(message("CudaSharedMemoryStatusRequest")).regions
        wrong = message("CudaSharedMemoryRegisterRequest", name="c", raw_handle=b"x", byte_size=1)
        assert refused(rpcs.CudaSharedMemoryRegister, wrong)[0] in ("UNIMPLEMENTED", "INVALID_ARGUMENT")
        rpcs.CudaSharedMemoryUnregister(message("CudaSharedMemoryUnregisterRequest", name="c"))
    finally:
        memory.close_fd()
        memory.unlink()


# ---------------------------------------------------------------------------------------- cancellation


@pytest.mark.parametrize("way", ["cancel", "deadline", "stream", "channel"])
def test_a_disconnected_client_cancels_its_requests(gateway: Gateway, server: Server, gate: Path, way: str) -> None:
    with Rpcs(gateway.grpc) as rpcs:
        if way == "stream":
            with talk(rpcs) as stream:
                stream.say(*[row(4, name="gated") for _ in range(6)])
                wait_in_flight(server, 6, 6)
        else:
            limit = 0.5 if way == "deadline" else 60.0
            calls = [rpcs.ModelInfer.future(row(30_000, name="gated"), timeout=limit) for _ in range(6)]
            if way == "deadline":
                for call in calls:
                    assert call.exception(60).code() is grpc.StatusCode.DEADLINE_EXCEEDED
            else:
                wait_in_flight(server, 6, 6)
            if way == "cancel":
                for call in calls:
                    call.cancel()
    wait_in_flight(server, 1, 2)  # the worker has one running and one waiting request, and reads orders when it is done
    open_gate(gate)
    wait_in_flight(server, 0, 0)


# ---------------------------------------------------------------------------------------- streams


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


def test_closing_a_long_stream_cancels_it(rpcs: Rpcs, server: Server) -> None:
    with talk(rpcs) as stream:
        stream.say(count(50_000))
        assert numbers(stream.hear(2)) == [(0, False), (1, False)]
    wait_in_flight(server, 0, 0)


def test_sequences_over_a_stream(rpcs: Rpcs) -> None:
    values = {7: [1, 2, 3, 4], 8: [10, 20, 30, 40]}
    with talk(rpcs) as stream:
        for step in range(4):
            for key, numbers in values.items():
                marks = {"sequence_id": key, "sequence_start": step == 0, "sequence_end": step == 3}
                array = np.array([[numbers[step]]], np.int32)
                tensor = {"i": ("INT32", array, array.tobytes())}
                stream.say(infer_request("summer", tensor, id=f"{key}", parameters=marks))
        answers = stream.rest()
    for key, numbers in values.items():
        sums = [one.infer_response.raw_output_contents[0] for one in answers if one.infer_response.id == str(key)]
        assert [int(np.frombuffer(raw, np.int32)[0]) for raw in sums] == np.cumsum(numbers).tolist()


def test_default_roles_and_options_refuse_operations(server: Server) -> None:
    gateway = Gateway(server)
    with Rpcs(gateway.grpc) as rpcs:
        assert not rpcs.ModelInfer(row(4)).parameters
        code, text = refused(rpcs.RepositoryModelLoad, message("RepositoryModelLoadRequest", model_name="row"))
        assert (code, "--grpc-roles" in text) == ("PERMISSION_DENIED", True)
        code, text = refused(rpcs.SystemSharedMemoryRegister, message("SystemSharedMemoryRegisterRequest", name="r"))
        assert (code, "--allow-client-shm" in text) == ("UNIMPLEMENTED", True)
        with talk(rpcs) as idle:
            idle.say(row(4))
            idle.hear(1)
            assert b"Traceback" not in gateway.stop()
            with pytest.raises(grpc.RpcError) as caught:
                idle.hear(1)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert metric(server, "shmserve_requests_in_flight") == 0
