"""A server's address: the `url` of a client, checked and completed.

One of:
    None                    the unix lane in the default runtime directory
    unix:///path/lane.sock  the unix lane
    ipc:///path/broker.sock ZeroMQ, on the same machine
    tcp://host:port         ZeroMQ with CURVE, tensors in frames
"""

from __future__ import annotations

import os
from pathlib import Path

from msgspec import Struct

from shmserve import paths
from shmserve.errors import ConnectionLost, InvalidRequest
from shmserve.protocol.messages import FRAME_BYTES
from shmserve.transport.keys import Keys, read_pair, read_public

SERVER_KEY, KEY_FILE = "SHMSERVE_SERVER_KEY", "SHMSERVE_KEY_FILE"
"""Environment variables: the defaults of server_key and key_file."""
TCP_FRAME_BYTES = 64 << 20
"""Limit on frames sent to a gateway, where receiving a large message does not block other clients."""
FIRST_STEP = "start one with `shmserve serve --model-repository DIR`"


class Address(Struct, frozen=True):
    """A server's address. `memory`: how large tensors are passed: memfd, posix or frames. `keys`: only for tcp."""

    url: str
    kind: str
    path: str
    memory: str
    keys: Keys | None = None

    @property
    def frame_bytes(self) -> int:
        """Maximum size of the frames per message, until the server has sent its own limit."""
        return TCP_FRAME_BYTES if self.kind == "tcp" else FRAME_BYTES


_MEMORY = {"unix": ("memfd",), "ipc": ("posix", "frames"), "tcp": ("frames",)}


def address_of(
    url: str | None,
    runtime_dir: str | os.PathLike[str] | None = None,
    memory: str | None = None,
    server_key: str | os.PathLike[str] | None = None,
    key_file: str | os.PathLike[str] | None = None,
) -> Address:
    """Raises InvalidRequest if the url, the memory kind or the keys are invalid."""
    if url is None:
        folder = Path(runtime_dir) if runtime_dir is not None else paths.client_runtime_dir()
        url = f"unix://{folder / paths.LANE}"
    elif runtime_dir is not None:
        raise InvalidRequest("give url or runtime_dir, not both")
    kind, separator, rest = url.partition("://")
    allowed = _MEMORY.get(kind)
    if allowed is None or not separator or not rest:
        raise InvalidRequest(
            f"invalid url {url!r}: expected unix:///path/lane.sock, ipc:///path/broker.sock or tcp://host:port"
        )
    if memory is not None and memory not in allowed:
        raise InvalidRequest(f"memory={memory!r} cannot be used over {kind}://; use {' or '.join(allowed)}")
    if kind == "unix" and not rest.startswith("/"):
        rest = os.path.abspath(rest)
    if kind == "tcp":
        return Address(url, kind, rest, allowed[0], _keys(server_key, key_file))
    if server_key is not None or key_file is not None:
        raise InvalidRequest(f"server_key and key_file are only for tcp://, not {kind}://")
    return Address(url, kind, rest, memory or allowed[0])


def _keys(server_key: str | os.PathLike[str] | None, key_file: str | os.PathLike[str] | None) -> Keys:
    server = server_key or os.environ.get(SERVER_KEY) or None
    own = key_file or os.environ.get(KEY_FILE) or None
    if server is None or own is None:
        missing = f"server_key= (or {SERVER_KEY})" if server is None else f"key_file= (or {KEY_FILE})"
        raise InvalidRequest(
            f"tcp:// needs {missing}: your own NAME.key, written by `shmserve keygen NAME`, and the server's public key"
        )
    return Keys(read_public(server), read_pair(own))


def no_server(address: Address, reason: str) -> ConnectionLost:
    return ConnectionLost(f"no server at {address.url} ({reason}): {FIRST_STEP}, or select another by url=")
