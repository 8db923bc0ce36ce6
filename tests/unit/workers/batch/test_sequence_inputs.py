"""Controls, states and slots of sequences, without a process. Expected values come from a dict of sums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shmserve.errors import InvalidRequest
from shmserve.protocol.messages import Tensor
from shmserve.protocol.worker_messages import Row, Work
from shmserve.repo.config.schema import (
    ModelConfig,
    ModelInput,
    ModelOutput,
    ModelSequenceBatching,
    ModelSequenceBatchingControlInput,
    ModelSequenceBatchingInitialState,
    ModelSequenceBatchingState,
)
from shmserve.workers.backends.base import BackendModel, SeparateModel, StackedModel
from shmserve.workers.batch import sequence_inputs
from shmserve.workers.batch.results import Results
from shmserve.workers.hidden_tensors import hidden_tensors_of
from shmserve.workers.model_calls.answer import Request, Response
from shmserve.workers.runner import Runner
from tests.support.cases import cases
from tests.support.workers.batch_parts import Array, Parts
from tests.support.workers.sequence_parts import control
from tests.support.workers.sequence_parts import step as step_of
from tests.support.workers.worker_harness import assert_failed, work

Key = int | str


CONTROLS = (
    control("start", "START", int32_false_true=(0, 7)),
    control("end", "END", fp32_false_true=(-1.0, 1.0)),
    control("ready", "READY", bool_false_true=(False, True)),
    control("id", "CORRID", data_type="TYPE_UINT64"),
)
TOTAL = ModelSequenceBatchingState(input_name="s", output_name="t", data_type="TYPE_INT64", dims=(2,))


def config_of(
    max_batch: int = 8,
    controls: Sequence[ModelSequenceBatchingControlInput] = CONTROLS,
    state: Sequence[ModelSequenceBatchingState] = (TOTAL,),
    **more: Any,
) -> ModelConfig:
    return ModelConfig(
        name="m",
        max_batch_size=max_batch,
        input=(ModelInput(name="x", data_type="TYPE_INT64", dims=(-1,)),),
        output=(ModelOutput(name="y", data_type="TYPE_INT64", dims=(-1,)),),
        sequence_batching=ModelSequenceBatching(control_input=tuple(controls), state=tuple(state), **more),
    )


class Stacked(StackedModel):
    """y = x + the first number of its state; the state grows by (sum of x, 1). Records its inputs."""

    def __init__(self) -> None:
        self.seen: list[list[Array]] = []
        self.target: Array | None = None

    def execute(self, inputs: Any, outputs: Results) -> None:
        arrays = [inputs.array(index) for index in range(6)]
        assert [inputs.shape(index) for index in range(6)] == [a.shape for a in arrays]
        self.seen.append([a.copy() for a in arrays])
        inputs.computing()
        x, *_, state = arrays
        if (x < 0).any():
            raise ValueError("below zero")
        assert outputs.needed(1)
        assert not outputs.direct(1, state.shape)
        assert outputs.near(1, state.shape) is None
        if outputs.needed(0):
            outputs.put(0, x + state[..., :1])
        target = self.target = outputs.place(1, state.shape)
        target[...] = state
        target[..., 0] += x.sum(axis=-1)
        target[..., 1] += 1


@contextmanager
def runner_for(config: ModelConfig, backend: BackendModel, folder: Path = Path()) -> Iterator[Runner[Any]]:
    with Parts(config, text=backend.text) as parts:
        yield parts.runner(backend, folder)
        assert parts.arenas.used == 0


def step(request: int, key: Key, x: Sequence[int], *, rows: int = 1, **how: Any) -> Work:
    shape = (1, len(x)) if rows else (len(x),)
    return step_of(request, key, Tensor("x", "INT64", shape, np.array(x, np.int64).tobytes()), rows=rows, **how)


def values(row: Row) -> list[int]:
    assert row.error is None, row.error
    assert len(row.outputs) == 1
    data = row.outputs[0].data
    assert isinstance(data, bytes)
    found: list[int] = np.frombuffer(data, np.int64).tolist()
    return found


def test_controls_and_unused_slots() -> None:
    """Slots 1 and 3 of a batch: rows 0 and 2 are padding, and only the model sees them."""
    backend = Stacked()
    with runner_for(config_of(), backend) as runner:
        rows, times, again = runner.run(
            [step(4, 40, [1, 2], start=True, slot=3), step(2, 2**63, [5, 6], start=True, end=True, slot=1)]
        )
    assert again == ()
    assert list(times) == sorted(times)
    assert [row.request for row in rows] == [4, 2]
    assert [values(row) for row in rows] == [[1, 2], [5, 6]]
    x, start, end, ready, key, state = backend.seen[0]
    assert x.tolist() == [[0, 0], [5, 6], [0, 0], [1, 2]]
    assert start.dtype == np.int32
    assert start.tolist() == [[0], [7], [0], [7]]
    assert end.dtype == np.float32
    assert end.tolist() == [[-1], [1], [-1], [-1]]
    assert ready.dtype == np.bool_
    assert ready.tolist() == [[False], [True], [False], [True]]
    assert key.dtype == np.uint64
    assert key.tolist() == [[0], [2**63], [0], [40]]
    assert state.tolist() == [[0, 0]] * 4


def test_groups_of_one_shape_keep_their_slots() -> None:
    backend = Stacked()
    with runner_for(config_of(), backend) as runner:
        work_items = [step(1, 1, [1], start=True, slot=0), step(2, 2, [2, 2], start=True, slot=1)]
        work_items.append(step(3, 3, [3], start=True, slot=2))
        bad = replace(step(4, 4, [4], start=True, slot=3), inputs=())
        rows, _, _ = runner.run([*work_items, bad])
    assert [values(row) for row in rows[:3]] == [[1], [2, 2], [3]]
    assert_failed(rows[3], "INVALID_ARG")
    assert [seen[0].tolist() for seen in backend.seen] == [[[1], [0], [3]], [[0, 0], [2, 2]]]
    assert [seen[4].ravel().tolist() for seen in backend.seen] == [[1, 0, 3], [0, 2]]


def test_without_a_batch_dimension() -> None:
    backend = Stacked()
    with runner_for(config_of(0), backend) as runner:
        for number, (key, start) in enumerate([(1, True), (2, True), (1, False), (2, False), (2, False)]):
            rows, _, _ = runner.run([step(number, key, [number], start=start, slot=0, rows=0)])
            assert values(rows[0]) == [[0], [1], [0 + 2], [1 + 3], [1 + 3 + 4]][number]
    assert [a.shape for a in backend.seen[0]] == [(1,), (1,), (1,), (1,), (1,), (2,)]


def test_steps_of_one_sequence_in_a_batch_run_in_order() -> None:
    backend = Stacked()
    with runner_for(config_of(), backend) as runner:
        work_items = [step(1, 9, [1], start=True, slot=0), step(2, 9, [10], end=True, slot=0)]
        work_items += [step(3, 8, [100], start=True, slot=0), step(4, 7, [5], start=True, slot=1)]
        rows, _, _ = runner.run(work_items)
    assert [values(row) for row in rows] == [[1], [11], [100], [5]]
    assert [seen[4].ravel().tolist() for seen in backend.seen] == [[9, 7], [9], [8]]


@cases(
    (work(1, rows=1), "must specify a non-zero or non-empty correlation ID"),
    (step(1, "", [1]), "must specify a non-zero or non-empty correlation ID"),
    (step(1, "a", [1]), "control input 'id' has type UINT64: it must be an integer"),
    (replace(step(1, 3, [1]), rows=2), "must specify batch-size 1"),
)
def test_a_request_without_a_valid_sequence_fails_alone(bad: Work, text: str) -> None:
    with runner_for(config_of(), Stacked()) as runner:
        failed, good = runner.run([bad, step(7, 3, [1], start=True)])[0]
        assert_failed(failed, "INVALID_ARG", text)
        assert values(good) == [1]


@pytest.mark.parametrize(("dtype", "key", "good"), [("INT32", 2**31, False), ("INT32", 2**31 - 1, True)])
def test_an_id_must_fit_the_type_of_the_control(dtype: str, key: int, good: bool) -> None:
    controls = (*CONTROLS[:3], control("id", "CORRID", data_type=f"TYPE_{dtype}"))
    with runner_for(config_of(controls=controls), Stacked()) as runner:
        rows, _, _ = runner.run([step(1, key, [1], start=True)])
        assert (rows[0].error is None) == good


@pytest.mark.parametrize(("text", "wanted"), [(True, "abc"), (False, b"abc")])
def test_string_ids(text: bool, wanted: Any) -> None:
    controls = (*CONTROLS[:3], control("id", "CORRID", data_type="TYPE_STRING"))
    backend = Stacked()
    backend.text = text
    with runner_for(config_of(controls=controls), backend) as runner:
        rows, _, _ = runner.run([step(1, "abc", [1], start=True, slot=1), step(2, 5, [1], start=True)])
        assert values(rows[0]) == [1]
        assert rows[1].error is not None
    assert backend.seen[0][4].tolist() == [[wanted[:0]], [wanted]]


class Step(NamedTuple):
    key: int
    x: int  # below 0: the batch fails
    start: bool
    end: bool
    width: int


random_steps = st.builds(
    Step, st.integers(1, 5), st.sampled_from([-1, *range(1, 12)]), st.booleans(), st.booleans(), st.integers(1, 2)
)
batches = st.lists(st.tuples(st.lists(random_steps, min_size=1, max_size=5), st.integers(0, 5)), min_size=1, max_size=8)


@given(batches=batches, slotted=st.booleans(), whole=st.sampled_from([0, 1 << 20]))
def test_random_sequences(batches: list[tuple[list[Step], int]], slotted: bool, whole: int) -> None:
    """`whole`: whether the states of a batch stay one array or are split. A batch has each sequence once; requests of
    one width run together and fail together."""
    backend = Stacked()
    totals: dict[int, int] = {}
    number = 0
    before, sequence_inputs.WHOLE_BYTES = sequence_inputs.WHOLE_BYTES, whole
    try:
        with runner_for(config_of(), backend) as runner:
            for requests, over in batches:
                once = {request.key: request for request in requests}
                work_items = []
                for request in once.values():
                    number += 1
                    slot = request.key - 1 if slotted else -1
                    x = [request.x] * request.width
                    work_items.append(step(number, request.key, x, start=request.start, end=request.end, slot=slot))
                rows, _, _ = runner.run(work_items)
                failing = {request.width for request in once.values() if request.x < 0}
                for row, request in zip(rows, once.values(), strict=True):
                    if request.width in failing:
                        assert_failed(row, "MODEL_FAILED", "below zero")
                        totals.pop(request.key, None)
                        continue
                    total = 0 if request.start else totals.get(request.key, 0)
                    assert values(row) == [request.x + total] * request.width
                    totals[request.key] = total + request.x * request.width
                    if request.end:
                        del totals[request.key]
                runner.forget([over])
                totals.pop(over, None)
    finally:
        sequence_inputs.WHOLE_BYTES = before


def test_initial_states_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "two.bin").write_bytes(np.array([30, 4], np.int64).tobytes())
    first = ModelSequenceBatchingInitialState(name="f", data_type="TYPE_INT64", dims=(2,), data_file="two.bin")
    backend = Stacked()
    with runner_for(config_of(state=[replace(TOTAL, initial_state=(first,))]), backend, tmp_path) as runner:
        assert values(runner.run([step(1, 1, [1], start=True)])[0][0]) == [31]
        assert values(runner.run([step(2, 1, [1])])[0][0]) == [32]
        assert values(runner.run([step(3, 1, [1], start=True)])[0][0]) == [31]
    assert [seen[5].tolist() for seen in backend.seen] == [[[30, 4]], [[31, 5]], [[30, 4]]]


@cases(
    ({"data_file": "gone.bin"}, "no such file"),
    ({"data_file": "short.bin"}, "must have 16 bytes for INT64 \\[1, 2\\]; it has 8"),
    ({"data_file": "/short.bin"}, "initial_state directory"),
    ({"data_file": "../initial_state/short.bin"}, "without .."),
    ({"dims": (3,)}, "has dims \\[3\\]; the state's are \\[2\\]"),
    ({"data_type": "TYPE_FP32"}, "has data_type TYPE_FP32; the state's is TYPE_INT64"),
)
def test_wrong_initial_states_are_refused(change: dict[str, Any], text: str, tmp_path: Path) -> None:
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "short.bin").write_bytes(bytes(8))
    first = ModelSequenceBatchingInitialState(name="f", data_type="TYPE_INT64", dims=(2,), zero_data=True)
    config = config_of(state=[replace(TOTAL, initial_state=(replace(first, **change),))])
    with pytest.raises(InvalidRequest, match=text):
        hidden_tensors_of(config, tmp_path, Stacked())


class Growing(StackedModel):
    """Each state has the inputs so far, as strings, one more with each step."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, ...]] = []

    def execute(self, inputs: Any, outputs: Results) -> None:
        x, state = inputs.array(0), inputs.array(1)
        self.sizes.append(state.shape)
        now = x[:, :1].astype(str).astype(object)
        outputs.put(0, x + state.shape[1])
        outputs.put(1, np.concatenate([state, now], axis=1))


