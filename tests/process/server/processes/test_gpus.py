"""Instances on GPUs in a real server, and GPU tensors from clients and back, with stand-ins for the driver and the
libraries. Models report what they see; the journal of the stand-ins shows the copies. A server without a GPU imports
nothing for GPUs, whatever it is asked."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.shm.extents.cuda import uuid_bytes
from shmserve.testing import Server
from shmserve.tools.tune.served import ServedModel
from tests import STANDINS
from tests.support.ensemble_models import config_text, ensemble
from tests.support.gateway.running_gateway import Gateway
from tests.support.living import until
from tests.support.model_files import parameters, python_model, write_model
from tests.support.patience import PATIENCE_S
from tests.support.workers.gpu.device_arrays import Foreign, end, read, write
from tests.support.workers.gpu.harness import adder, standins
from tests.support.workers.models.worker_models import Graph

pytestmark = pytest.mark.process

GPUS = [{"uuid": "GPU-aa11", "pci": "00000000:3B:00.0"}, {"uuid": "GPU-bb22", "pci": "00000000:AF:00.0"}]
REPORT = python_model(
    "return pb_utils.InferenceResponse([pb_utils.Tensor('seen', np.array([self.seen], object))])",
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    self.seen = f"{args['model_instance_kind']} {args['model_instance_device_id']} {visible}"
    """,
)
CONFIG = config_text("python", "x:FP32:[1]", "seen:STRING:[1]", "instance_group [ %s ]")


PLAN = 'backend: "tensorrt" instance_group { kind: KIND_GPU gpus: %d }'
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


def planned(repository: Path, name: str, gpu: int) -> None:
    adder(repository / name, 40_000)
    (repository / name / "config.pbtxt").write_text(PLAN % gpu)


def chained(repository: Path, name: str, *models: str) -> None:
    between = ["x", *[f"t{number}" for number in range(len(models) - 1)], "y"]
    steps = [f"{model}(x:{one})->(y:{other})" for model, one, other in zip(models, between, between[1:], strict=False)]
    ensemble(repository, name, "x:FP32:[40000]", "y:FP32:[40000]", *steps, more="max_batch_size: 8")


@contextmanager
def serving_on_gpus(repository: Path, journal: Path, *options: str, **variables: str) -> Iterator[Server]:
    """A server on a machine with two fake GPUs, which log copies to `journal`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STANDIN_GPUS", json.dumps(GPUS))
        patch.setenv("CUDA_STANDIN_JOURNAL", str(journal))
        patch.setenv("STANDIN_PROCESSES", str(repository.parent / "processes"))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(STANDINS), os.environ.get("PYTHONPATH", "")]).rstrip(":"))
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        with Server(repository, *options) as server:
            yield server


def copies(journal: Path, model: str) -> set[str]:
    """The kinds of copies that the workers of a model have made: 1 to the device, 2 to the host, 3 within it."""
    return {line[-1] for line in calls(journal, model) if line.startswith("memcpyAsync")}


def calls(journal: Path, model: str) -> list[str]:
    return [line for path in journal.glob(f"{model}_*") for line in path.read_text().splitlines()]


def clear(journal: Path) -> None:
    for path in journal.iterdir():
        path.unlink()


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("journal")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory for the `states` of the GPUs, with `xids`, a pipe."""
    folder = tmp_path_factory.mktemp("machine")
    os.mkfifo(folder / "xids")
    fifo = os.open(folder / "xids", os.O_RDWR)
    yield folder
    os.close(fifo)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, journal: Path, machine: Path) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("gpus")
    write_model(repository, "on_gpu", CONFIG % "{ kind: KIND_GPU gpus: 1 }", REPORT)
    write_model(repository, "anywhere", CONFIG % "{ count: 1 }", REPORT)
    write_model(repository, "on_cpu", CONFIG % "{ kind: KIND_CPU }", REPORT)
    for name, gpu in (("first", 0), ("second", 0), ("third", 0), ("other", 1)):
        planned(repository, name, gpu)
    chained(repository, "same", "first", "second", "third")
    chained(repository, "apart", "first", "other", "third")
    chained(repository, "both", "first", "other")
    write_model(repository, "host", PASS)
    write_model(repository, "code", ON_GPU, ADD_ONE)
    write_model(repository, "seq", ON_GPU + "sequence_batching { }", ADD_ONE)
    write_model(repository, "give", ON_GPU + parameters(strict_outputs="true"), WRITE_ON_GPU)
    chained(repository, "given", "give", "first")
    chained(repository, "given_elsewhere", "give", "other")
    more = {"STANDIN_GPU_STATES": str(machine / "states"), "STANDIN_XIDS": str(machine / "xids")}
    with serving_on_gpus(repository, journal, "--metrics-interval-ms=100", **more) as server:
        yield server


