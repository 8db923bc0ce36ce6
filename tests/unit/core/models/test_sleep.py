"""When a version may go to sleep: cases that scenarios cannot express."""

from __future__ import annotations

from shmserve.core.effects import Spawn
from shmserve.core.limits import Limits
from shmserve.protocol.messages import DEVICE, Handle, Infer, Map, Tensor
from tests.support.core.machine import MS
from tests.support.core.policies import plain
from tests.support.core.world import Recorded, World


def test_a_model_with_tensors_on_a_gpu_does_not_sleep() -> None:
    """They are lost with its process. Tensors on the host are not."""
    world = World(Limits(idle_unload_ns=10 * MS))
    world.gpus["m"] = (0,)
    world.deploy(plain())
    ledger = world.core.state.ledger
    (peer,) = world.workers
    holder = world.core.state.clients[world.connect("c").peer]

    def asleep() -> bool:
        return world.core.state.models["m"].versions[1].asleep

    for number, name in ((1, f"{DEVICE}0/1"), (2, None)):
        world.turn([(peer, Map((peer << 32) + number, 4096, name, "uid:1000"))])
    on_gpu, on_host = (Handle((peer << 32) + number, 0, 64) for number in (1, 2))
    for handle in (on_gpu, on_host):
        world.workers[peer].out[handle] = 1
        ledger.give(holder, handle)
    world.advance(world.now + 100 * MS)
    assert not asleep()
    ledger.take_back(holder, on_gpu)
    world.advance(world.now + 100 * MS)
    assert asleep()
    ledger.take_back(holder, on_host)
    world.turn([])
    assert not ledger.segments


def test_loading_is_urgent_while_requests_wait_for_it() -> None:
    """A process that loads for an operator has lower priority than requests."""
    world = Recorded(Limits(idle_unload_ns=10 * MS))
    world.deploy(plain(), 2)
    world.advance(world.now + 10 * MS)
    client = world.connect("c")
    client.sends(1)
    world.turn([(client.peer, Infer(1, "m", 0, (Tensor("x", "FP32", (1, 1), bytes(4)),)))])
    world.finish_running()
    world.deploy(plain(), 3)
    assert [spawn.urgent for spawn in world.of(Spawn)] == [False, False, True, True, False]
