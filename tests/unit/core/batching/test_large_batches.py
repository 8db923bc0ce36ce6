"""Batches of more requests than one message in columns can hold."""

from __future__ import annotations

from shmserve.protocol import codec
from shmserve.protocol.messages import (
    PACKET_BYTES,
    Infer,
    Tensor,
)
from shmserve.protocol.worker_messages import Execute
from tests.support.core.policies import plain
from tests.support.core.world import World


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
