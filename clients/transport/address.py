"""How clients reach a server: an address, and a link to it. The rule of the file: a link moves packets and knows
nothing of what is in them.

    None                    the unix lane in the default runtime directory
    unix:///path/lane.sock  the unix lane
    ipc:///path/broker.sock ZeroMQ, on the same machine
    tcp://host:port         ZeroMQ with CURVE, tensors in frames
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct

from shmserve import paths
from shmserve.clients.transport.keys import Keys, read_pair, read_public
from shmserve.errors import ConnectionLost, InvalidRequest
from shmserve.protocol.messages import FRAME_BYTES
from shmserve.session import Packet

Incoming = tuple[Any, "list[int]", "list[Any]"]
"""A packet's bytes (valid until the next receive), its descriptors, and the frames behind it."""

SERVER_KEY, KEY_FILE = "SHMSERVE_SERVER_KEY", "SHMSERVE_KEY_FILE"
"""In the environment: what is meant where server_key and key_file are not given."""
TCP_FRAME_BYTES = 64 << 20
"""Of frames that go to a gateway: nobody waits while it takes them in."""
FIRST_STEP = "start one with `shmserve serve --model-repository DIR`"


class Link(Protocol):
    """Any thread may send; one at a time may receive."""

    def send(self, packet: Packet) -> bool:
        """False: not now, the link is full. ConnectionLost when it has ended."""

    def receive(self, wait: float | None, to_send: bool = False, wakeable: bool = False) -> Incoming | None:
        """The next packet. None: nothing came within about `wait` seconds (None: no limit), or there is room again
        for what is `to_send`, or, if `wakeable`, `wake` was called. ConnectionLost when the link has ended."""

    def in_use(self) -> bool:
        """A thread is in the midst of it, and that may be this one: the collector runs anywhere. It must not send."""

    def wait_writable(self, wait: float | None) -> None:
        """Returns when there may be room again, or the time is over."""

    def wake(self) -> None:
        """Ends a `receive` of another thread that waits and is wakeable."""

    def descriptors(self) -> list[int]:
        """What an event loop watches for reading. They tell that something may have come: read until there is none."""

    def interrupt(self) -> None:
        """Ends the link for a thread that waits in `receive`, before `close`."""

    def close(self, linger: bool = False) -> None:
        """`linger`: what was sent last shall still arrive."""

    def abandon(self) -> None:
        """In a forked child: forgets the link without a word, as it is the parent's."""


class Address(Struct, frozen=True):
    """Where a server is. `memory`: how large tensors travel: memfd, posix or frames. `keys`: of tcp alone."""

    url: str
    kind: str
    path: str
    memory: str
    keys: Keys | None = None

    @property
    def frame_bytes(self) -> int:
        """The most bytes of frames that a message may carry, as far as is known before the server has said it."""
        return TCP_FRAME_BYTES if self.kind == "tcp" else FRAME_BYTES


_MEMORY = {"unix": ("memfd",), "ipc": ("posix", "frames"), "tcp": ("frames",)}


def address_of(
    url: str | None,
    runtime_dir: str | os.PathLike[str] | None = None,
    memory: str | None = None,
    server_key: str | os.PathLike[str] | None = None,
    key_file: str | os.PathLike[str] | None = None,
) -> Address:
    """InvalidRequest where the url, the memory asked for, or the keys cannot be."""
    if url is None:
        folder = Path(runtime_dir) if runtime_dir is not None else paths.client_runtime_dir()
        url = f"unix://{folder / paths.LANE}"
    elif runtime_dir is not None:
        raise InvalidRequest("give url or runtime_dir, not both")
    kind, separator, rest = url.partition("://")
    allowed = _MEMORY.get(kind)
    if allowed is None or not separator or not rest:
        raise InvalidRequest(
            f"url {url!r} is none of unix:///path/lane.sock, ipc:///path/broker.sock and tcp://host:port"
        )
    if memory is not None and memory not in allowed:
        raise InvalidRequest(f"memory={memory!r} cannot be used over {kind}://, only {' or '.join(allowed)}")
    if kind == "unix" and not rest.startswith("/"):
        rest = os.path.abspath(rest)
    if kind == "tcp":
        return Address(url, kind, rest, allowed[0], _keys(server_key, key_file))
    if server_key is not None or key_file is not None:
        raise InvalidRequest(f"server_key and key_file are for tcp://, and this is {kind}://")
    return Address(url, kind, rest, memory or allowed[0])


def _keys(server_key: str | os.PathLike[str] | None, key_file: str | os.PathLike[str] | None) -> Keys:
    server = server_key or os.environ.get(SERVER_KEY) or None
    own = key_file or os.environ.get(KEY_FILE) or None
    if server is None or own is None:
        missing = f"server_key= (or {SERVER_KEY})" if server is None else f"key_file= (or {KEY_FILE})"
        raise InvalidRequest(
            f"tcp:// needs {missing}: the file NAME.key of your own from `shmserve keygen NAME`, and the public key of "
            "the server"
        )
    return Keys(read_public(server), read_pair(own))


def open_link(address: Address) -> Link:
    """ConnectionLost where nobody listens. Of ZeroMQ it cannot be said yet: `receive` will tell."""
    if address.kind == "unix":
        from shmserve.clients.transport.lane import Lane

        return Lane(address)
    from shmserve.clients.transport.zmq import ZmqLink

    return ZmqLink(address)


def no_server(address: Address, reason: str) -> ConnectionLost:
    return ConnectionLost(f"no server at {address.url} ({reason}): {FIRST_STEP}, or name another by url=")
