"""Tensors on a GPU from clients and back to them, through a real server on stand-ins for the driver and for CUDA, which
note what is copied.

The rule: the answer is the same wherever the model runs; only the journal tells by which way it came.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.shm.extents.cuda import uuid_bytes
from shmserve.testing import Server
from tests import STANDINS
from tests.process.gateway.test_http import Gateway
from tests.process.server.test_gpus import GPUS, chained, planned
from tests.support.workers.device_arrays import Foreign, end, read, write
from tests.support.workers.gpu_harness import standins

pytestmark = pytest.mark.process

WIDTH = 40_000
PASS = """
backend: "identity" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 40000 } output { name: "y" data_type: TYPE_FP32 dims: 40000 }
"""
PYTHON = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(request, "x").as_numpy() + 1)]
            )
            for request in requests
        ]
"""
SEQUENCES = PASS.replace("identity", "python") + "instance_group { kind: KIND_GPU gpus: 0 } sequence_batching { }"


LIMITED = (
    PASS.replace("identity", "python")
    + """
instance_group { kind: KIND_GPU gpus: 0 } parameters { key: "gpu_memory_limit_mb" value { string_value: "100" } }
"""
)


THERE = """\
import ctypes
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", self.read(request) + 2)]) for request in requests]

    def read(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "x")
        if x.is_cpu():
            return x.as_numpy() + 100
        assert (x.shape()[1:], x.triton_dtype()) == ([40000], 11)
        assert x.__dlpack_device__() == (2, 0)
        try:
            x.as_numpy()
        except pb_utils.TritonModelException as error:
            assert "is on a GPU" in str(error)
        _, address, _ = x.to_dlpack()
        size = 4 * x.shape()[0] * 40000
        return np.frombuffer(ctypes.string_at(address, size), np.float32).reshape(x.shape())
"""
STRICT = 'parameters { key: "strict_outputs" value: { string_value: "true" } }'
GIVE = """\
import numpy as np
import triton_python_backend_utils as pb_utils
from cupy.cuda import runtime


class Made:
    \"\"\"As a library has it: in its own memory, and written in a stream of its own.\"\"\"

    def __init__(self, array):
        self.array = np.ascontiguousarray(array)
        self.address = runtime.malloc(array.nbytes)
        self.stream = runtime.streamCreateWithFlags(1)
        self.described = {
            "shape": array.shape, "typestr": array.dtype.str, "data": (self.address, False), "version": 3,
        }
        runtime.memcpyAsync(
            self.address, self.array.ctypes.data, array.nbytes, runtime.memcpyHostToDevice, self.stream
        )

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, **_):
        raise AssertionError("the stand-in looks at what is described")

    def __del__(self):
        runtime.streamDestroy(self.stream)
        runtime.free(self.address)


class TritonPythonModel:
    def execute(self, requests):
        return [self.one(pb_utils.get_input_tensor_by_name(request, "x").as_numpy()) for request in requests]

    def one(self, x):
        array = x + 5
        if x[0, 0] == 1000:
            array = array[:, :-1]
        elif x[0, 0] == 2000:
            array = array.astype(np.float64)
        y = pb_utils.Tensor.from_dlpack("y", Made(array))
        assert not y.is_cpu()
        assert y.shape() == list(array.shape)
        return pb_utils.InferenceResponse([y])
"""
ON_GPU = """
instance_group { kind: KIND_GPU gpus: 0 }
parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }
"""


def written(repository: Path, name: str, config: str, code: str = "") -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config)
    if code:
        (repository / name / "1" / "model.py").write_text(code)


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("journal")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, journal: Path) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("devices")
    planned(repository, "plan", 0)
    planned(repository, "other", 1)
    chained(repository, "both", "plan", "other")
    written(repository, "host", PASS)
    written(
        repository, "code", PASS.replace("identity", "python") + "instance_group { kind: KIND_GPU gpus: 0 }", PYTHON
    )
    written(repository, "seq", SEQUENCES, PYTHON)
    written(repository, "limited", LIMITED, PYTHON)
    written(repository, "there", PASS.replace("identity", "python") + ON_GPU, THERE)
    chained(repository, "then", "plan", "there")
    written(
        repository,
        "give",
        PASS.replace("identity", "python") + "instance_group { kind: KIND_GPU gpus: 0 }" + STRICT,
        GIVE,
    )
    chained(repository, "given", "give", "plan")
    chained(repository, "given_elsewhere", "give", "other")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STANDIN_GPUS", json.dumps(GPUS))
        patch.setenv("CUDA_STANDIN_JOURNAL", str(journal))
        patch.setenv("STANDIN_PROCESSES", str(repository.parent / "processes"))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(STANDINS), os.environ.get("PYTHONPATH", "")]).rstrip(":"))
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        with Server(repository) as server:
            yield server