def seen(client: shmserve.Client, model: str) -> set[str]:
    futures = [client.submit(model, {"x": np.zeros(1, np.float32)}) for _ in range(32)]
    return {future.result()["seen"][0].decode() for future in futures}


def test_a_worker_sees_its_own_gpu(server: Server, client: shmserve.Client) -> None:
    """Without a kind, a model has an instance on each GPU."""
    assert seen(client, "on_gpu") == {"GPU 0 GPU-bb22"}
    assert seen(client, "on_cpu") == {"CPU 0 all"}
    assert seen(client, "anywhere") == {"GPU 0 GPU-aa11", "GPU 0 GPU-bb22"}
    assert f'nv_gpu_memory_total_bytes{{gpu_uuid="GPU-bb22"}} {80 << 30}' in client.metrics()
    assert "GPU 1: Stand-in, GPU-bb22" in server.log


def test_tune_measures_the_memory_of_all_instances_on_gpus(client: shmserve.Client) -> None:
    pids = {entry["name"]: [each["pid"] for each in entry["instances"]] for entry in client.models()}
    used = {"GPU-aa11": dict.fromkeys(pids["anywhere"], 5), "GPU-bb22": dict.fromkeys(pids["on_gpu"], 7)}
    Path(os.environ["STANDIN_PROCESSES"]).write_text(json.dumps(used))
    models = [ServedModel(client, name, lambda length: ()) for name in ("anywhere", "on_gpu", "on_cpu")]
    until(client, lambda: [model.gpu_memory() for model in models] == [10, 7, 0])


def test_tensors_between_steps_on_one_gpu_stay_on_it(journal: Path, client: shmserve.Client) -> None:
    x = np.arange(80_000, dtype=np.float32).reshape(2, 40_000)
    models = ("first", "second", "other", "third")
    for name in ("apart", "same"):
        clear(journal)
        futures = [client.submit(name, {"x": x}) for _ in range(4)]
        for future in futures:
            np.testing.assert_array_equal(future.result()["y"], x + 3)
        found = {model: copies(journal, model) for model in models}
        if name == "apart":
            assert found == {"first": {"1", "2"}, "second": set(), "other": {"1", "2"}, "third": {"1", "2"}}
    # Copies within the device gather the requests of a batch.
    assert [found[model] - {"3"} for model in models] == [{"1"}, set(), set(), {"2"}]
    # Each segment is opened once, however many tensors it contains.
    for maker, reader in (("first", "second"), ("second", "third")):
        opened = calls(journal, reader).count("ipcOpenMemHandle ")
        assert opened == calls(journal, maker).count("ipcGetMemHandle ") >= 1

    def pools() -> list[str]:
        client.infer("same", {"x": x})  # pools that stay idle for seconds are given back
        return re.findall(r'shmserve_instance_gpu_pool_bytes\{model="(first|second|third)"', client.metrics())

    until(client, lambda: sorted(pools()) == ["first", "second"])


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
def gpu_client(server: Server, runtime: Any) -> Iterator[shmserve.Client]:
    with server.client() as made:
        yield made


def numbers(rows: int, seed: int = 1) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 1000, (rows, WIDTH)).astype(np.float32)


def test_tensors_on_the_gpu_do_not_pass_through_the_host(journal: Path, gpu_client: shmserve.Client) -> None:
    x = gpu_client.empty((2, WIDTH), device="cuda:0")
    y = gpu_client.empty((2, WIDTH), device=0)
    for seed in range(3):
        given = numbers(2, seed)
        write(x.__cuda_array_interface__, given)
        clear(journal)
        found: Any = gpu_client.infer("first", {"x": x}, outputs={"y": y})["y"]
        assert found is y
        np.testing.assert_array_equal(read(y.__cuda_array_interface__), given + 1)
        assert copies(journal, "first") == set()
    np.testing.assert_array_equal(y.numpy(), given + 1)


