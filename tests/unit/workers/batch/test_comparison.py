"""Comparison of outputs with those of another version; the oracle is numpy."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.protocol.messages import Failure, Handle, Tensor
from shmserve.protocol.worker_messages import Expect, Row
from shmserve.python_values import bfloat16_bits
from shmserve.shm.arena import Arena
from shmserve.shm.extents import memfd
from shmserve.shm.mapped import Mapped
from shmserve.workers.batch import comparison
from shmserve.workers.batch.comparison import TOLERANCES, Comparisons, float_difference
from tests.support.workers.worker_harness import assert_failed

FLOATS = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20)


def tensor(array: npt.NDArray[Any], dtype: str = "FP32", name: str = "y") -> Tensor:
    return Tensor(name, dtype, array.shape, array.tobytes())


def compared(expected: Tensor, found: Tensor) -> object:
    """The reported result: True, or how they differ."""
    discarded: list[Row] = []
    comparisons = Comparisons(Mapped(), discarded.append)
    comparisons.expect(Expect(7, (expected,)))
    (other, row) = comparisons.compared([Row(6, (found,)), Row(7, (found,))])
    assert other.outputs == (found,), "others keep their outputs"
    assert row.outputs == ()
    assert [one.request for one in discarded] == [7]
    assert not comparisons.expected
    assert row.parameters is not None
    return row.parameters["equal"] or f"{row.parameters['output']} {row.parameters['difference']}"


@given(FLOATS, st.floats(-1, 1))
def test_floats(values: list[float], share: float) -> None:
    one = np.array(values, np.float32)
    other = one.copy()
    other[0] += np.float32(share * np.abs(one).max())
    exact = np.abs(other.astype(np.float64) - one).max()
    assert float_difference(one, one) == 0
    found = float_difference(one, other)
    assert found == (0 if not exact else pytest.approx(exact / np.abs(one).max()) if one.any() else np.inf)
    assert (compared(tensor(one), tensor(other)) is True) == (found <= TOLERANCES["FP32"])


def test_special_floats() -> None:
    nan, inf = np.nan, np.inf
    one = np.array([nan, inf, -inf, 1], np.float32)
    assert compared(tensor(one), tensor(one.copy())) is True
    assert compared(tensor(one), tensor(np.array([nan, inf, -inf, 1.0005], np.float32))) is True
    for other in ([0, inf, -inf, 1], [nan, inf, inf, 1], [nan, 1, -inf, 1], [nan, inf, -inf, nan]):
        assert "differs by" in str(compared(tensor(one), tensor(np.array(other, np.float32))))


@pytest.mark.parametrize("has_ml_dtypes", [True, False])
def test_bfloat16(has_ml_dtypes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared by value, not by bits, which are nearly the same for 1 and 2."""
    if not has_ml_dtypes:
        monkeypatch.setattr(comparison, "to_numpy", lambda dtype: np.dtype(np.uint16))
    one, close, two = (
        tensor(bfloat16_bits(np.array([1, -1, last], np.float32)), "BF16") for last in (1.0, 1.0078125, 2.0)
    )
    assert compared(one, close) is True
    assert compared(one, two) == "y differs by 100 % of its largest value"


def test_differences_are_described() -> None:
    one, ints = np.arange(6, dtype=np.float32), np.arange(6, dtype=np.int64)
    assert compared(tensor(one), tensor(one * 2)) == "y differs by 100 % of its largest value"
    assert compared(tensor(one), tensor(one.reshape(2, 3))) == "y has shape [2, 3], not [6]"
    assert compared(tensor(one), tensor(ints, "INT64")) == "y has data type INT64, not FP32"
    assert compared(tensor(ints, "INT64"), tensor(ints, "INT64")) is True
    other = ints.copy()
    other[2:4] = 0
    assert compared(tensor(ints, "INT64"), tensor(other, "INT64")) == "y has 2 of 6 elements that differ"
    assert compared(tensor(one), tensor(one, name="z")) == "y is missing"
    strings = Tensor("y", "BYTES", (1,), b"\1\0\0\0a"), Tensor("y", "BYTES", (1,), b"\1\0\0\0b")
    assert compared(strings[0], strings[0]) is True
    assert compared(*strings) == "y has other strings"


def test_tensors_in_shared_memory() -> None:
    """In one piece or in several."""
    mapped, arena = Mapped(), Arena(3, memfd.create, limit_bytes=1 << 20)
    array = np.arange(3000, dtype=np.float32)
    block = arena.allocate(array.nbytes)
    np.copyto(block.array(array.dtype, array.shape), array)
    segment = arena.segments[0]
    mapped.add(segment.id, segment.size, fd=os.dup(segment.fd))
    whole = block.handle()
    halves = (Handle(whole.segment, whole.offset, 4000), Handle(whole.segment, whole.offset + 4000, 8000))
    comparisons = Comparisons(mapped, lambda row: None)
    for data in ((whole,), halves):
        comparisons.expect(Expect(1, (Tensor("y", "FP32", array.shape, data),)))
        (row,) = comparisons.compared([Row(1, (tensor(array),))])
        assert row.parameters == {"equal": True}
    comparisons.expect(Expect(1, (Tensor("y", "FP32", array.shape, (Handle(99, 0, 12000),)),)))
    (row,) = comparisons.compared([Row(1, (tensor(array),))])
    assert_failed(row, "HANDLE_LOST", "cannot compare its outputs")
    mapped.close()
    arena.close()


def test_requests_that_failed_or_were_withdrawn() -> None:
    discarded: list[Row] = []
    comparisons = Comparisons(Mapped(), discarded.append)
    for number in (1, 2):
        comparisons.expect(Expect(number, ()))
    failed = Row(1, (), Failure("MODEL_FAILED", "no"))
    assert comparisons.compared([failed]) == [failed]
    comparisons.forget((2, 3))
    assert not comparisons.expected
    assert not discarded
