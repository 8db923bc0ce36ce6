"""GPU tensors from clients and back, through a real server with fakes of the driver and of CUDA.

The result does not depend on where the model runs; the journal of the fakes shows the copies.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.shm.extents.cuda import uuid_bytes
from shmserve.testing import Server
from tests.process.server.processes.test_gpus import GPUS, chained, clear, copies, planned, serving_on_gpus
from tests.support.ensemble_models import config_text
from tests.support.gateway.running_gateway import Gateway
from tests.support.model_files import parameters, python_model, write_model
from tests.support.workers.gpu.device_arrays import Foreign, end, read, write
from tests.support.workers.gpu.harness import standins

pytestmark = pytest.mark.process

WIDTH = 40_000
PASS = config_text("identity", "x:FP32:[40000]", "y:FP32:[40000]", "max_batch_size: 8")
ON_GPU = PASS.replace("identity", "python") + "instance_group { kind: KIND_GPU gpus: 0 }"
ADD_ONE = python_model("return self.respond(x + 1)")
ON_GPU_ARRAY = """
from cupy.cuda import runtime


class OnGpu:
    \"\"\"As an array of a library: in its own memory, and written in a stream of its own.\"\"\"

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
"""
WRITE_ON_GPU = ON_GPU_ARRAY + python_model(
    """
    y = pb_utils.Tensor.from_dlpack("y", OnGpu(x + 5 if x[0, 0] != 1000 else x[:, :-1]))
    assert not y.is_cpu()
    return pb_utils.InferenceResponse([y])
    """
)


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("journal")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, journal: Path) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("devices")
    planned(repository, "plan", 0)
    planned(repository, "other", 1)
    chained(repository, "both", "plan", "other")
    write_model(repository, "host", PASS)
    write_model(repository, "code", ON_GPU, ADD_ONE)
    write_model(repository, "seq", ON_GPU + "sequence_batching { }", ADD_ONE)
    write_model(repository, "give", ON_GPU + parameters(strict_outputs="true"), WRITE_ON_GPU)
    chained(repository, "given", "give", "plan")
    chained(repository, "given_elsewhere", "give", "other")
    with serving_on_gpus(repository, journal) as server:
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


def test_tensors_on_the_gpu_do_not_pass_through_the_host(journal: Path, client: shmserve.Client) -> None:
    x = client.empty((2, WIDTH), device="cuda:0")
    y = client.empty((2, WIDTH), device=0)
    for seed in range(3):
        given = numbers(2, seed)
        write(x.__cuda_array_interface__, given)
        clear(journal)
        found: Any = client.infer("plan", {"x": x}, outputs={"y": y})["y"]
        assert found is y
        np.testing.assert_array_equal(read(y.__cuda_array_interface__), given + 1)
        assert copies(journal, "plan") == set()
    np.testing.assert_array_equal(y.numpy(), given + 1)


@pytest.mark.parametrize("model", ["other", "host", "both"])
def test_tensors_for_other_devices_pass_through_the_host(runtime: Any, client: shmserve.Client, model: str) -> None:
    given = numbers(2)
    x, y = Foreign(runtime, given), Foreign(runtime, np.zeros_like(given))
    more = {"host": 0, "other": 1, "both": 2}[model]
    for _ in range(2):
        runtime.state.calls.clear()
        found: Any = client.infer(model, {"x": x}, outputs={"y": y})["y"]
        assert found is y
        np.testing.assert_array_equal(y.read(), given + more)
    # The client remembers it: the second request is not tried with a copy within the device first.
    kinds = [call[4] for call in runtime.state.named("memcpyAsync")]
    sent = runtime.memcpyDeviceToDevice if model == "both" else runtime.memcpyDeviceToHost  # its first step is there
    assert kinds == [sent, runtime.memcpyHostToDevice]
    x.close()
    y.close()


def test_a_python_model_returns_outputs_on_the_gpu(journal: Path, client: shmserve.Client) -> None:
    """Kind 1 is the model's own copy of its output to the GPU."""
    given, y = numbers(2), client.empty((2, WIDTH), device="cuda:0")
    for model, more, kinds in (("give", 5, {"1", "2"}), ("given", 6, {"1", "3"}), ("given_elsewhere", 6, {"1", "2"})):
        clear(journal)
        np.testing.assert_array_equal(client.infer(model, {"x": given})["y"], given + more)
        assert copies(journal, "give") == kinds, model
    clear(journal)
    client.infer("give", {"x": given}, outputs={"y": y})
    np.testing.assert_array_equal(y.numpy(), given + 5)
    assert copies(journal, "give") == {"1", "3"}
    given[0, 0] = 1000
    with pytest.raises(shmserve.ModelFailed, match="wrong shape: expected"):
        client.infer("give", {"x": given}, outputs={"y": y})


