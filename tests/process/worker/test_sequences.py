"""Sequences and ragged batches of ONNX and Python models, against bare ONNX Runtime and numpy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from msgspec.structs import replace

from shmserve.protocol.messages import Options, Tensor
from shmserve.protocol.worker_messages import EndSequences, Work
from shmserve.repo.config.schema import (
    BatchInput,
    BatchOutput,
    ModelConfig,
    ModelSequenceBatching,
    ModelSequenceBatchingControl,
    ModelSequenceBatchingControlInput,
    ModelSequenceBatchingInitialState,
    ModelSequenceBatchingState,
    ModelWarmup,
    ModelWarmupInput,
)
from tests.support.workers.in_process import load_failure, loaded
from tests.support.workers.models.worker_models import Graph, python_model
from tests.support.workers.worker_harness import WorkerProcess, config, work

pytestmark = pytest.mark.process

Array = np.ndarray[Any, np.dtype[Any]]


def control(name: str, kind: str, **pair: Any) -> ModelSequenceBatchingControlInput:
    made = ModelSequenceBatchingControl(kind=f"CONTROL_SEQUENCE_{kind}", **pair)  # type: ignore[arg-type]
    return ModelSequenceBatchingControlInput(name=name, control=(made,))


START = control("START", "START", fp32_false_true=(0.0, 1.0))
END = control("END", "END", int32_false_true=(0, 1))
READY = control("READY", "READY", bool_false_true=(False, True))
ID = control("ID", "CORRID", data_type="TYPE_INT64")
NAME = control("ID", "CORRID", data_type="TYPE_STRING")


def sequence(given: ModelConfig, *controls: ModelSequenceBatchingControlInput, **more: Any) -> ModelConfig:
    return replace(given, sequence_batching=ModelSequenceBatching(control_input=controls, **more))


def step(request: int, key: int | str, *inputs: Tensor, start: bool = False, end: bool = False, slot: int = -1) -> Work:
    options = Options(sequence=key, sequence_start=start, sequence_end=end)
    return replace(work(request, *inputs, options=options), slot=slot)


# ---------------------------------------------------------------------------------------------- states


def recurrent(folder: Path, width: int, states: int) -> Path:
    """h' = tanh(x W + h U), of `states` numbers; y = h' V, of `width`."""
    random = np.random.default_rng(5)
    graph = Graph().input("x", "FP32", [-1, 3]).input("h", "FP32", [-1, states])
    graph.output("y", "FP32", [-1, width]).output("h2", "FP32", [-1, states])
    graph.weight("w", random.standard_normal((3, states)).astype(np.float32))
    graph.weight("u", (random.standard_normal((states, states)) / states).astype(np.float32))
    graph.weight("v", random.standard_normal((states, width)).astype(np.float32))
    graph.node("MatMul", ["x", "w"], ["xw"]).node("MatMul", ["h", "u"], ["hu"]).node("Add", ["xw", "hu"], ["sum"])
    return graph.node("Tanh", ["sum"], ["h2"]).node("MatMul", ["h2", "v"], ["y"]).save(folder)


@pytest.mark.parametrize(("width", "states", "shown"), [(4, 8, False), (3000, 1500, True)])
def test_interleaved_sequences_are_independent(tmp_path: Path, width: int, states: int, shown: bool) -> None:
    """Small outputs with a hidden state, and large outputs in shared memory with a state that is also an output."""
    path = recurrent(tmp_path, width, states)
    outputs: dict[str, tuple[str, Sequence[int]]] = {"y": ("FP32", (width,))}
    if shown:
        outputs["h2"] = ("FP32", (states,))
    state = ModelSequenceBatchingState(input_name="h", output_name="h2", data_type="TYPE_FP32", dims=(states,))
    given = sequence(config("onnxruntime", {"x": ("FP32", (3,))}, outputs, max_batch=4), state=(state,))
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    random = np.random.default_rng(6)
    alone: dict[int, Array] = {}
    number = 0
    with WorkerProcess(given, tmp_path) as worker:
        worker.loaded()
        for turn in range(8):
            keys = [key for key in range(1, 5) if random.random() < 0.7] or [1]
            works, expected = [], []
            for key in keys:
                number += 1
                x = random.standard_normal((1, 3)).astype(np.float32)
                start = key not in alone
                h = alone.get(key, np.zeros((1, states), np.float32))
                y, h2 = session.run(["y", "h2"], {"x": x, "h": h})
                expected.append((y, h2))
                alone[key] = h2
                end = turn % 4 == 3 and key == keys[0]
                if end:
                    del alone[key]
                works.append(step(number, key, worker.tensor("x", x), start=start, end=end, slot=key - 1))
            for row, (y, h2) in zip(worker.run(*works), expected, strict=True):
                assert row.error is None, row.error
                assert [out.name for out in row.outputs] == list(outputs)
                np.testing.assert_allclose(worker.array(row.outputs[0], np.float32), y, rtol=1e-4, atol=1e-4)
                if shown:
                    np.testing.assert_allclose(worker.array(row.outputs[1], np.float32), h2, rtol=1e-4, atol=1e-4)
        worker.mapped.close()


def counting(folder: Path) -> ModelConfig:
    """y = START, END, READY, ID as numbers, the sum of READY, and the sum of x so far."""
    graph = Graph().input("x", "FP32", [-1, 1]).input("START", "FP32", [-1, 1]).input("END", "INT32", [-1, 1])
    graph.input("READY", "BOOL", [-1, 1]).input("ID", "INT64", [-1, 1]).input("s", "FP32", [-1, 1])
    graph.output("y", "FP32", [-1, 6]).output("t", "FP32", [-1, 1]).weight("axes", np.array([0]))
    for name in ("END", "READY", "ID"):
        graph.node("Cast", [name], [f"{name}f"], to=1)
    graph.node("ReduceSum", ["READYf", "axes"], ["ready"], keepdims=1).node("Sub", ["x", "x"], ["zero"])
    graph.node("Add", ["zero", "ready"], ["all"]).node("Add", ["s", "x"], ["t"])
    graph.node("Concat", ["START", "ENDf", "READYf", "IDf", "all", "t"], ["y"], axis=1).save(folder)
    state = ModelSequenceBatchingState(input_name="s", output_name="t", data_type="TYPE_FP32", dims=(1,))
    empty = config("onnxruntime", {}, {}, max_batch=8)
    return sequence(empty, START, END, READY, ID, state=(state,))


def number(value: float) -> Tensor:
    return Tensor("x", "FP32", (1, 1), np.array([[value]], np.float32).tobytes())


def test_control_inputs_and_states_across_sequences(tmp_path: Path) -> None:
    with WorkerProcess(counting(tmp_path), tmp_path) as worker:
        found = worker.loaded()
        assert [entry.name for entry in found.input] == ["x"]
        assert [entry.name for entry in found.output] == ["y"]

        def run(*works: Work) -> list[Any]:
            return [row.error or worker.array(row.outputs[0], np.float32).tolist()[0] for row in worker.run(*works)]

        first = run(step(1, 50, number(1), start=True, slot=2), step(2, 60, number(2), start=True, slot=0))
        assert first == [[1, 0, 1, 50, 2, 1], [1, 0, 1, 60, 2, 2]]
        assert run(step(3, 50, number(10), slot=2)) == [[0, 0, 1, 50, 1, 11]]
        assert run(step(4, 50, number(10), end=True, slot=2)) == [[0, 1, 1, 50, 1, 21]]
        assert run(step(5, 50, number(3), slot=2)) == [[0, 0, 1, 50, 1, 3]]
        assert run(step(6, 60, number(3), start=True, slot=0)) == [[1, 0, 1, 60, 1, 3]]
        worker.send(EndSequences((60,)))
        both = run(step(7, 60, number(4), slot=0), step(8, 50, number(4), slot=2))
        assert both == [[0, 0, 1, 60, 2, 4], [0, 0, 1, 50, 2, 7]]
        (refused,) = run(step(9, "name", number(4)))
        assert refused.code == "INVALID_ARG"
        assert "it must be an integer" in refused.text


@pytest.mark.parametrize("case", ["one too many", "one too few", "other data type"])
def test_mismatched_control_inputs_are_refused(tmp_path: Path, case: str) -> None:
    given = counting(tmp_path)
    known = config("onnxruntime", {"x": ("FP32", (1,))}, {"y": ("FP32", (6,))})
    assert given.sequence_batching is not None
    *controls, _ = given.sequence_batching.control_input
    wrong = {
        "one too many": (*controls, ID, control("more", "START", int32_false_true=(0, 1))),
        "one too few": controls,
        "other data type": (*controls, NAME),
    }[case]
    batching = replace(given.sequence_batching, control_input=tuple(wrong))
    given = replace(given, input=known.input, output=known.output, sequence_batching=batching)
    assert "unable to load model" in load_failure(given, tmp_path).text


def test_warm_up_leaves_the_initial_states(tmp_path: Path) -> None:
    """Samples contain the controls, and the states after them are dropped."""
    given = counting(tmp_path)
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "s.bin").write_bytes(np.array([1000], np.float32).tobytes())
    initial = ModelSequenceBatchingInitialState(name="i", data_type="TYPE_FP32", dims=(1,), data_file="s.bin")
    assert given.sequence_batching is not None
    state = replace(given.sequence_batching.state[0], initial_state=(initial,))
    dtypes = {"x": "FP32", "START": "FP32", "END": "INT32", "READY": "BOOL", "ID": "INT64"}
    inputs = {
        name: ModelWarmupInput(data_type=f"TYPE_{dtype}", dims=(1,), random_data=True)  # type: ignore[arg-type]
        for name, dtype in dtypes.items()
    }
    warm = ModelWarmup(name="w", batch_size=3, count=2, inputs=inputs)
    given = replace(given, sequence_batching=replace(given.sequence_batching, state=(state,)), model_warmup=(warm,))
    with loaded(given, tmp_path) as model:
        ((row,), *_) = model.runner.run([step(1, 1, number(1), slot=0)])
        assert row.outputs[0].data == np.array([0, 0, 1, 1, 1, 1001], np.float32).tobytes()


# ---------------------------------------------------------------------------------------------- python

REMEMBER = """\
import numpy as np
import triton_python_backend_utils as pb_utils


