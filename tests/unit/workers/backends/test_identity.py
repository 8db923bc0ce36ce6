"""The backend `identity` in place of slow models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shmserve.errors import InvalidRequest
from shmserve.protocol.messages import Tensor
from shmserve.repo.load import parse
from shmserve.workers.backends.base import Context
from shmserve.workers.backends.identity import Identity
from tests.support.workers.worker_harness import running, work

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


@pytest.mark.process
def test_missing_optional_inputs_of_known_shape_are_zeros(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    with running(parse(OPTIONAL), tmp_path) as worker:
        given = [Tensor("c", "FP32", (1, 1), np.float32(number).tobytes()) for number in (1, 2)]
        rows = worker.run(*[work(number, tensor) for number, tensor in enumerate(given, 1)])
        for number, row in enumerate(rows, 1):
            assert row.error is None, row.error
            made = {tensor.name: worker.array(tensor, np.float32).tolist() for tensor in row.outputs}
            assert made == {"x": [[0, 0]], "z": [[number]]}