def test_sequences_pass_through_the_host(runtime: Any, client: shmserve.Client) -> None:
    x = Foreign(runtime, numbers(1))
    found = client.infer("seq", {"x": x}, sequence=7, sequence_start=True, sequence_end=True)["y"]
    np.testing.assert_array_equal(found, x.read() + 1)
    assert runtime.state.named("ipcGetMemHandle") == []
    x.close()


SIZE = 2 * WIDTH * 4
REGION = "/v2/cudasharedmemory/region/g"


def infer_over_http(gateway: Gateway, model: str, output: int = SIZE) -> tuple[int, Any]:
    """Infers with the input in the first half of the region and the output in the second."""

    def place(offset: int, size: int) -> dict[str, Any]:
        return {"shared_memory_region": "g", "shared_memory_offset": offset, "shared_memory_byte_size": size}

    inputs = [{"name": "x", "datatype": "FP32", "shape": [2, WIDTH], "parameters": place(0, SIZE)}]
    outputs = [{"name": "y", "parameters": place(SIZE, output)}]
    status, body = gateway.ask("POST", f"/v2/models/{model}/infer", {"inputs": inputs, "outputs": outputs})
    return status, json.loads(body)


def test_gpu_memory_registered_over_http(gateway: Gateway, runtime: Any, journal: Path) -> None:
    given = numbers(2)
    memory = runtime.malloc(2 * SIZE)
    first, second = ({"data": (memory + at, False), "shape": (2, WIDTH), "typestr": "<f4"} for at in (0, SIZE))
    write(first, given)
    handle = base64.b64encode(runtime.ipcGetMemHandle(memory)).decode()
    order = {"raw_handle": {"b64": handle}, "device_id": 0, "byte_size": 2 * SIZE}
    assert gateway.ask("POST", f"{REGION}/register", order) == (200, b"")
    status, body = gateway.ask("GET", f"{REGION}/status")
    assert (status, json.loads(body)) == (200, [{"name": "g", "device_id": 0, "byte_size": 2 * SIZE}])
    clear(journal)
    status, answer = infer_over_http(gateway, "plan")
    assert status == 200, answer
    assert answer["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [2, WIDTH]}]
    np.testing.assert_array_equal(read(second), given + 1)
    assert copies(journal, "plan") == set()
    status, answer = infer_over_http(gateway, "code")
    np.testing.assert_array_equal(read(second), given + 1)
    for model in ("host", "other"):
        status, answer = infer_over_http(gateway, model)
        assert (status, model) == (501, model)
        assert answer["error"].endswith("; CUDA shared memory works only with models on the same GPU"), answer
    status, answer = infer_over_http(gateway, "plan", SIZE - 4)
    assert (status, "the memory given for it has 319996" in answer["error"]) == (400, True)
    assert gateway.ask("POST", f"{REGION}/unregister") == (200, b"")
    status, answer = infer_over_http(gateway, "plan")
    assert (status, answer["error"]) == (404, "Unable to find shared memory region: 'g'")
