"""Batches of more requests than one message in columns can hold."""

from __future__ import annotations

from shmserve.protocol import codec
from shmserve.protocol.messages import (
    BATCH_REQUESTS,
    PACKET_BYTES,
    PACKET_MESSAGES,
    Columns,
    Infer,
    InferBatch,
    Tensor,
    TensorForm,
)
from shmserve.protocol.worker_messages import Execute, WorkerOrder
from tests.support.core.policies import plain
from tests.support.core.world import World

FORM = TensorForm("x", "FP32", (1,))


def test_small_requests_are_split_by_encoded_size() -> None:
    """Each has a tensor of one byte, but their names and numbers fill several packets."""
    world = World()
    world.deploy(plain(max_batch=8192))
    client = world.connect("c")
    (worker,) = world.workers.values()
    world.slow_to.add(worker.peer)
    count = 6000
    tensor = Tensor("x", "FP32", (1, 1), bytes(4))
    world.turn([(client.peer, Infer(number, "m", 0, (tensor,))) for number in range(1, count + 1)])
    orders = [message for message in worker.inbox if isinstance(message, Execute)]
    packets = [codec.encode([order]) for order in orders]
    assert max(map(len, packets)) <= PACKET_BYTES
    assert sum(len(order.works) for order in orders) == count


def test_the_worker_can_read_a_batch_of_any_size() -> None:
    world = World()
    world.deploy(plain(max_batch=4096))
    client = world.connect("c")
    (worker,) = world.workers.values()
    world.slow_to.add(worker.peer)
    count = PACKET_MESSAGES // BATCH_REQUESTS + 4
    messages = []
    for index in range(count):
        numbers = tuple(range(index * BATCH_REQUESTS + 1, (index + 1) * BATCH_REQUESTS + 1))
        columns = Columns((FORM,), numbers, (1,) * BATCH_REQUESTS, ((bytes(4),),) * BATCH_REQUESTS)
        messages.append((client.peer, InferBatch("m", 0, columns)))
    world.turn(messages)
    orders = [message for message in worker.inbox if isinstance(message, Execute)]
    found = [message for packet in codec.pack(orders) for message in codec.Codec(WorkerOrder).decode(packet)]
    assert found == orders
    requests = [len(order.works) if order.columns is None else len(order.columns.requests) for order in orders]
    assert sum(requests) == count * BATCH_REQUESTS > PACKET_MESSAGES
