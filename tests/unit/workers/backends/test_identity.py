"""The backend `identity` in place of slow models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shmserve.errors import InvalidRequest
from shmserve.repo.load import parse
from shmserve.workers.backends.base import Context
from shmserve.workers.backends.identity import Identity
from tests.support.workers.in_process import inline, loaded, run, value
from tests.support.workers.worker_harness import work

CONFIG = """
name: "slow" backend: "identity"
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
parameters [ { key: "creation_delay_sec" value { string_value: "DELAY" } } ]
"""


OPTIONAL = """
name: "m" backend: "identity" max_batch_size: 4
input [ { name: "a" data_type: TYPE_FP32 dims: [ 2 ] optional: true },
        { name: "b" data_type: TYPE_FP32 dims: [ -1 ] optional: true },
        { name: "c" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "x" data_type: TYPE_FP32 dims: [ 2 ] }, { name: "y" data_type: TYPE_FP32 dims: [ -1 ] },
         { name: "z" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""


def load(delay: str) -> None:
    context = Context("slow", 1, "slow_0_0", Path(), Path(), {})
    Identity(context).load(parse(CONFIG.replace("DELAY", delay)))


def test_loading_takes_as_long_as_the_configuration_says(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("select.select", lambda *given: waited.append(given[3]))
    load("2.5")
    assert waited == [2.5]


def test_a_delay_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="creation_delay_sec"):
        load("long")


def test_missing_optional_inputs_of_known_shape_are_zeros(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    with loaded(parse(OPTIONAL), tmp_path) as model:
        rows = run(model, *[work(number, inline("c", np.array([[number]], np.float32))) for number in (1, 2)])
        for number, row in enumerate(rows, 1):
            made = {output.name: value(row, index).tolist() for index, output in enumerate(row.outputs)}
            assert made == {"x": [[0, 0]], "z": [[number]]}
