"""Configurations as they are written for other servers: all are valid where the backend and the GPUs exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shmserve.repo.config.complete import complete
from shmserve.repo.config.origins import as_text, origins
from shmserve.repo.config.override import parse_override
from shmserve.repo.config.protos import to_config
from shmserve.repo.config.schema import as_triton_json
from shmserve.repo.load import Setting, examine, parse
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
    found = examine(text, "config.pbtxt", Setting("model", backends, (), gpus))
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


@pytest.mark.parametrize("text", examples("served", "models", "other_backends", "gpus"))
def test_all_forms_of_a_configuration_are_equivalent(text: str) -> None:
    """The file, the JSON of a load request, and the text with origins."""
    given = parse(text)
    assert to_config(parse_override(json.dumps(as_triton_json(given))).message) == given
    final = complete(given, "model", (), EVERYWHERE, GPUS)
    assert parse(as_text(final, origins(given, final, final, "file"))) == final
