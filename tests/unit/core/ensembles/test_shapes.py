"""Shapes of tensors between the caller, an ensemble and the models of its steps, which may batch or not."""

from __future__ import annotations

from typing import Any

import pytest

from shmserve.core.policy import ModelPolicy, TensorSpec
from shmserve.core.service import graph
from shmserve.protocol.messages import Infer, Tensor, Wanted
from shmserve.protocol.worker_messages import LabelFile, Row, StepOptions, Work
from tests.support.core.policies import step_of
from tests.support.core.world import World

LABELS = ("folder", "labels.txt")
FLAT = TensorSpec("z", "INT8", (4,), reshape=(2, 2), labels=LABELS)
SQUARE = TensorSpec("w", "INT8", (2, 2))
BATCHES = pytest.mark.parametrize(("outer", "inner"), [(0, 0), (0, 8), (8, 0), (8, 8)])


def ask(outer: int, inner: int, step: str, x: TensorSpec, result: Any, wanted: Any = None) -> tuple[Work, Any]:
    """Calls an ensemble of one step, whose model gives this result in each output. Returns what the model gets, and the
    shapes of the response by name."""
    world = World()
    outputs = tuple(TensorSpec(name, "INT8", (2, 2)) for name in "yv")
    world.deploy(ModelPolicy("m", 1, inner, (TensorSpec("x", "INT8", (2, 2)),), outputs))
    world.deploy(ModelPolicy("e", 1, outer, (x,), (FLAT, SQUARE), steps=(step_of(step),)))
    client, seen = world.connect("a"), []

    def compute(_: Any, work: Work) -> Row:
        seen.append(work)
        shape = (1, *result) if inner else result
        return Row(work.request, tuple(Tensor(one.name, "INT8", shape, bytes(4)) for one in work.outputs or ()))

    world.worker("m_0").compute = compute
    client.sends(1)
    shape = (1, *x.dims) if outer else x.dims
    world.turn([(client.peer, Infer(1, "e", 0, (Tensor("x", "INT8", shape, bytes(4)),), wanted))])
    world.finish("m_0")
    return seen[0], {tensor.name: tensor.shape for tensor in client.answers[1].outputs}


@BATCHES
def test_an_ensemble_reshapes_its_inputs_and_outputs(outer: int, inner: int) -> None:
    x = TensorSpec("x", "INT8", (4,), reshape=(2, 2))
    work, shapes = ask(outer, inner, "m(x:x)->(y:z,v:w)", x, (2, 2))
    assert work.inputs[0].shape == ((1, 2, 2) if inner else (2, 2))
    assert shapes == ({"z": (1, 4), "w": (1, 2, 2)} if outer else {"z": (4,), "w": (2, 2)})


@BATCHES
def test_classes_of_an_ensemble(outer: int, inner: int) -> None:
    x = TensorSpec("x", "INT8", (4,), reshape=(2, 2))
    work, shapes = ask(outer, inner, "m(x:x)->(y:z,v:w)", x, (3,), (Wanted("z", None, 3),))
    assert work.step == StepOptions((), (LabelFile("y", *LABELS),))
    assert shapes == {"z": (1, 3) if outer else (3,)}


def test_classes_of_each_row_of_a_mapped_step() -> None:
    x = TensorSpec("x", "INT8", (1, 2, 2))
    _, shapes = ask(0, 8, "m(x:x)->(y:z,v:w)/map:x", x, (3,), (Wanted("z", None, 3),))
    assert shapes == {"z": (1, 3)}, "one row"


def test_shapes_follow_the_reshape_of_a_tensor() -> None:
    for shape, dims, reshaped, batches, expected in (
        ((8,), (8,), (4, 1, 2), False, (4, 1, 2)),
        ((3, 8), (8,), (4, 1, 2), True, (3, 4, 1, 2)),
        ((3, 5, 1, 7), (-1, 1, -1), (-1, -1), True, (3, 5, 7)),
        ((1,), (1,), (), False, ()),
        ((8,), (8,), None, False, (8,)),
        ((9,), (8,), (4, 1, 2), False, (9,)),
    ):
        assert graph.reshape(shape, dims, reshaped, batches) == expected