def get(request, name):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()


class TritonPythonModel:
    def execute(self, requests):
        return [self.one(request, len(requests)) for request in requests]

    def one(self, request, count):
        x, state = get(request, "x"), get(request, "s")
        if x[0, 0] < 0 and state[0, 0] < 2:
            # The third run gives the response.
            self.runs = getattr(self, "runs", 0) + 1
            if self.runs < 3:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                return None
        seen = [get(request, "START"), get(request, "END"), get(request, "READY"), [[count]], state + x]
        name = np.array([[get(request, "ID")[0, 0]]], object)
        y = pb_utils.Tensor("y", np.concatenate(seen, axis=1).astype(np.float32))
        return pb_utils.InferenceResponse(
            [y, pb_utils.Tensor("name", name), pb_utils.Tensor("t", (state + x).astype(np.float32))]
        )
"""


def test_a_python_model_with_controls_states_and_rescheduling(tmp_path: Path) -> None:
    python_model(tmp_path, REMEMBER)
    outputs = {"y": ("FP32", (5,)), "name": ("STRING", (1,))}
    state = ModelSequenceBatchingState(input_name="s", output_name="t", data_type="TYPE_FP32", dims=(1,))
    given = config("python", {"x": ("FP32", (1,))}, outputs, max_batch=8)
    given = sequence(given, START, END, READY, NAME, state=(state,), iterative_sequence=True)
    with WorkerProcess(given, tmp_path) as worker:
        worker.loaded()

        def read(rows: list[Any]) -> list[Any]:
            return [
                row.error
                or (worker.array(row.outputs[0], np.float32).tolist()[0], worker.array(row.outputs[1], object)[0, 0])
                for row in rows
            ]

        rows = worker.run(step(1, "a", number(1), start=True, slot=2), step(2, "b", number(2), start=True, slot=0))
        assert read(rows) == [([1, 0, 1, 2, 1], b"a"), ([1, 0, 1, 2, 2], b"b")]
        assert read(worker.run(step(3, "a", number(5), end=True, slot=2))) == [([0, 1, 1, 1, 6], b"a")]
        for _ in range(2):
            worker.execute(step(4, "c", number(-1), start=True))
            rows, done = worker.done()
            assert rows == []
            assert done.again == (4,)
        assert read(worker.run(step(4, "c", number(-1), start=True))) == [([0, 0, 1, 1, -1], b"c")]


# ---------------------------------------------------------------------------------------------- ragged batches


def batch_input(kind: str, name: str, dtype: str) -> BatchInput:
    return BatchInput(kind=f"BATCH_{kind}", target_name=(name,), data_type=f"TYPE_{dtype}", source_input=("x",))  # type: ignore[arg-type]


def test_ragged_batches(tmp_path: Path) -> None:
    """Doubles x of any length, and returns the batch inputs: a vector, a matrix, and a shape. The unit tests cover all
    kinds of batch inputs."""
    graph = Graph().input("x", "FP32", [-1]).input("starts", "INT32", [-1])
    graph.input("shapes", "INT32", [-1, 2]).input("widest", "FP32", [-1])
    graph.output("y", "FP32", [-1]).output("count", "INT32", [-1, 1]).output("shapes_out", "INT32", [-1, 2])
    graph.output("max", "INT64", [-1, 1])
    for name, value in (("one", [1]), ("last", [-1]), ("first", [0]), ("far", [10**6]), ("column", [-1, 1])):
        graph.weight(name, np.array(value))
    graph.node("Add", ["x", "x"], ["y"]).node("Identity", ["shapes"], ["shapes_out"])
    graph.node("Slice", ["starts", "one", "far"], ["ends"]).node("Slice", ["starts", "first", "last"], ["begins"])
    graph.node("Sub", ["ends", "begins"], ["counts"]).node("Reshape", ["counts", "column"], ["count"])
    graph.node("Cast", ["count"], ["long"], to=7).node("Sub", ["long", "long"], ["zeros"])
    graph.node("Shape", ["widest"], ["most"]).node("Add", ["zeros", "most"], ["max"]).save(tmp_path)
    outputs = {"y": ("FP32", (-1, -1)), "count": ("INT32", (1,)), "shapes_out": ("INT32", (2,)), "max": ("INT64", (1,))}
    given = config("onnxruntime", {"x": ("FP32", (-1, -1))}, outputs, max_batch=8)
    given = replace(
        given,
        input=(replace(given.input[0], allow_ragged_batch=True),),
        batch_input=(
            batch_input("ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", "starts", "INT32"),
            batch_input("ITEM_SHAPE", "shapes", "INT32"),
            batch_input("MAX_ELEMENT_COUNT_AS_SHAPE", "widest", "FP32"),
        ),
        batch_output=(BatchOutput(target_name=("y",), source_input=("x",)),),
    )
    with WorkerProcess(given, tmp_path) as worker:
        worker.loaded()
        for shapes in ([(1, 3, 2), (1, 1, 5), (1, 40, 50)], [(1, 2, 2)], [(1, 0, 3), (1, 1, 1)]):
            xs = [np.random.default_rng(1).random(shape, np.float32) for shape in shapes]
            rows = worker.run(*[work(n, worker.tensor("x", x)) for n, x in enumerate(xs, 1)])
            for row, x in zip(rows, xs, strict=True):
                assert row.error is None, row.error
                y, count, shape, most = row.outputs
                assert y.shape == x.shape
                assert (worker.array(y, np.float32) == 2 * x).all()
                assert worker.array(count, np.int32).tolist() == [[x.size]]
                assert worker.array(shape, np.int32).tolist() == [list(x.shape[1:])]
                assert worker.array(most, np.int64).tolist() == [[max(other.size for other in xs)]]
        worker.mapped.close()


def test_batch_inputs_are_not_added_to_a_completed_configuration(tmp_path: Path) -> None:
    graph = Graph().input("x", "FP32", [-1, 2]).input("count", "INT32", [-1]).output("y", "FP32", [-1, 2])
    graph.weight("column", np.array([-1, 1])).node("Reshape", ["count", "column"], ["table"])
    graph.node("Cast", ["table"], ["counts"], to=1).node("Mul", ["x", "counts"], ["y"]).save(tmp_path)
    count = batch_input("ELEMENT_COUNT", "count", "INT32")
    with loaded(replace(config("onnxruntime", {}, {}, max_batch=4), batch_input=(count,)), tmp_path) as model:
        assert [(entry.name, entry.dims) for entry in model.config.input] == [("x", (2,))]
        x = Tensor("x", "FP32", (1, 2), np.array([1, 5], np.float32).tobytes())
        for row in model.runner.run([work(1, x), work(2, x)])[0]:
            assert row.outputs[0].data == np.array([2, 10], np.float32).tobytes()
