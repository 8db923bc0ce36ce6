"""Fixtures for tests with a fake GPU, or with the stand-ins for CuPy and TensorRT. At the end of each test, they must
have no memory left.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.gpu.fake_device import FakeGpu, fake_gpu
from tests.support.workers.gpu.device_pair import Pair, TensorRtPair
from tests.support.workers.gpu.harness import standins
from tests.support.workers.gpu.tensorrt_harness import Gpu


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with standins() as (runtime, trt):
        yield Gpu(runtime, trt)
        assert runtime.state.left() == {}


@pytest.fixture
def runtime(gpu: Gpu) -> Any:
    return gpu.runtime


@pytest.fixture
def fake() -> Iterator[FakeGpu]:
    with fake_gpu() as fake:
        yield fake
        assert fake.left() == {}


@pytest.fixture
def pair(fake: FakeGpu, tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(fake, tmp_path)
    yield pair
    pair.close()


@pytest.fixture
def tensorrt_pair(runtime: Any, tmp_path: Path) -> Iterator[TensorRtPair]:
    pair = TensorRtPair(runtime, tmp_path)
    yield pair
    pair.close()
