"""Triton's own backends, built from its sources and unchanged, and NVIDIA's binary of its Python backend.

SHMSERVE_TRITON_SOURCES names a folder with checkouts of core, backend, common, identity_backend, square_backend,
repeat_backend (github.com/triton-inference-server) and rapidjson (github.com/Tencent). SHMSERVE_TRITON_PYTHON_BACKEND
names a folder with libtriton_python.so, triton_python_backend_stub and triton_python_backend_utils.py, and
SHMSERVE_TRITON_NUMPY one with NumPy 1 for the stub.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest

import shmserve
from shmserve.testing import Server
from tests.support.ensemble_models import config_text
from tests.support.model_files import write_model
from tests.support.workers.native_backends import run

pytestmark = pytest.mark.process
SOURCES = os.environ.get("SHMSERVE_TRITON_SOURCES", "")
PYTHON_BACKEND = os.environ.get("SHMSERVE_TRITON_PYTHON_BACKEND", "")
INCLUDED = ("core/include", "backend/include", "backend/src", "common/include", "rapidjson/include")
EXAMPLES = "backend/examples/backends"
BACKENDS = {
    "identity": ("identity_backend/src/identity.cc",),
    "square": ("square_backend/src/square.cc",),
    "repeat": ("repeat_backend/src/repeat.cc",),
    "recommended": (f"{EXAMPLES}/recommended/src/recommended.cc",),
    "bls": tuple(f"{EXAMPLES}/bls/src/{name}.cc" for name in ("backend", "bls", "bls_utils")),
}
SIXTEEN = ("INPUT0:FP32:[16] INPUT1:FP32:[16]", "OUTPUT0:FP32:[16] OUTPUT1:FP32:[16]")
DECOUPLED = "model_transaction_policy { decoupled: true }"
MODELS = {
    "identity": ("INPUT0", "OUTPUT0", "max_batch_size: 64 dynamic_batching { }"),
    "square": ("IN:INT32:[1]", "OUT:INT32:[1]", DECOUPLED),
    "repeat": ("IN:INT32 DELAY:UINT32 WAIT:UINT32:[1]", "OUT:INT32:[1] IDX:UINT32:[1]", DECOUPLED),
    "recommended": (
        "IN0:INT32:[4]",
        "OUT0:INT32:[4]",
        "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 1000 }",
    ),
    "bls": SIXTEEN,
}
ADD_SUB = """
import triton_python_backend_utils as utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            a, b = (utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("INPUT0", "INPUT1"))
            responses.append(
                utils.InferenceResponse([utils.Tensor("OUTPUT0", a + b), utils.Tensor("OUTPUT1", a - b)])
            )
        return responses
"""
LARGE = np.ones((2, 100_000), np.float32)
A, B = np.arange(16, dtype=np.float32), np.ones(16, np.float32)


def build(target: Path) -> None:
    """Builds the backends in a backend directory."""
    sources = Path(SOURCES)
    common = [*(sources / "backend" / "src").glob("backend_*.cc"), sources / "common/src/async_work_queue.cc"]
    common += [sources / "common" / "src" / f"{name}.cc" for name in ("error", "thread_pool")]
    flags = ["-std=c++17", "-O1", "-fPIC", "-pthread", "-w", "-DTRITON_ENABLE_METRICS"]
    compiler = ["c++", *flags, *(f"-I{sources / name}" for name in INCLUDED)]
    run([*compiler, "-r", "-o", str(target / "utilities.o"), *map(str, common)])
    stub = target / "libtritonserver.so"
    run(["c++", "-shared", "-Wl,-soname,libtritonserver.so", "-o", str(stub), "-x", "c++", "/dev/null"])
    for name, files in BACKENDS.items():
        (target / name).mkdir()
        library = target / name / f"libtriton_{name}.so"
        own = [str(sources / file) for file in files]
        linked = [*own, str(target / "utilities.o"), "-Wl,--no-as-needed", str(stub)]
        run([*compiler, "-shared", "-o", str(library), *linked])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not SOURCES:
        pytest.skip("SHMSERVE_TRITON_SOURCES names no checkouts of Triton's backends")
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler is installed")
    directory, root = tmp_path_factory.mktemp("backends"), tmp_path_factory.mktemp("models")
    build(directory)
    for name, described in MODELS.items():
        write_model(root, name, config_text(name, *described))
    for name in ("addsub_python", "addsub_onnx"):
        write_model(root, name, config_text("python", *SIXTEEN), ADD_SUB)
    options = ["--backend-directory", str(directory), "--backend-config=native,prefer=identity"]
    with Server(root, *options, gateway=True) as running:
        with running.client() as client:
            client.infer("identity", {"INPUT0": LARGE})  # maps the memory before the leak check starts
        yield running


def test_identity_reports_parameters_and_a_metric(server: Server, client: shmserve.Client) -> None:
    for x in (A.reshape(1, 16), LARGE):
        result = client.infer("identity", {"INPUT0": x})
        np.testing.assert_array_equal(result["OUTPUT0"], x)
        assert result.parameters["param1"] == 42
    page = urlopen(f"http://{server.endpoints['metrics']}/metrics").read().decode()
    assert re.search(r'^input_byte_size_counter\{model="identity",version="1"\} [1-9]', page, re.MULTILINE)


def test_square_answers_as_often_as_its_input_says(client: shmserve.Client) -> None:
    results = [part["OUT"].tolist() for part in client.stream("square", {"IN": np.array([3], np.int32)})]
    assert results == [[3], [3], [3]]


def test_repeat_answers_from_a_thread(client: shmserve.Client) -> None:
    inputs = {
        "IN": np.array([3, 4, 5], np.int32),
        "DELAY": np.array([1, 2, 3], np.uint32),
        "WAIT": np.array([1], np.uint32),
    }
    parts = [(part["OUT"].tolist(), part["IDX"].tolist()) for part in client.stream("repeat", inputs)]
    assert parts == [([3], [0]), ([4], [1]), ([5], [2])]


def test_recommended_collects_a_batch(client: shmserve.Client) -> None:
    inputs = [np.full((1, 4), number, np.int32) for number in range(20)]
    futures = [client.submit("recommended", {"IN0": x}) for x in inputs]
    for x, future in zip(inputs, futures, strict=True):
        np.testing.assert_array_equal(future.result()["OUT0"], x)


def test_bls_calls_two_models(client: shmserve.Client) -> None:
    for _ in range(20):
        result = client.infer("bls", {"INPUT0": A, "INPUT1": B})
        np.testing.assert_array_equal(result["OUTPUT0"], A + B)
        np.testing.assert_array_equal(result["OUTPUT1"], A - B)


def test_nvidias_python_backend_runs_a_model(tmp_path: Path) -> None:
    if not PYTHON_BACKEND:
        pytest.skip("SHMSERVE_TRITON_PYTHON_BACKEND names no folder with NVIDIA's Python backend")
    directory = tmp_path / "backends"
    shutil.copytree(PYTHON_BACKEND, directory / "python")
    numpy = os.environ.get("SHMSERVE_TRITON_NUMPY", "")
    source = f"import sys\nsys.path.insert(0, {numpy!r})\n{ADD_SUB}"
    write_model(tmp_path / "models", "add_sub", config_text("python", *SIXTEEN), source)
    options = ["--backend-directory", str(directory), "--backend-config=native,prefer=python"]
    with Server(tmp_path / "models", *options) as server, server.client() as client:
        result = client.infer("add_sub", {"INPUT0": A, "INPUT1": B})
        np.testing.assert_array_equal(result["OUTPUT0"], A + B)
        np.testing.assert_array_equal(result["OUTPUT1"], A - B)