@pytest.fixture(scope="module")
def gateway(server: Server) -> Iterator[Gateway]:
    made = Gateway(server, "--allow-client-shm")
    yield made
    log = made.stop().decode()
    assert "Traceback" not in log
    assert "ERROR" not in log


@pytest.fixture
def runtime() -> Iterator[Any]:
    """This process sees the GPU that the server calls 0."""
    with standins() as (runtime, _):
        runtime.state.uuid = uuid_bytes(GPUS[0]["uuid"])
        yield runtime
        end(runtime)


@pytest.fixture
def client(server: Server, runtime: Any) -> Iterator[shmserve.Client]:
    with server.client() as client:
        yield client


def numbers(rows: int, seed: int = 1) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 1000, (rows, WIDTH)).astype(np.float32)


def copies(journal: Path, model: str) -> set[str]:
    """The kinds of copies that a worker has made: 1 to the device, 2 to the host, 3 within."""
    lines = [line for path in journal.glob(f"{model}_*") for line in path.read_text().splitlines()]
    return {line[-1] for line in lines if line.startswith("memcpyAsync")}


def forget(journal: Path) -> None:
    for path in journal.iterdir():
        path.unlink()


def test_nothing_passes_through_the_host(journal: Path, client: shmserve.Client) -> None:
    x = client.empty((2, WIDTH), device="cuda:0")
    y = client.empty((2, WIDTH), device=0)
    for seed in range(3):
        given = numbers(2, seed)
        write(x.__cuda_array_interface__, given)
        forget(journal)
        found: Any = client.infer("plan", {"x": x}, outputs={"y": y})["y"]
        assert found is y
        np.testing.assert_array_equal(read(y.__cuda_array_interface__), given + 1)
        assert copies(journal, "plan") == set()
    np.testing.assert_array_equal(y.numpy(), given + 1)


@pytest.mark.parametrize("version", [2, 3])
def test_what_a_library_has_is_copied_on_the_device_when_it_is_there(
    runtime: Any, journal: Path, client: shmserve.Client, version: int
) -> None:
    given = numbers(3)
    x = Foreign(runtime, given, version=version)
    forget(journal)
    runtime.state.calls.clear()
    np.testing.assert_array_equal(client.infer("plan", {"x": x})["y"], given + 1)
    assert copies(journal, "plan") == {"2"}
    assert [call[4] for call in runtime.state.named("memcpyAsync")] == [runtime.memcpyDeviceToDevice]
    x.close()


@pytest.mark.parametrize("model", ["other", "host", "both"])
def test_a_model_elsewhere_gets_it_by_way_of_the_host(runtime: Any, client: shmserve.Client, model: str) -> None:
    given = numbers(2)
    x, y = Foreign(runtime, given), Foreign(runtime, np.zeros_like(given))
    more = {"host": 0, "other": 1, "both": 2}[model]
    for _ in range(2):
        runtime.state.calls.clear()
        found: Any = client.infer(model, {"x": x}, outputs={"y": y})["y"]
        assert found is y
        np.testing.assert_array_equal(y.read(), given + more)
    # The second time it is known: nothing is copied on the device to be tried first.
    kinds = [call[4] for call in runtime.state.named("memcpyAsync")]
    sent = runtime.memcpyDeviceToDevice if model == "both" else runtime.memcpyDeviceToHost  # its first step is there
    assert kinds == [sent, runtime.memcpyHostToDevice]
    place = client.empty((2, WIDTH), device="cuda")
    client.infer(model, {"x": x}, outputs={"y": place})
    np.testing.assert_array_equal(place.numpy(), given + more)
    x.close()
    y.close()


def test_a_model_on_the_gpu_that_reads_only_the_host(journal: Path, client: shmserve.Client) -> None:
    given = numbers(2)
    x, y = client.empty((2, WIDTH), device="cuda:0"), client.empty((2, WIDTH), device="cuda:0")
    write(x.__cuda_array_interface__, given)
    forget(journal)
    client.infer("code", {"x": x}, outputs={"y": y})
    np.testing.assert_array_equal(y.numpy(), given + 1)
    assert copies(journal, "code") == {"1", "2"}


def test_a_python_model_that_takes_it_there(journal: Path, client: shmserve.Client) -> None:
    given = numbers(2)
    x = client.empty((2, WIDTH), device="cuda:0")
    write(x.__cuda_array_interface__, given)
    forget(journal)
    np.testing.assert_array_equal(client.infer("there", {"x": x})["y"], given + 2)
    assert copies(journal, "there") == set()
    np.testing.assert_array_equal(client.infer("there", {"x": given})["y"], given + 102)
    forget(journal)
    np.testing.assert_array_equal(client.infer("then", {"x": x})["y"], given + 3)
    assert copies(journal, "plan") == copies(journal, "there") == set()


