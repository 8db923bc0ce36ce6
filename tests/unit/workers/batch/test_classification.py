"""Classes instead of tensors: the largest values as strings. Expected values are computed in plain Python."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as of_numpy

from shmserve.errors import InvalidRequest
from shmserve.protocol.messages import Handle, Tensor, Wanted
from shmserve.protocol.worker_messages import Row, Work
from shmserve.repo.config.schema import ModelConfig, ModelOutput, ModelTensorReshape
from shmserve.workers.batch import classification
from shmserve.workers.batch.results import Results
from shmserve.workers.batch.specs import Spec, outputs_of
from tests.support.workers.batch_parts import Array, Parts
from tests.support.workers.worker_harness import assert_failed

LABELS = ("cat", "", "dog:big")


def spec_of(dtype: str, dims: tuple[int, ...], max_batch: int, reshape: tuple[int, ...] | None = None) -> Spec:
    config = "TYPE_STRING" if dtype == "BYTES" else f"TYPE_{dtype}"
    shape = None if reshape is None else ModelTensorReshape(shape=reshape)
    output = ModelOutput(name="y", data_type=config, dims=dims, reshape=shape)  # type: ignore[arg-type]
    return outputs_of(ModelConfig(max_batch_size=max_batch, output=(output,)))[0]


def expected_of(values: list[Any], count: int, labels: tuple[str, ...]) -> list[bytes]:
    """Larger values first, equal ones by index, NaN last."""
    order = sorted(range(len(values)), key=lambda i: (values[i] != values[i], -values[i], i))
    texts = []
    for index in order[:count]:
        value = values[index]
        text = f"{value}:{index}" if isinstance(value, int) else f"{value:.6f}:{index}"
        label = labels[index] if index < len(labels) else ""
        texts.append((f"{text}:{label}" if label else text).encode())
    return texts


SHAPES = st.tuples(st.integers(0, 3), st.integers(0, 30))
ROWS = st.one_of(
    *(of_numpy.arrays(dtype, SHAPES) for dtype in (np.float32, np.float64, np.float16, np.int64, np.uint64)),
    of_numpy.arrays(np.uint8, SHAPES, elements=st.integers(0, 3)),
)


@given(ROWS, st.one_of(st.integers(1, 40), st.just(2**31 - 1)))
def test_the_largest_values_come_in_order(array: Array, count: int) -> None:
    dtype = {"f": "FP", "i": "INT", "u": "UINT"}[array.dtype.kind] + str(array.dtype.itemsize * 8)
    found = classification.classify(spec_of(dtype, (-1,), 8), array, count, LABELS)
    assert found.shape == (len(array), min(count, array.shape[1]))
    assert found.tolist() == [expected_of(row, count, LABELS) for row in array.tolist()]
    if len(array):
        single = classification.classify(spec_of(dtype, (-1,), 0), array[0], count, ())
        assert single.tolist() == expected_of(array[0].tolist(), count, ())


def test_bf16_as_bits() -> None:
    values = np.array([1.5, -2.0, math.inf, math.nan, 0.25], np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    found = classification.classify(spec_of("BF16", (5,), 0), bits, 9, ())
    assert found.tolist() == [b"inf:2", b"1.500000:0", b"0.250000:4", b"-2.000000:1", b"nan:3"]


def test_an_item_of_several_dims_is_flattened() -> None:
    array = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    assert classification.classify(spec_of("INT32", (3, 4), 8), array, 1, ()).tolist() == [[b"11:11"], [b"23:11"]]
    assert classification.classify(spec_of("INT32", (2, 3, 4), 0), array[:, ::-1], 1, ()).tolist() == [b"23:15"]
    assert classification.classify(spec_of("INT32", (), 0), np.array(5, np.int32), 3, ("a",)).tolist() == [b"5:0:a"]
    assert classification.classify(spec_of("INT32", (3,), 8), np.empty((0, 3), np.int32), 2, ()).shape == (0, 2)
    reshaped = spec_of("INT32", (2, 2), 4, reshape=(4,))
    assert classification.classify(reshaped, np.array([[4, 9, 1, 9]], np.int32), 2, ()).tolist() == [[b"9:1", b"9:3"]]


def test_the_number_of_elements_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classification, "LIMIT", 200)
    spec = spec_of("INT32", (-1,), 8)
    assert classification.classify(spec, np.zeros((2, 100), np.int32), 5, ()).shape == (2, 5)
    with pytest.raises(InvalidRequest, match="classification output tensor too large: output 'y' has 202 elements"):
        classification.classify(spec, np.zeros((2, 101), np.int32), 1, ())


OUTPUTS = ModelConfig(
    name="m",
    max_batch_size=8,
    output=(
        ModelOutput(name="y", data_type="TYPE_FP32", dims=(-1,)),
        ModelOutput(name="s", data_type="TYPE_STRING", dims=(1,)),
        ModelOutput(name="b", data_type="TYPE_BOOL", dims=(1,)),
    ),
)


LABELLED = (LABELS, (), ())


def rows_of(parts: Parts, array: Array, work_items: list[Work], way: str) -> list[Row]:
    """`way`: backends either `put` an array or compute it in `place`."""
    results = Results(parts.scatter, work_items, sum(work.rows for work in work_items))
    if way == "place":
        results.place(0, array.shape)[...] = array
    elif results.needed(0):
        results.put(0, array)
    for index, kind in ((1, object), (2, bool)):
        if results.needed(index):
            results.put(index, np.full((len(array), 1), b"s" if kind is object else True, kind))
    return results.rows()


def read(parts: Parts, tensor: Tensor) -> list[Any]:
    if isinstance(tensor.data, tuple):
        assert parts.arenas.owns(tensor.data[0].segment)
    found: list[Any] = parts.read(tensor).tolist()
    return found


def free(parts: Parts, rows: list[Row]) -> None:
    parts.free(*(tensor for row in rows for tensor in row.outputs))
    assert parts.arenas.used == 0


@pytest.mark.parametrize("way", ["put", "place"])
@pytest.mark.parametrize("width", [3, 2000], ids=["small", "large"])
def test_classes_and_tensors_in_one_batch(way: str, width: int) -> None:
    array = np.random.default_rng(1).random((6, width), np.float32)
    with Parts(OUTPUTS, LABELLED) as parts:
        block = parts.client.allocate(2 * width * 4)
        place = Handle(block.segment, block.offset, 2 * width * 4)
        work_items = [
            Work(1, 1, (), (Wanted("y", None, 2),), "internal"),
            Work(2, 2, (), (Wanted("y"),), "internal"),
            Work(3, 1, (), (Wanted("y", None, width),), "internal"),
            Work(4, 2, (), (Wanted("y", place),), "internal"),
        ]
        found = rows_of(parts, array, work_items, way)
        assert [row.error for row in found] == [None] * 4
        first, second, third, fourth = [row.outputs[0] for row in found]
        assert (first.dtype, first.shape) == ("BYTES", (1, 2))
        assert read(parts, first) == [expected_of(array[0].tolist(), 2, LABELS)]
        assert read(parts, second) == array[1:3].tolist()
        assert (third.dtype, third.shape) == ("BYTES", (1, width))
        assert isinstance(third.data, tuple) == (width > 100)
        assert read(parts, third) == [expected_of(array[3].tolist(), width, LABELS)]
        assert fourth.data == (place,)
        assert block.array(np.dtype(np.float32), (2, width)).tolist() == array[4:].tolist()
        free(parts, found)


def test_outputs_without_classes_fail_their_request_alone() -> None:
    array = np.zeros((4, 3), np.float32)
    with Parts(OUTPUTS, LABELLED) as parts:
        block = parts.client.allocate(12)
        work_items = [
            Work(1, 1, (), (Wanted("s", None, 1),), "internal"),
            Work(2, 1, (), (Wanted("b", None, 1),), "internal"),
            Work(3, 1, (), (Wanted("y", Handle(block.segment, block.offset, 12), 1),), "internal"),
            Work(4, 1, (), (Wanted("y", None, 1), Wanted("s")), "internal"),
        ]
        found = rows_of(parts, array, work_items, "put")
        assert_failed(found[0], "INVALID_ARG", "class result not available for output due to unsupported type 'BYTES'")
        assert_failed(found[1], "INVALID_ARG", "type 'BOOL'")
        assert_failed(found[2], "INVALID_ARG", "shared memory")
        assert found[3].error is None
        assert [read(parts, tensor) for tensor in found[3].outputs] == [[[b"0.000000:0:cat"]], [[b"s"]]]
        free(parts, found)
