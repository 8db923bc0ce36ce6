"""Golden files: configurations in `broken` that break one rule each, and the texts of their problems.

Each line of `NAME.expected` is a problem or a warning of a configuration of `NAME.pbtxt` (see
`tests.support.repo.golden`), after the line on which that begins. In `override.jsonl` each line is a configuration, as
in a load request. Set SHMSERVE_REWRITE=1 to write the .expected files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shmserve.repo.config.override import parse_override
from shmserve.repo.config.problems import ConfigError, Problem
from shmserve.repo.load import ModelContext, examine
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


def shown(line: int, problem: Problem, kind: str = "") -> str:
    text = f"{line}: {kind}{str(problem).removeprefix(':')}"
    assert text.isprintable()
    return text


@pytest.mark.parametrize("file", sorted([*BROKEN.glob("*.pbtxt"), *BROKEN.glob("*.jsonl")]), ids=lambda file: file.stem)
def test_every_problem_has_the_expected_place_and_text(file: Path) -> None:
    found = (results if file.suffix == ".pbtxt" else override_results)(file.read_text())
    assert_golden(file.with_suffix(".expected"), list(found))