@pytest.mark.parametrize("model", ["other", "host", "both"])
def test_tensors_for_other_devices_pass_through_the_host(runtime: Any, gpu_client: shmserve.Client, model: str) -> None:
    given = numbers(2)
    x, y = Foreign(runtime, given), Foreign(runtime, np.zeros_like(given))
    more = {"host": 0, "other": 1, "both": 2}[model]
    for _ in range(2):
        runtime.state.calls.clear()
        found: Any = gpu_client.infer(model, {"x": x}, outputs={"y": y})["y"]
        assert found is y
        np.testing.assert_array_equal(y.read(), given + more)
    # The client remembers it: the second request is not tried with a copy within the device first.
    kinds = [call[4] for call in runtime.state.named("memcpyAsync")]
    sent = runtime.memcpyDeviceToDevice if model == "both" else runtime.memcpyDeviceToHost  # its first step is there
    assert kinds == [sent, runtime.memcpyHostToDevice]
    x.close()
    y.close()


def test_a_python_model_returns_outputs_on_the_gpu(journal: Path, gpu_client: shmserve.Client) -> None:
    """Kind 1 is the model's own copy of its output to the GPU."""
    given, y = numbers(2), gpu_client.empty((2, WIDTH), device="cuda:0")
    for model, more, kinds in (("give", 5, {"1", "2"}), ("given", 6, {"1", "3"}), ("given_elsewhere", 6, {"1", "2"})):
        clear(journal)
        np.testing.assert_array_equal(gpu_client.infer(model, {"x": given})["y"], given + more)
        assert copies(journal, "give") == kinds, model
    clear(journal)
    gpu_client.infer("give", {"x": given}, outputs={"y": y})
    np.testing.assert_array_equal(y.numpy(), given + 5)
    assert copies(journal, "give") == {"1", "3"}
    given[0, 0] = 1000
    with pytest.raises(shmserve.ModelFailed, match="wrong shape: expected"):
        gpu_client.infer("give", {"x": given}, outputs={"y": y})