def test_sequences_with_states_of_different_shapes_run_apart() -> None:
    history = ModelSequenceBatchingState(input_name="s", output_name="t", data_type="TYPE_STRING", dims=(-1,))
    backend = Growing()
    with runner_for(config_of(controls=(), state=[history]), backend) as runner:
        runner.run([step(1, 1, [5], start=True, slot=0)])
        rows, _, _ = runner.run([step(2, 1, [6], slot=0), step(3, 2, [7], start=True, slot=1)])
        assert [values(row) for row in rows] == [[6 + 2], [7 + 1]]
        rows, _, _ = runner.run([step(4, 1, [6], slot=0), step(5, 2, [7], slot=1)])
        assert [values(row) for row in rows] == [[6 + 3], [7 + 2]]
    # Without initial_state a dim of any size is 1; slot 0 is empty where only slot 1 runs.
    assert backend.sizes == [(1, 1), (1, 2), (2, 1), (1, 3), (2, 2)]


class Separate(SeparateModel):
    """The same model; an input of 99 runs again until it has run three times."""

    def __init__(self) -> None:
        self.seen: list[list[Any]] = []

    def execute(self, requests: list[Request]) -> list[Response | None]:
        return [self._one(request) for request in requests]

    def _one(self, request: Any) -> Response | None:
        x, start, end, ready, key, state = request.arrays
        assert not state.flags.writeable
        self.seen.append([a.ravel().tolist() for a in (start, end, ready, key, state)])
        new = state + np.array([x.sum(), 1])
        states = ("t", new)
        first = int(x.ravel()[0])
        if first == -1:
            return Response([states, ("t", new[:, :1])])
        if first == -2:
            return Response([states, ("unknown", x)])
        if first == -3:
            return None
        if first == 99 and state.ravel()[1] < 2:
            return Response([states], again=True)
        if first == 5:
            return Response([("y", x + state[..., :1])])
        return Response([("y", x + state[..., :1]), states])


