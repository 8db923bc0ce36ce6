"""Requests without tensors on a GPU carry nothing for them."""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec

from shmserve.protocol.messages import Columns, Handle, Infer, InferBatch, Map, Reply, Tensor, TensorForm
from shmserve.protocol.worker_messages import Done, Execute, LabelFile, Row, StepOptions, Work
from tests.support.cases import cases

TENSOR = Tensor("x", "FP32", (1, 2), bytes(8))
ON_WIRE = ["x", "FP32", [1, 2], bytes(8)]
COLUMNS = Columns((TensorForm("x", "FP32", (2,)),), (1,), (1,), ((bytes(8),),))
COLUMNS_ON_WIRE = [[["x", "FP32", [2]]], [1], [1], [[bytes(8)]]]


@cases(
    (Infer(1, "m", 0, (TENSOR,)), [7, 1, "m", 0, [ON_WIRE], None, 0, None, ""]),
    (InferBatch("m", 0, COLUMNS), [12, "m", 0, COLUMNS_ON_WIRE, 0, ""]),
    (Reply(1, 1, (TENSOR,)), [33, 1, 1, [ON_WIRE], None]),
    (
        Execute(1, 0, (Work(2, 1, (TENSOR,), None, "uid:1"),)),
        [65, 1, 0, [[2, 1, [ON_WIRE], None, "uid:1", None, -1, True, False, None]], False, False, None, []],
    ),
    (Execute(1, 0, (), columns=COLUMNS, audiences=("u",)), [65, 1, 0, [], False, False, COLUMNS_ON_WIRE, ["u"]]),
    (
        Done(1, (Row(2, (TENSOR,)),), (1, 2, 3, 4)),
        [99, 1, [[2, [ON_WIRE], None, None, False, None]], [1, 2, 3, 4], 0, 0, [], None],
    ),
    (Tensor("x", "FP32", (1, 2), (Handle(1, 2, 8),)), ["x", "FP32", [1, 2], [[1, 2, 8]]]),
    (Map(1, 4096), [1, 1, 4096, None, ""]),
    ids=["Infer", "InferBatch", "Reply", "Execute", "Execute in columns", "Done", "Tensor", "Map"],
)
def test_every_field_of_a_message_without_device_tensors_has_another_use(message: Any, expected: Any) -> None:
    """A new field for GPUs would appear here: send it in a map that leaves out what is not set."""
    assert msgpack.unpackb(msgspec.msgpack.encode(message)) == expected


def test_the_options_of_a_step_are_sent_only_if_set() -> None:
    assert msgpack.unpackb(msgspec.msgpack.encode(StepOptions(("y",)))) == {"near": ["y"]}
    assert msgpack.unpackb(msgspec.msgpack.encode(StepOptions(labels=(LabelFile("y", "f", "l"),)))) == {
        "labels": [["y", "f", "l"]]
    }
