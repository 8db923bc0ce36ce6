"""Names of clients' segments: nobody gets at memory of the server, or of another user, by naming it."""

from __future__ import annotations

import pytest

from shmserve.access import EVERYTHING
from shmserve.core.core import Core
from shmserve.core.effects import Close, Effect, Forget, Log, Send
from shmserve.core.events import Opened
from shmserve.messages import OWNER_SHIFT, PROTOCOL, Goodbye, Hello, Map


def connect(core: Core, peer: int, audience: str = "uid:1000") -> None:
    core.handle([(0, Opened(peer, audience, "zmq", EVERYTHING)), (peer, Hello(PROTOCOL, 0, "test", "posix"))], 0)


def announce(core: Core, peer: int, name: str) -> list[Effect]:
    return core.handle([(peer, Map(peer << OWNER_SHIFT | 1, 4096, name))], 0)


@pytest.mark.parametrize("name", ["", "/", "x", "/a/b", "/../x", "/.hidden", "/a b", "/" + "x" * 128])
def test_wrong_names_end_the_connection(name: str) -> None:
    core = Core()
    connect(core, 1)
    forget, goodbye, close = [effect for effect in announce(core, 1, name) if not isinstance(effect, Log)]
    assert forget == Forget(1 << OWNER_SHIFT | 1)
    assert isinstance(goodbye, Send)
    assert isinstance(goodbye.message, Goodbye)
    assert close == Close(1)


def test_a_client_that_came_back_announces_its_segments_again() -> None:
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
