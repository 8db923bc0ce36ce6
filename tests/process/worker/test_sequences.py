"""Controls, states and batch inputs of ONNX models. The tests of pipelines run whole sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.protocol.messages import Tensor
from shmserve.protocol.worker_messages import Work
from shmserve.repo.config.schema import (
    BatchInput,
    ModelConfig,
    ModelSequenceBatching,
    ModelSequenceBatchingControlInput,
    ModelSequenceBatchingInitialState,
    ModelSequenceBatchingState,
    ModelWarmup,
    ModelWarmupInput,
)
from tests.support.workers.in_process import inline, load_failure, loaded, run, value
from tests.support.workers.models.worker_models import Graph
from tests.support.workers.sequence_parts import control, step
from tests.support.workers.worker_harness import config, work

START = control("START", "START", fp32_false_true=(0.0, 1.0))
END = control("END", "END", int32_false_true=(0, 1))
READY = control("READY", "READY", bool_false_true=(False, True))
ID = control("ID", "CORRID", data_type="TYPE_INT64")
NAME = control("ID", "CORRID", data_type="TYPE_STRING")


def sequence(given: ModelConfig, *controls: ModelSequenceBatchingControlInput, **more: Any) -> ModelConfig:
    return replace(given, sequence_batching=ModelSequenceBatching(control_input=controls, **more))


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


def number(x: float) -> Tensor:
    return inline("x", np.array([[x]], np.float32))


def test_control_inputs_and_states_across_sequences(tmp_path: Path) -> None:
    with loaded(counting(tmp_path), tmp_path) as model:
        assert [entry.name for entry in model.config.input] == ["x"]
        assert [entry.name for entry in model.config.output] == ["y"]

        def run_all(*work_items: Work) -> list[Any]:
            return [row.error or value(row).tolist()[0] for row in run(model, *work_items)]

        first = run_all(step(1, 50, number(1), start=True, slot=2), step(2, 60, number(2), start=True, slot=0))
        assert first == [[1, 0, 1, 50, 2, 1], [1, 0, 1, 60, 2, 2]]
        assert run_all(step(3, 50, number(10), slot=2)) == [[0, 0, 1, 50, 1, 11]]
        assert run_all(step(4, 50, number(10), end=True, slot=2)) == [[0, 1, 1, 50, 1, 21]]
        assert run_all(step(5, 50, number(3), slot=2)) == [[0, 0, 1, 50, 1, 3]]
        assert run_all(step(6, 60, number(3), start=True, slot=0)) == [[1, 0, 1, 60, 1, 3]]
        model.runner.forget([60])
        both = run_all(step(7, 60, number(4), slot=0), step(8, 50, number(4), slot=2))
        assert both == [[0, 0, 1, 60, 2, 4], [0, 0, 1, 50, 2, 7]]
        (refused,) = run_all(step(9, "name", number(4)))
        assert refused.code == "INVALID_ARG"
        assert "it must be an integer" in refused.text


def test_a_state_may_also_be_an_output(tmp_path: Path) -> None:
    shown = config("onnxruntime", {"x": ("FP32", (1,))}, {"y": ("FP32", (6,)), "t": ("FP32", (1,))})
    with loaded(replace(counting(tmp_path), input=shown.input, output=shown.output), tmp_path) as model:
        for request, total in ((1, 5), (2, 10)):
            (row,) = run(model, step(request, 1, number(5), start=request == 1))
            assert (row.outputs[1].name, value(row, 1).tolist()) == ("t", [[total]])


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
        (row,) = run(model, step(1, 1, number(1), slot=0))
        assert value(row).tolist() == [[0, 0, 1, 1, 1, 1001]]


def batch_input(kind: str, name: str, dtype: str) -> BatchInput:
    return BatchInput(kind=f"BATCH_{kind}", target_name=(name,), data_type=f"TYPE_{dtype}", source_input=("x",))  # type: ignore[arg-type]


def test_batch_inputs_are_not_added_to_a_completed_configuration(tmp_path: Path) -> None:
    graph = Graph().input("x", "FP32", [-1, 2]).input("count", "INT32", [-1]).output("y", "FP32", [-1, 2])
    graph.weight("column", np.array([-1, 1])).node("Reshape", ["count", "column"], ["table"])
    graph.node("Cast", ["table"], ["counts"], to=1).node("Mul", ["x", "counts"], ["y"]).save(tmp_path)
    count = batch_input("ELEMENT_COUNT", "count", "INT32")
    with loaded(replace(config("onnxruntime", {}, {}, max_batch=4), batch_input=(count,)), tmp_path) as model:
        assert [(entry.name, entry.dims) for entry in model.config.input] == [("x", (2,))]
        x = inline("x", np.array([[1, 5]], np.float32))
        for row in run(model, work(1, x), work(2, x)):
            assert value(row).tolist() == [[2, 10]]