def test_a_python_model_that_gives_it_there(journal: Path, client: shmserve.Client) -> None:
    """1 is the model's own: it puts on the GPU what it gives."""
    given, y = numbers(2), client.empty((2, WIDTH), device="cuda:0")
    for model, more, kinds in (("give", 5, {"1", "2"}), ("given", 6, {"1", "3"}), ("given_elsewhere", 6, {"1", "2"})):
        forget(journal)
        np.testing.assert_array_equal(client.infer(model, {"x": given})["y"], given + more)
        assert copies(journal, "give") == kinds, model
    forget(journal)
    client.infer("give", {"x": given}, outputs={"y": y})
    np.testing.assert_array_equal(y.numpy(), given + 5)
    assert copies(journal, "give") == {"1", "3"}


def test_what_a_python_model_gives_wrong_there(client: shmserve.Client) -> None:
    y = client.empty((2, WIDTH), device="cuda:0")
    for number, said in ((1000, "wrong shape: expected"), (2000, "wrong data type: expected FP32, found FP64")):
        given = numbers(2)
        given[0, 0] = number
        for model, outputs in (("give", None), ("give", {"y": y}), ("given", None)):
            with pytest.raises(shmserve.ModelFailed, match=said):
                client.infer(model, {"x": given}, outputs=outputs)


def test_many_places_at_once(journal: Path, client: shmserve.Client) -> None:
    """Whatever batches they come in, nothing of them passes through the host."""
    given = [numbers(1 + seed % 3, seed) for seed in range(12)]
    places = [client.empty(array.shape, device="cuda:0") for array in given]
    inputs = [client.empty(array.shape, device="cuda:0") for array in given]
    for array, x in zip(given, inputs, strict=True):
        write(x.__cuda_array_interface__, array)
    forget(journal)
    futures = [client.submit("plan", {"x": x}, outputs={"y": place}) for x, place in zip(inputs, places, strict=True)]
    for array, place, future in zip(given, places, futures, strict=True):
        assert future.result()["y"] is place
        np.testing.assert_array_equal(place.numpy(), array + 1)
    assert copies(journal, "plan") <= {"3"}


def test_many_at_once(client: shmserve.Client) -> None:
    """Batches of several, on the host and on the device, with places and without."""
    given = [numbers(1, seed) for seed in range(12)]
    places = [client.empty((1, WIDTH), device="cuda:0") for _ in given]
    futures = []
    for number, (array, place) in enumerate(zip(given, places, strict=True)):
        x: Any = array
        if number % 2:
            x = client.empty((1, WIDTH), device="cuda:0")
            write(x.__cuda_array_interface__, array)
        futures.append(client.submit("plan", {"x": x}, outputs={"y": place} if number % 3 else None))
    for number, (array, future) in enumerate(zip(given, futures, strict=True)):
        found = future.result()["y"]
        np.testing.assert_array_equal(found.numpy() if number % 3 else found, array + 1)


def test_sequences_go_by_way_of_the_host(runtime: Any, client: shmserve.Client) -> None:
    given = numbers(1)
    x = Foreign(runtime, given)
    for first, last in ((True, False), (False, False), (False, True)):
        found = client.infer("seq", {"x": x}, sequence=7, sequence_start=first, sequence_end=last)["y"]
        np.testing.assert_array_equal(found, given + 1)
    assert runtime.state.named("ipcGetMemHandle") == []
    x.close()


def test_a_place_of_the_wrong_size(client: shmserve.Client) -> None:
    x = client.empty((2, WIDTH), device="cuda:0")
    with pytest.raises(shmserve.InvalidRequest, match="320000 bytes; the memory given for it has 160000"):
        client.infer("plan", {"x": x}, outputs={"y": client.empty((1, WIDTH), device="cuda:0")})
    for shape in ((2, WIDTH + 1), (WIDTH, 2)):
        with pytest.raises(shmserve.InvalidRequest, match="was written to an array of"):
            client.infer("plan", {"x": x}, outputs={"y": client.empty(shape, device="cuda:0")})


def test_the_memory_of_a_client_is_used_again(server: Server, runtime: Any) -> None:
    given = numbers(2)
    for _ in range(3):
        with server.client() as client:
            x = client.empty((2, WIDTH), device="cuda:0")
            write(x.__cuda_array_interface__, given)
            np.testing.assert_array_equal(client.infer("plan", {"x": x})["y"], given + 1)
            del x
    assert len(runtime.state.named("ipcGetMemHandle")) == 1
    assert runtime.state.named("free") == []


