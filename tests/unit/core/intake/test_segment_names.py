"""Roles that may name memory. tests/scenarios/segment_names.txt has the names themselves."""

from __future__ import annotations

from shmserve.core.core import Core
from shmserve.core.effects import Effect, Send
from shmserve.core.events import Opened
from shmserve.protocol.messages import OWNER_SHIFT, PROTOCOL, Goodbye, Hello, Map, Welcome
from shmserve.protocol.roles import ALL_ROLES, INFER, OBSERVE
from shmserve.shm.extents.cuda import name_of

ON_GPU = name_of(bytes(range(64)), b"uuid")


def connect(core: Core, peer: int, audience: str = "uid:1000", plane: str = "zmq", roles: int = ALL_ROLES) -> Welcome:
    hello = Hello(PROTOCOL, 0, "test", "posix" if plane == "zmq" else "memfd")
    (effect,) = core.handle([(0, Opened(peer, audience, plane, roles)), (peer, hello)], 0)
    assert isinstance(effect, Send)
    assert isinstance(effect.message, Welcome)
    return effect.message


def farewell(effects: list[Effect]) -> str:
    (text,) = [e.message.text for e in effects if isinstance(e, Send) and isinstance(e.message, Goodbye)]
    return text


def announce(core: Core, peer: int, name: str) -> list[Effect]:
    return core.handle([(peer, Map(peer << OWNER_SHIFT | 1, 4096, name))], 0)


def test_named_memory_on_the_lane_needs_the_role_operate() -> None:
    core = Core()
    assert connect(core, 1, plane="lane").limits["named_memory"] == 1
    assert announce(core, 1, "/made") == []
    assert connect(core, 2, "uid:1001", "lane", INFER | OBSERVE).limits["named_memory"] == 0
    assert "needs the role operate" in farewell(announce(core, 2, "/made"))


def test_roles_that_may_not_register_gpu_memory() -> None:
    """The server's user, root, and users that --access allows to operate, over the link that has their credentials."""
    core = Core()
    assert connect(core, 1, "uid:1001", "lane", INFER | OBSERVE).limits["device_memory"] == 0
    assert "needs the role operate" in farewell(announce(core, 1, ON_GPU))
    assert connect(core, 2).limits["device_memory"] == 0
    assert "only be announced over the lane" in farewell(announce(core, 2, ON_GPU))
    connect(core, 3, plane="lane")
    assert "does not contain an exported handle" in farewell(
        core.handle([(3, Map(3 << OWNER_SHIFT | 1, 0, ON_GPU))], 0)
    )