def test_sequences_pass_through_the_host(runtime: Any, gpu_client: shmserve.Client) -> None:
    x = Foreign(runtime, numbers(1))
    found = gpu_client.infer("seq", {"x": x}, sequence=7, sequence_start=True, sequence_end=True)["y"]
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
    status, answer = infer_over_http(gateway, "first")
    assert status == 200, answer
    assert answer["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [2, WIDTH]}]
    np.testing.assert_array_equal(read(second), given + 1)
    assert copies(journal, "first") == set()
    status, answer = infer_over_http(gateway, "code")
    np.testing.assert_array_equal(read(second), given + 1)
    for model in ("host", "other"):
        status, answer = infer_over_http(gateway, model)
        assert (status, model) == (501, model)
        assert answer["error"].endswith("; CUDA shared memory works only with models on the same GPU"), answer
    status, answer = infer_over_http(gateway, "first", SIZE - 4)
    assert (status, "the memory given for it has 319996" in answer["error"]) == (400, True)
    assert gateway.ask("POST", f"{REGION}/unregister") == (200, b"")
    status, answer = infer_over_http(gateway, "first")
    assert (status, answer["error"]) == (404, "Unable to find shared memory region: 'g'")


FALLEN = "GPU 1 is out of service: Xid 79 (GPU has fallen off the bus); reboot the machine"


def test_requests_continue_on_the_other_gpu_until_the_first_has_recovered(
    server: Server, client: shmserve.Client, machine: Path
) -> None:
    both = {"GPU 0 GPU-aa11", "GPU 0 GPU-bb22"}
    assert seen(client, "anywhere") == both
    (machine / "xids").write_text("GPU-bb22 79\n")
    (machine / "new").write_text(json.dumps({"GPU-bb22": {"lost": 15}}))
    (machine / "new").rename(machine / "states")
    until(client, lambda: FALLEN in server.log, "the GPU is out of service")
    assert seen(client, "anywhere") == {"GPU 0 GPU-aa11"}
    assert seen(client, "on_cpu")
    (entry,) = [one for one in client.models() if one["name"] == "anywhere"]
    assert (entry["state"], entry["degraded"], FALLEN in entry["reason"]) == ("READY", True, True)
    for use in (lambda: client.infer("on_gpu", {"x": np.zeros(1, np.float32)}), lambda: client.restart("on_gpu")):
        with pytest.raises(shmserve.Unavailable, match=r"Xid 79 \(GPU has fallen off the bus\); reboot the machine"):
            use()
    until(client, lambda: 'nv_gpu_memory_total_bytes{gpu_uuid="GPU-bb22"}' not in client.metrics(), "it is lost")
    (machine / "states").unlink()
    until(client, lambda: seen(client, "anywhere") == both, "the GPU is used again")
    assert "GPU 1 is healthy again" in server.log
    until(client, lambda: client.ready("on_gpu") and client.ready("other"), "the models serve again")
    assert seen(client, "on_gpu") == {"GPU 0 GPU-bb22"}


GPU_MODULES = (
    "cupy pynvml tensorrt shmserve.gpu shmserve.session.gpu shmserve.shm.extents.cuda shmserve.workers.gpu "
    "shmserve.workers.backends.device_buffers shmserve.workers.backends.device_inputs "
    "shmserve.workers.backends.python.pb_device shmserve.workers.backends.tensorrt"
)


IMPORTS = """
import os, sys


class Journal:
    @staticmethod
    def find_spec(name, path=None, target=None):
        with open(f"{folder}/{{os.getpid()}}", "a") as file:
            file.write(name + "\\n")


sys.meta_path.insert(0, Journal)
"""


TENSORS = ("x:FP32:[40000]", "y:FP32:[40000]", "max_batch_size: 8")


ASKS = """
import asyncio, sys
import numpy as np
import shmserve

with shmserve.Client(sys.argv[1]) as client:
    for model in ("same", "code", "engine", "both"):
        x = client.empty((2, 40000))
        x[...] = 1
        for given in (x, np.ones((2, 40000), np.float32)):
            assert client.infer(model, {"x": given}, outputs={"y": np.empty((2, 40000), np.float32)})["y"].shape
async def ask():
    async with shmserve.AsyncClient(sys.argv[1]) as client:
        await client.infer("same", {"x": np.ones((1, 40000), np.float32)})


asyncio.run(ask())
"""


def is_for_gpus(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in GPU_MODULES.split())


@pytest.fixture
def imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each process writes the names of the modules that it looks for, found or not."""
    folder, place = tmp_path / "imports", tmp_path / "site"
    for made in (folder, place):
        made.mkdir()
    (place / "sitecustomize.py").write_text(IMPORTS.format(folder=folder))
    monkeypatch.setenv("PYTHONPATH", f"{place}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return folder


def test_no_process_imports_a_module_for_gpus(tmp_path: Path, imports: Path) -> None:
    repository = tmp_path / "models"
    write_model(repository, "same", config_text("identity", *TENSORS))
    write_model(repository, "code", config_text("python", *TENSORS), python_model("return self.respond(x + 1)"))
    engine = write_model(repository, "engine", config_text("onnxruntime", *TENSORS))
    graph = Graph().input("x", "FP32", [-1, 40000]).output("y", "FP32", [-1, 40000])
    graph.node("Identity", ["x"], ["y"]).save(engine)
    chained(repository, "both", "code", "same")
    with Server(repository) as server:
        gateway = Gateway(server, "--allow-client-shm")
        body = {"inputs": [{"name": "x", "shape": [1, 40000], "datatype": "FP32", "data": [1.0] * 40000}]}
        assert gateway.ask("POST", "/v2/models/both/infer", body)[0] == 200
        gateway.stop()
        subprocess.run([sys.executable, "-c", ASKS, server.url], check=True, timeout=PATIENCE_S)
    found = {int(path.name): path.read_text().split() for path in imports.iterdir()}
    for module in ("broker.loop", "gateway.main", "workers.loading", "session.session", "workers.backends.onnx.run"):
        assert any(f"shmserve.{module}" in names for names in found.values()), f"no process imports {module}"
    used = {pid: [name for name in names if is_for_gpus(name)] for pid, names in found.items()}
    assert [names for names in used.values() if names] == [["pynvml"]], "only the broker looks for GPUs, once"
