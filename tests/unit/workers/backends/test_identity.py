"""The backend `identity` in place of slow models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shmserve.errors import InvalidRequest
from shmserve.workers.backends.identity import Identity
from tests.support.workers.batch_parts import CONTEXT
from tests.support.workers.in_process import inline, loaded, run, value
from tests.support.workers.worker_harness import config, work

X = {"x": ("FP32", (-1,))}


def load(delay: str) -> None:
    Identity(CONTEXT).load(config("identity", X, X, parameters={"creation_delay_sec": delay}))


def test_loading_takes_as_long_as_the_configuration_says(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("select.select", lambda *given: waited.append(given[3]))
    load("2.5")
    assert waited == [2.5]
    with pytest.raises(InvalidRequest, match="creation_delay_sec"):
        load("long")


def test_missing_optional_inputs_of_known_shape_are_zeros(tmp_path: Path) -> None:
    a, b, c = ("FP32", (2,)), ("FP32", (-1,)), ("FP32", (1,))
    inputs, outputs = {"a": a, "b": b, "c": c}, {"x": a, "y": b, "z": c}
    (tmp_path / "1").mkdir()
    with loaded(config("identity", inputs, outputs, max_batch=4, optional=["a", "b"]), tmp_path) as model:
        rows = run(model, *[work(number, inline("c", np.array([[number]], np.float32))) for number in (1, 2)])
        for number, row in enumerate(rows, 1):
            found = {output.name: value(row, index).tolist() for index, output in enumerate(row.outputs)}
            assert found == {"x": [[0, 0]], "z": [[number]]}