def test_the_other_client(server: Server, runtime: Any) -> None:
    given = numbers(2)

    async def ask() -> None:
        async with shmserve.AsyncClient(runtime_dir=server.runtime_dir) as client:
            x, y = Foreign(runtime, given), client.empty((2, WIDTH), device="cuda:0")
            for model, more in (("plan", 1), ("host", 0)):
                await client.infer(model, {"x": x}, outputs={"y": y})
                np.testing.assert_array_equal(y.numpy(), given + more)
            x.close()

    asyncio.run(ask())


def test_other_ways_to_the_server(server: Server, runtime: Any) -> None:
    """Over ZeroMQ no memory on a GPU is announced."""
    given = numbers(2)
    x = Foreign(runtime, given)
    with shmserve.Client(f"ipc://{server.runtime_dir}/broker.sock", memory="frames") as client:
        y = client.empty((2, WIDTH), device="cuda:0")
        found: Any = client.infer("plan", {"x": x}, outputs={"y": y})["y"]
        assert found is y
        np.testing.assert_array_equal(y.numpy(), given + 1)
    x.close()


SIZE = 2 * WIDTH * 4
REGION = "/v2/cudasharedmemory/region/g"


def asked(gateway: Gateway, model: str, output: int = SIZE) -> tuple[int, Any]:
    """Its input from the first half of the region, its output to the second."""

    def place(offset: int, size: int) -> dict[str, Any]:
        return {"shared_memory_region": "g", "shared_memory_offset": offset, "shared_memory_byte_size": size}

    inputs = [{"name": "x", "datatype": "FP32", "shape": [2, WIDTH], "parameters": place(0, SIZE)}]
    outputs = [{"name": "y", "parameters": place(SIZE, output)}]
    status, body = gateway.ask("POST", f"/v2/models/{model}/infer", {"inputs": inputs, "outputs": outputs})
    return status, json.loads(body)


def test_memory_that_a_caller_of_the_gateway_has_registered(gateway: Gateway, runtime: Any, journal: Path) -> None:
    given = numbers(2)
    memory = runtime.malloc(2 * SIZE)
    first, second = ({"data": (memory + at, False), "shape": (2, WIDTH), "typestr": "<f4"} for at in (0, SIZE))
    write(first, given)
    handle = base64.b64encode(runtime.ipcGetMemHandle(memory)).decode()
    order = {"raw_handle": {"b64": handle}, "device_id": 0, "byte_size": 2 * SIZE}
    assert gateway.ask("POST", f"{REGION}/register", order) == (200, b"")
    status, body = gateway.ask("GET", f"{REGION}/status")
    assert (status, json.loads(body)) == (200, [{"name": "g", "device_id": 0, "byte_size": 2 * SIZE}])
    forget(journal)
    status, answer = asked(gateway, "plan")
    assert status == 200, answer
    assert answer["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [2, WIDTH]}]
    np.testing.assert_array_equal(read(second), given + 1)
    assert copies(journal, "plan") == set()
    status, answer = asked(gateway, "code")
    np.testing.assert_array_equal(read(second), given + 1)
    for model in ("host", "other"):
        status, answer = asked(gateway, model)
        assert (status, model) == (501, model)
        assert answer["error"].endswith("; CUDA shared memory works only with models on the same GPU"), answer
    status, answer = asked(gateway, "plan", SIZE - 4)
    assert (status, "the memory given for it has 319996" in answer["error"]) == (400, True)
    assert gateway.ask("POST", f"{REGION}/unregister") == (200, b"")
    status, answer = asked(gateway, "plan")
    assert (status, answer["error"]) == (404, "Unable to find shared memory region: 'g'")


def workers(server: Server) -> dict[str, int]:
    """Pids by model."""
    found = {}
    for pid in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split():
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if "--name" in words:
            found[words[words.index("--name") + 1].partition("_")[0]] = int(pid)
    return found


def test_an_instance_over_its_limit_on_the_gpu_ends_alone(server: Server, client: shmserve.Client) -> None:
    before = workers(server)
    limited = os.pidfd_open(before["limited"])
    told = Path(os.environ["STANDIN_PROCESSES"])
    written_first = told.with_suffix(".new")
    written_first.write_text(json.dumps({GPUS[0]["uuid"]: {str(pid): 200 << 20 for pid in before.values()}}))
    written_first.rename(told)
    try:
        ended = select.poll()
        ended.register(limited, select.POLLIN)
        assert ended.poll(30_000)
    finally:
        os.close(limited)
        told.unlink()
    given = numbers(1)
    client.wait_ready("limited", timeout=30)
    np.testing.assert_array_equal(client.infer("limited", {"x": given})["y"], given + 1)
    assert "killed: it uses 200 MiB of GPU memory, limit 100 MiB" in server.log
    assert workers(server).items() - before.items() == {("limited", workers(server)["limited"])}
