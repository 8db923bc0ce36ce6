"""Fixtures for tests with a fake GPU. At the end of each test, the fake must have no memory left."""

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


@pytest.fixture
def runtime(gpu: Gpu) -> Any:
    return gpu.runtime


@pytest.fixture
def pair(runtime: Any, tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(runtime, tmp_path)
    yield pair
    pair.close()
