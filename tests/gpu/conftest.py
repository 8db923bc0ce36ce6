"""Tests on a GPU: fixtures, the order of the files, and a rehearsal without a GPU.

`SHMSERVE_GPU_STANDINS=1` runs them with tests/standins instead of CuPy and NVML. What only hardware or the real
libraries can show is skipped then (`hardware`). Results mean little, but programming errors are found.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import shmserve
from shmserve.repo.gpus import discover
from shmserve.testing import Server
from tests import STANDINS

REHEARSAL = bool(os.environ.get("SHMSERVE_GPU_STANDINS"))
ORDER = (
    "runtime",
    "ipc",
    "nvml",
    "clients",
    "steps",
    "dlpack",
    "memory",
    "instances",
    "faults",
    "native",
    "engines",
    "language_models",
    "tensorrt",
)
"""The files from what all others depend on to what takes longest: time on a GPU is limited."""

if REHEARSAL:
    sys.path.insert(0, str(STANDINS))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(STANDINS), os.environ.get("PYTHONPATH"))))
    os.environ["STANDIN_GPUS"] = json.dumps([{"uuid": "GPU-aa11", "pci": "00000000:3B:00.0"}])
    os.environ["STANDIN_DEVICE_BYTES"] = str(16 << 30)
    os.environ["CUDA_VISIBLE_DEVICES"] = "GPU-aa11"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder, places = Path(__file__).parent, {f"test_{name}": number for number, name in enumerate(ORDER)}
    here = [item for item in items if item.path.parent == folder]
    for item in here:
        item.add_marker(pytest.mark.filterwarnings("default"))  # a warning of a vendor's library is no failure
    ordered = iter(sorted(here, key=lambda item: places.get(item.path.stem, len(places))))
    items[:] = [next(ordered) if item.path.parent == folder else item for item in items]


@pytest.fixture(scope="session", autouse=True)
def _gpu() -> None:
    found = discover()
    if not found.devices:
        pytest.skip(f"no GPU: {found.why or 'there is none, or nvidia-ml-py is not installed'}")


@pytest.fixture
def client(server: Server) -> Iterator[shmserve.Client]:
    """A client of the `server` that a file defines."""
    with server.client() as client:
        yield client


@pytest.fixture(scope="session")
def hardware() -> None:
    if REHEARSAL:
        pytest.skip("needs a real GPU")


@pytest.fixture(scope="session")
def cupy() -> Any:
    found: Any = pytest.importorskip("cupy", exc_type=ImportError)
    found.cuda.Device(0).synchronize()  # creates the context
    return found


@pytest.fixture(scope="session")
def torch(hardware: None) -> Any:
    found: Any = pytest.importorskip("torch", exc_type=ImportError)
    if not found.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    return found


@pytest.fixture
def runtime(cupy: Any) -> Any:
    """CuPy's binding of the CUDA runtime."""
    return importlib.import_module("cupy.cuda.runtime")


@contextmanager
def nvml() -> Iterator[Any]:
    found: Any = importlib.import_module("pynvml")
    found.nvmlInit()
    try:
        yield found
    finally:
        found.nvmlShutdown()


Serve = Callable[..., Server]


@pytest.fixture
def serve(cupy: Any) -> Iterator[Serve]:
    """Starts a server of a repository, until the end of the test."""
    with ExitStack() as stack:

        def start(repository: Path, *options: str) -> Server:
            return stack.enter_context(Server(repository, "--exit-on-error", "true", *options, start_timeout=120))

        yield start
