"""Scenario files: conversations with the core, as text.

A conversation is lines of commands, a line `----`, the expected lines, and an empty line. Lines that begin with # are
comments. `server` starts a new core; otherwise a conversation continues where the last one ended. Commands joined by
`;` are one turn.

`m_0` is the first instance of model `m`, `a1` is request 1 of client `a`. `execute` starts a batch, `ahead` prefetches
the next one, `extend` adds to it. `part a1` is one of several responses, `last a1` the final one. `a1.0` is the first
step of an ensemble requested by `a1`, `a1.0[2]` row 2 of that step, and `a1@3` means slot 3.

SHMSERVE_REWRITE=1 writes the results to the files, so that one can review the diff.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from shmserve.core.limits import ANY_GPU, Limits
from shmserve.core.owners.rate_limiter import ANY, SHARED
from tests import ROOT
from tests.support.core.policies import nanoseconds
from tests.support.core.scenarios.scenario import Scenario, size


def _server(line: str) -> Scenario:
    words = dict(word.split("=", 1) for word in line.split()[1:])
    gpus, resources = words.pop("gpu_budget", ""), words.pop("resources", "")
    values: dict[str, Any] = {
        key: nanoseconds(value) if value[-1] == "s" else size(value) if value[-1] == "m" else int(value)
        for key, value in words.items()
    }
    if gpus:
        values["gpu_budgets"] = ((ANY_GPU, size(gpus)),)
    if resources:
        values["resources"] = tuple(_resource(text) for text in resources.split(","))
    return Scenario(Limits(**values))


def _resource(text: str) -> tuple[str, int, int]:
    """memory:4 for each device, memory:4:1 for device 1, licence:4:shared for all of them"""
    name, count, where = f"{text}::".split(":")[:3]
    return name, SHARED if where == "shared" else int(where or ANY), int(count)


def play(path: Path) -> tuple[str, str]:
    """The text of the file, and the same text with the actual results."""
    text = path.read_text()
    played: list[str] = []
    scenario = Scenario()
    expected = False
    for number, line in enumerate(text.splitlines(), 1):
        if expected:
            expected = line != ""
            if expected:
                continue
        if line == "----":
            played += [line, *scenario.lines]
            scenario.lines.clear()
            expected = True
            continue
        played.append(line)
        if line.startswith("#") or not line:
            continue
        try:
            if line.split()[0] == "server":
                scenario = _server(line)
            else:
                scenario.run(line)
        except Exception as error:
            raise AssertionError(f"{path.name}:{number}: {line}\n{type(error).__name__}: {error}") from error
    return text, "\n".join(played) + "\n"


FOLDER = ROOT / "tests" / "scenarios"
FILES = sorted(FOLDER.glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    expected, found = play(path)
    if os.environ.get("SHMSERVE_REWRITE") == "1":
        path.write_text(found)
        return
    assert found.splitlines() == expected.splitlines()