def test_invalid_requests_do_not_move_others_to_other_slots() -> None:
    backend = Separate()
    backend.takes_slots = True
    with runner_for(config_of(), backend) as runner:
        invalid = replace(step(1, 1, [1], start=True, slot=0), inputs=())
        (refused, row), _, _ = runner.run([invalid, step(2, 2, [2], start=True, slot=1)])
        assert_failed(refused, "INVALID_ARG")
        assert values(row) == [2]
        assert [seen[2] for seen in backend.seen] == [[False], [True]]


def test_a_model_that_handles_requests_one_by_one() -> None:
    backend = Separate()
    with runner_for(config_of(), backend) as runner:
        rows, _, _ = runner.run([step(1, 1, [1], start=True, slot=2), step(2, 2, [2], start=True, end=True, slot=0)])
        assert [values(row) for row in rows] == [[1], [2]]
        assert backend.seen[0] == [[7], [-1], [True], [1], [0, 0]]
        rows, _, _ = runner.run([step(3, 1, [3], slot=2), step(4, 1, [4], slot=2)])
        assert [values(row) for row in rows] == [[4], [8]]
        assert values(runner.run([step(5, 1, [5])])[0][0]) == [13]  # returns no state, so the old one stays
        assert values(runner.run([step(6, 1, [6], end=True)])[0][0]) == [14]
        assert values(runner.run([step(7, 1, [7])])[0][0]) == [7]
        for wrong, text in ((-1, "state output 't'"), (-2, "unexpected output 'unknown'")):
            rows, _, _ = runner.run([step(8, 1, [wrong]), step(9, 2, [1], start=True)])
            assert_failed(rows[0], "MODEL_FAILED", text)
            assert values(rows[1]) == [1]
        assert runner.run([step(10, 1, [-3])])[0] == []


def test_iterative_requests_are_run_again() -> None:
    backend = Separate()
    with runner_for(config_of(iterative_sequence=True), backend) as runner:
        for start in (True, False):
            rows, _, again = runner.run([step(1, 6, [99], start=start, end=True), step(2, 7, [1], start=True)])
            assert again == (1,)
            assert [row.request for row in rows] == [2]
        rows, _, again = runner.run([step(1, 6, [99], end=True)])
        assert again == ()
        assert values(rows[0]) == [99 + 2 * 99]
        assert values(runner.run([step(4, 6, [1])])[0][0]) == [1]
