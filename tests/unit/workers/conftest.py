"""Fixtures for tests with the stand-ins for CuPy and TensorRT. At the end of each test, they must have no memory left,
and must not have been misused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.workers.gpu.device_pair import Pair
from tests.support.workers.gpu.harness import standins
from tests.support.workers.gpu.tensorrt_harness import Gpu


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with standins() as (runtime, trt):
        yield Gpu(runtime, trt)
        assert runtime.state.left() == {}
        assert runtime.state.violations == []


@pytest.fixture
def runtime(gpu: Gpu) -> Any:
    return gpu.runtime


@pytest.fixture
def pair(runtime: Any, tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(runtime, tmp_path)
    yield pair
    pair.close()
