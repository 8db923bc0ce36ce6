"""Names of clients' segments: no client gets access to memory of the server, or of another user, by its name."""

from __future__ import annotations

import pytest

from shmserve.core.core import Core
from shmserve.core.effects import Close, Effect, Forget, Log, Send
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


@pytest.mark.parametrize("name", ["", "/", "x", "/a/b", "/../x", "/.hidden", "/a b", "/" + "x" * 128])
def test_invalid_names_end_the_connection(name: str) -> None:
    core = Core()
    connect(core, 1)
    forget, goodbye, close = [effect for effect in announce(core, 1, name) if not isinstance(effect, Log)]
    assert forget == Forget(1 << OWNER_SHIFT | 1)
    assert isinstance(goodbye, Send)
    assert isinstance(goodbye.message, Goodbye)
    assert close == Close(1)


def test_a_named_segment_may_be_announced_on_two_connections() -> None:
    core = Core()
    connect(core, 1)
    connect(core, 2)
    assert announce(core, 1, "/mine") == []
    assert announce(core, 2, "/mine") == []
    core.check()


def test_a_segment_of_another_user_is_refused() -> None:
    core = Core()
    connect(core, 1)
    connect(core, 2, "uid:1001")
    assert announce(core, 1, "/theirs") == []
    assert Close(2) in announce(core, 2, "/theirs")


def test_named_memory_on_the_lane_needs_the_role_operate() -> None:
    core = Core()
    assert connect(core, 1, plane="lane").limits["named_memory"] == 1
    assert announce(core, 1, "/made") == []
    assert connect(core, 2, "uid:1001", "lane", INFER | OBSERVE).limits["named_memory"] == 0
    assert "needs the role operate" in farewell(announce(core, 2, "/made"))


def test_gpu_memory_is_announced_by_its_exported_handle() -> None:
    core = Core()
    assert connect(core, 1, plane="lane").limits["device_memory"] == 1
    assert announce(core, 1, ON_GPU) == []
    connect(core, 2, plane="lane")
    assert announce(core, 2, ON_GPU) == [], "exported once, named by whoever has it"
    core.check()


@pytest.mark.parametrize(
    "name",
    ["cuda:", "cuda:/etc/passwd", ON_GPU[:-1], ON_GPU + "=", "cuda:" + "A" * 88, ON_GPU[:-2] + "-=", ON_GPU + "\n"],
)
def test_invalid_names_of_gpu_memory_are_refused(name: str) -> None:
    core = Core()
    connect(core, 1, plane="lane")
    assert "does not contain an exported handle" in farewell(announce(core, 1, name))


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
