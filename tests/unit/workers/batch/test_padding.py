"""Requests of different lengths in one batch: padded inputs, outputs cut back. Expected values come from numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.errors import InvalidRequest, ModelFailed
from shmserve.protocol.messages import Handle, Tensor, Wanted
from shmserve.protocol.worker_messages import Work
from shmserve.repo.config.schema import ModelConfig
from shmserve.shm.strings import encode_bytes
from shmserve.workers.batch.gather import GatherGroup
from shmserve.workers.batch.padding import PaddedResults
from tests.support.workers.batch_parts import Array, Parts
from tests.support.workers.in_process import inline
from tests.support.workers.worker_harness import config


def model(**parameters: str) -> ModelConfig:
    """a: [rows, length], m: [rows, length, length, 2], s: strings, b: of one size; an output for each."""
    tensors = {"a": ("FP32", (-1,)), "m": ("INT16", (-1, -1, 2)), "s": ("STRING", (-1,)), "b": ("INT16", (2,))}
    padding = {"padding": "a=-1.5 m[0]=7 m[1]=7 s=none", "padding_outputs": "a m[0] m[1] s"}
    return config("identity", tensors, tensors, max_batch=64, optional=["s"], parameters=padding | parameters)


def arrays_of(number: int, rows: int, length: int) -> dict[str, Array]:
    random = np.random.default_rng(number)
    strings = np.array([b"%d" % value for value in range(rows * length)], object).reshape(rows, length)
    return {
        "a": random.random((rows, length), np.float32),
        "m": random.integers(0, 99, (rows, length, length, 2)).astype(np.int16),
        "s": strings,
        "b": random.integers(0, 99, (rows, 2)).astype(np.int16),
    }


def work_of(made: Parts, number: int, arrays: dict[str, Array], places: list[int], outputs: Any = None) -> Work:
    inputs = [made.tensor(name, arrays[name], places) for name in "amb"]
    if "s" in arrays:
        inputs.append(Tensor("s", "BYTES", arrays["s"].shape, encode_bytes(arrays["s"])))
    return Work(number, len(arrays["a"]), tuple(inputs), outputs, "internal")


def run(made: Parts, group: GatherGroup, direct: bool) -> dict[int, Any]:
    """Echoes all inputs."""
    results = PaddedResults(made.scatter, group.work_items, group.rows, group.lengths, group.length)
    for index in range(4):
        array = group.array(index)
        if array is None:
            results.omit(index)
            continue
        copied: Array = np.empty(array.shape, array.dtype)
        group.copy(index, copied)
        assert (copied == array).all()
        if direct:
            results.place(index, array.shape)[...] = array
        else:
            results.put(index, array.copy())
    return {work.request: row for work, row in zip(group.work_items, results.rows(), strict=True)}


@given(
    batch=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 40), st.booleans()), min_size=1, max_size=6),
    multiple=st.sampled_from([1, 8]),
    strings=st.booleans(),
    direct=st.booleans(),
)
def test_each_request_is_padded_and_gets_outputs_of_its_own_length(
    batch: list[tuple[int, int, bool]], multiple: int, strings: bool, direct: bool
) -> None:
    with Parts(model(padding_multiple=str(multiple))) as made:
        requests = [arrays_of(number, rows, length) for number, (rows, length, _) in enumerate(batch)]
        work_items = []
        for number, (arrays, (_, length, shared)) in enumerate(zip(requests, batch, strict=True)):
            if not strings:
                del arrays["s"]
            work_items.append(work_of(made, number, arrays, [0] if shared and length else []))
        ((group,), failures) = made.gather.groups(work_items)
        assert not failures
        longest = -(-max(length for _, length, _ in batch) // multiple) * multiple
        assert group.length == longest
        padded = [
            np.pad(each["a"], ((0, 0), (0, longest - each["a"].shape[1])), constant_values=-1.5) for each in requests
        ]
        assert np.array_equal(group.array(0), np.concatenate(padded))  # type: ignore[arg-type]
        if strings:
            found: Any = group.array(2)
            assert found.shape == (group.rows, longest)
            assert set(found[0, requests[0]["s"].shape[1] :].tolist()) <= {b"none"}
        rows = run(made, group, direct)
        for number, arrays in enumerate(requests):
            row = rows[number]
            assert row.error is None
            assert [output.name for output in row.outputs] == [name for name in "amsb" if name in arrays]
            for output in row.outputs:
                right = arrays[output.name]
                assert output.shape == right.shape
                assert made.read(output).tolist() == right.tolist()


def test_inputs_of_a_request_must_have_one_length() -> None:
    with Parts(model()) as made:
        good, bad = arrays_of(1, 1, 4), arrays_of(2, 1, 4)
        bad["a"] = np.zeros((1, 5), np.float32)
        groups, failures = made.gather.groups([work_of(made, 1, good, []), work_of(made, 2, bad, [])])
        assert [group.lengths for group in groups] == [(4,)]
        ((place, error),) = failures
        assert place == 1
        assert isinstance(error, InvalidRequest)
        assert "must have one length" in str(error)


def test_an_inline_batch_of_one_length_is_padded_to_a_multiple() -> None:
    tensors = {"a": ("FP32", (-1,))}
    parameters = {"padding": "a", "padding_multiple": "4"}
    with Parts(config("identity", tensors, tensors, max_batch=8, parameters=parameters)) as made:
        work_items = [Work(n, 1, (inline("a", np.ones((1, 3), np.float32)),), None, "internal") for n in (1, 2)]
        ((group,), _) = made.gather.groups(work_items)
        copied = np.empty((2, 4), np.float32)
        group.copy(0, copied)
        assert (group.length, copied.tolist()) == (4, [[1, 1, 1, 0]] * 2)


def test_an_output_that_is_not_as_long_as_the_batch_fails() -> None:
    """Even if nothing would be cut, so that the error does not first appear with different lengths."""
    with Parts(model()) as made:
        for lengths in ((4, 6), (6, 6)):
            work_items = [work_of(made, n, arrays_of(n, 1, length), []) for n, length in enumerate(lengths)]
            ((group,), _) = made.gather.groups(work_items)
            results = PaddedResults(made.scatter, group.work_items, group.rows, group.lengths, group.length)
            with pytest.raises(ModelFailed, match=r"cannot be cut back from length 6 along axis 1.*padding_outputs"):
                results.put(0, np.zeros((2, 5), np.float32))
            results.abandon()


def test_a_single_request_is_not_copied_for_padding() -> None:
    with Parts(model()) as made:
        ((group,), _) = made.gather.groups([work_of(made, 1, arrays_of(1, 2, 5), [0])])
        pieces: Any = group.pieces(0)
        assert not pieces[0].flags.owndata
        assert group.array(0) is pieces[0]


def test_an_output_is_cut_into_the_memory_of_its_client() -> None:
    with Parts(model()) as made:
        place = made.client.allocate(16)
        wanted = (Wanted("a", Handle(place.segment, place.offset, 16)),)
        requests = [arrays_of(1, 1, 4), arrays_of(2, 1, 9)]
        work_items = [work_of(made, 1, requests[0], [], wanted), work_of(made, 2, requests[1], [])]
        ((group,), _) = made.gather.groups(work_items)
        rows = run(made, group, False)
        (output,) = rows[1].outputs
        assert output.data == (wanted[0].place,)
        assert np.array_equal(place.array(np.dtype(np.float32), (1, 4)), requests[0]["a"])


@pytest.mark.parametrize(("length", "shape"), [(0, (1, 3)), (3, (1, 3)), (8, (1, 8))])
def test_single_requests_are_padded_to_the_given_length(length: int, shape: tuple[int, ...]) -> None:
    with Parts(model()) as made:
        arrays = arrays_of(1, 1, 3)
        found: Any = made.gather.read(work_of(made, 1, arrays, [0]), length)[0]
        assert found.shape == shape
        assert np.array_equal(found[:, :3], arrays["a"])
        assert set(found[:, 3:].ravel().tolist()) <= {-1.5}
