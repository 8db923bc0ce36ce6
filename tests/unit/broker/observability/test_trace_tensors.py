"""Tensors in the trace file: Triton's format, only tensors that can be read in the turn of the answer, and bounded
sizes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.broker.observability.trace_tensors import ELEMENTS, STRING_BYTES, activities
from shmserve.broker.observability.traces import lines
from shmserve.core.effects import Traced
from shmserve.core.limits import Limits
from shmserve.core.owners.trace import Sample
from shmserve.core.policy import BatchPolicy, ModelPolicy, TensorSpec
from shmserve.protocol.messages import Handle, Infer, More, Options, Tensor
from tests.support.core.world import World

MS = 1_000_000
X, Y = (TensorSpec("x", "FP32", (1,)),), (TensorSpec("y", "FP32", (1,)),)


def data(tensor: Tensor) -> str:
    """What a trace shows of a tensor whose memory cannot be read."""
    (found,) = activities(1, "TENSOR_QUEUE_INPUT", [tensor], lambda parts: None)
    text: str = found["tensor"]["data"]
    return text


def packed(*texts: bytes) -> bytes:
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)


@pytest.mark.parametrize(
    ("dtype", "kind", "values", "text"),
    [
        ("INT32", "<i4", [0, -1, 2], "0,-1,2"),
        ("UINT64", "<u8", [2**64 - 1], str(2**64 - 1)),
        ("BOOL", "?", [True, False], "1,0"),
        ("FP32", "<f4", [0.1, 1.0, 1e-9], "0.1,1,1e-09"),
        ("FP64", "<f8", [0.5], "0.5"),
        ("FP16", "<f2", [0.25], "0.25"),
        ("BF16", "<u2", [0x3FC0], "1.5"),
        ("INT8", "i1", [], ""),
    ],
)
def test_numbers_and_strings(dtype: str, kind: str, values: list[Any], text: str) -> None:
    assert data(Tensor("x", dtype, (len(values),), np.array(values, kind).tobytes())) == text
    assert data(Tensor("x", "BYTES", (3,), packed(b"a", "é".encode(), b"\xff"))) == "a,é,\N{REPLACEMENT CHARACTER}"
    long = [b"a" * 100] * STRING_BYTES
    assert len(data(Tensor("x", "BYTES", (len(long),), packed(*long)))) < STRING_BYTES
    assert data(Tensor("x", "FP32", (2,), (Handle(1, 0, 8),))) == "", "it cannot be read"


def test_only_the_first_elements_of_large_tensors_are_read() -> None:
    memory = np.arange(ELEMENTS + 500, dtype="<i4").tobytes()
    parts = (Handle(1, 0, 400), Handle(1, 400, len(memory) - 400))
    read: list[int] = []

    def reads(asked: tuple[Handle, ...]) -> bytes:
        read.extend(part.size for part in asked)
        return b"".join(memory[part.offset : part.offset + part.size] for part in asked)

    (found,) = activities(1, "TENSOR_QUEUE_INPUT", [Tensor("x", "INT32", (ELEMENTS + 500,), parts)], reads)
    assert found["tensor"]["data"] == ",".join(map(str, range(ELEMENTS)))
    assert read == [400, 4 * ELEMENTS - 400]
    assert found["tensor"]["shape"] == str(ELEMENTS + 500)


def test_trace_lines_have_the_format_of_triton() -> None:
    x, y = (np.array([values], "<i4").tobytes() for values in ([0, 1], [1, 2]))
    tensors = ((Tensor("INPUT0", "INT32", (1, 2), x),), (Tensor("OUTPUT0", "INT32", (1, 2), y),))
    traced = Traced({"model": "m", "version": 1}, 1, (), 2, None, tensors, timestamps=False, number=1)
    assert lines(traced, lambda parts: None) == [
        b'{"id":1,"model_name":"m","model_version":1}',
        b'{"id":1,"activity":"TENSOR_QUEUE_INPUT","tensor":{"name":"INPUT0","data":"0,1","shape":"1,2","dtype":"INT32"}}',
        b'{"id":1,"activity":"TENSOR_BACKEND_OUTPUT","tensor":{"name":"OUTPUT0","data":"1,2","shape":"1,2","dtype":"INT32"}}',
    ]
    timed = [json.loads(line) for line in lines(replace(traced, timestamps=True), lambda parts: None)]
    assert sum("timestamps" in line for line in timed) == 4


class Sampled(World):
    def __init__(self, policy: ModelPolicy) -> None:
        super().__init__(Limits())
        self.found: list[Traced] = []
        self.deploy(policy, large="y")
        self.core.state.observers.traces.samples[""] = Sample(1, tensors=True)
        self.client = self.connect("c")

    def tell(self, effect: Any) -> None:
        if isinstance(effect, Traced):
            self.found.append(effect)


def test_inputs_and_outputs_of_a_request_are_traced() -> None:
    world = Sampled(ModelPolicy("m", 1, 4, X, Y, BatchPolicy()))
    world.client.sends(1)
    x = Tensor("x", "FP32", (1, 1), bytes(4))
    world.turn([(world.client.peer, Infer(1, "m", 0, (x,)))])
    world.worker("m_0").finish(world.now)
    world.settle()
    (found,) = world.found
    assert found.tensors is not None
    inputs, (y,) = found.tensors
    assert inputs == (x,)
    assert y.data, "in shared memory that can be read in this turn"
    assert not isinstance(y.data, bytes)


def test_memory_of_earlier_parts_is_not_read() -> None:
    """The caller may have returned the memory, and it may hold another caller's bytes."""
    world = Sampled(ModelPolicy("m", 1, 4, X, Y, BatchPolicy(), decoupled=True))
    client, worker = world.client, world.worker("m_0")
    client.sends(1, 5)
    options = Options(window=5)
    world.turn([(client.peer, Infer(1, "m", 0, (Tensor("x", "FP32", (1, 1), bytes(4)),), None, 0, options))])
    world.turn([(client.peer, More(1, 1))])
    (request,) = worker.streams
    for last in (False, True):
        worker.part(request, last)
        world.turn(world.heard(worker))
    (found,) = world.found
    assert found.tensors is not None
    assert [bool(tensor.data) for tensor in found.tensors[1]] == [False, True]
