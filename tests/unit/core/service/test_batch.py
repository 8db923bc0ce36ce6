"""The time in which a batch waits for callers that do not read."""

from __future__ import annotations

from typing import Any

from shmserve.core.service.batch import Batch
from shmserve.core.service.form import Reason


def test_time_in_which_a_batch_waits_for_several_callers_counts_once() -> None:
    batch: Batch[Any] = Batch([(1, [])], 2, Reason.FULL, None, 0)
    batch.stall("a", 10)
    batch.stall("b", 15)
    assert batch.resume("a", 20) == 10
    assert batch.resume("b", 30) == 15
    assert batch.waited_for_callers(40) == 20
    assert batch.worked(40) == 20
