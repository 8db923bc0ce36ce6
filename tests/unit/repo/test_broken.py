"""Golden files: configurations in `broken` that break one rule each, and the texts of their problems. Those in
`examples` were written for other servers, and are valid if the backend and the GPUs exist.

Each line of `NAME.expected` is a problem or a warning of a configuration of `NAME.pbtxt` (see
`tests.support.repo.golden`), after the line on which that begins. In `override.jsonl` each line is a configuration, as
in a load request. Set SHMSERVE_REWRITE=1 to write the .expected files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shmserve.repo.config.complete import complete
from shmserve.repo.config.override import parse_override
from shmserve.repo.config.problems import ConfigError, Problem
from shmserve.repo.load import ModelContext, examine, parse
from shmserve.repo.rules.optimization import setting_problems
from tests.support.repo.golden import assert_golden, configurations
from tests.support.repo.texts import BACKENDS

BROKEN = Path(__file__).with_name("broken")


def results(text: str) -> Iterator[str]:
    for line, config in configurations(text):
        examined = examine(config, "", ModelContext("m", BACKENDS))
        assert (examined.config is None) is bool(examined.problems)
        for problem in examined.problems:
            yield shown(line, problem)
        for warning in examined.warnings:
            yield shown(line, warning, "warning: ")
        if not examined.problems and not examined.warnings:
            yield f"{line}: valid"


def override_results(text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        with pytest.raises(ConfigError) as caught:
            parse_override(line)
        for problem in caught.value.problems:
            assert problem.file == "config override"
            yield shown(number, problem._replace(file=""))


def setting_results(text: str) -> Iterator[str]:
    for line, config in configurations(text):
        machines = (("with a GPU", (0,)), ("without a GPU", ()))
        found = [
            f"{line}: {machine}: {problem.path}: {problem.text}"
            for machine, gpus in machines
            for problem in setting_problems(complete(parse(config), "m", gpus=gpus))
        ]
        yield from found or [f"{line}: valid"]


def shown(line: int, problem: Problem, kind: str = "") -> str:
    text = f"{line}: {kind}{str(problem).removeprefix(':')}"
    assert text.isprintable()
    return text


@pytest.mark.parametrize("file", sorted([*BROKEN.glob("*.pbtxt"), *BROKEN.glob("*.jsonl")]), ids=lambda file: file.stem)
def test_every_problem_has_the_expected_place_and_text(file: Path) -> None:
    found = {"override": override_results, "settings": setting_results}.get(file.stem, results)(file.read_text())
    assert_golden(file.with_suffix(".expected"), list(found))


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
