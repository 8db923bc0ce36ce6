"""Configurations written for other servers: all are valid if the backend and the GPUs exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from shmserve.repo.load import ModelContext, examine
from tests.support.repo.golden import configurations

HERE = ("identity", "onnxruntime", "python")
EVERYWHERE = (*HERE, "tensorrt", "tensorflow", "pytorch", "openvino", "dali", "paddle", "fil")
GPUS = (0, 1)


def examples(*names: str) -> list[Any]:
    """The configurations of `examples/NAME.pbtxt`."""
    return [
        pytest.param(text, id=f"{name}:{line}")
        for name in names
        for line, text in configurations((Path(__file__).with_name("examples") / f"{name}.pbtxt").read_text())
    ]


def problems(text: str, backends: tuple[str, ...] = HERE, gpus: tuple[int, ...] = ()) -> list[tuple[str, str]]:
    found = examine(text, "config.pbtxt", ModelContext("model", backends, (), gpus))
    return [(problem.path, problem.text) for problem in found.problems]


@pytest.mark.parametrize("text", examples("served", "models"))
def test_valid_configurations(text: str) -> None:
    assert problems(text) == []


@pytest.mark.parametrize("text", examples("other_backends"))
def test_only_the_backend_is_missing(text: str) -> None:
    ((path, problem),) = problems(text)
    assert path == "backend"
    assert re.match(r'found "\w+", which this server does not have; ', problem)
    assert problems(text, EVERYWHERE) == []


@pytest.mark.parametrize("text", examples("gpus"))
def test_only_the_gpu_is_missing(text: str) -> None:
    found = problems(text)
    assert found
    for path, problem in found:
        assert re.fullmatch(r"instance_group\[\d\]\.kind", path)
        assert problem.startswith("KIND_GPU, but this server runs models only on the CPU")
    assert problems(text, gpus=GPUS) == []


@pytest.mark.parametrize(
    ("backend", "unused"), [("onnxruntime", []), ("paddle", ["gpu"]), ("openvino", ["gpu", "cpu"])], ids=str
)
def test_accelerators_that_the_backend_does_not_use(backend: str, unused: list[str]) -> None:
    """Only they cause a warning."""
    lists = " ".join(f'{place}_execution_accelerator {{ name: "mkldnn" }}' for place in ("cpu", "gpu"))
    text = f'backend: "{backend}" optimization {{ execution_accelerators {{ {lists} }} }}'
    found = examine(text, "config.pbtxt", ModelContext("model", EVERYWHERE))
    paths = [f"optimization.execution_accelerators.{place}_execution_accelerator" for place in unused]
    assert [problem.path for problem in found.warnings] == paths
