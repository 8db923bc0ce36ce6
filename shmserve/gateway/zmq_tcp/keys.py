"""Client keys of the ZeroMQ endpoint: a file of public keys and their roles, and ZAP, the protocol by which libzmq
checks access. Invariant: a client whose key is not in the file is refused in the handshake."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import zmq
from msgspec import Struct
from zmq.utils import z85

from shmserve.errors import InvalidRequest
from shmserve.protocol import zmq_frames
from shmserve.protocol.roles import ROLES, roles_of
from shmserve.transport import keys

log = logging.getLogger("shmserve.gateway")

_ASK_PARTS = 7
_KEY_BYTES = 32
_CURVE = b"CURVE"
_VERSION = b"1.0"
UNKNOWN, FULL, GOOD = b"400", b"500", b"200"
"""Status codes of ZAP. With 300, libzmq would not notify the client, which would retry forever."""


class KeyEntry(Struct, frozen=True):
    roles: int
    name: str


def parse(text: str, shown: str) -> dict[str, KeyEntry]:
    """Parses lines of PUBLIC-KEY ROLE,ROLE NAME. InvalidRequest names the line."""
    entries: dict[str, KeyEntry] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split(None, 2)
        if not words or words[0] == keys.COMMENT.strip():
            continue
        where = f"{shown}, line {number}"
        if not keys.KEY.fullmatch(words[0]):
            raise InvalidRequest(f"{where}: expected a public key of 40 characters, then its roles")
        if len(words) < 2:
            raise InvalidRequest(f"{where}: the key has no roles; they are {', '.join(ROLES)}, with commas between")
        if words[0] in entries:
            raise InvalidRequest(f"{where}: duplicate key")
        try:
            roles = roles_of(words[1])
        except ValueError as error:
            raise InvalidRequest(f"{where}: {error}") from None
        entries[words[0]] = KeyEntry(roles, words[2].strip() if len(words) > 2 else "")
    return entries


class KeyFile:
    """The key file as last read. If it becomes invalid, the error is logged and the previous keys stay in use."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.entries: Mapping[str, KeyEntry] = parse(keys.read(path), path)
        self._seen = self._state()

    def _state(self) -> tuple[int, ...]:
        try:
            state = os.stat(self._path)
        except OSError:
            return ()
        return state.st_mtime_ns, state.st_size, state.st_ino, state.st_mode

    def reload_if_changed(self) -> bool:
        """Reloads the file if it has changed. Returns whether the keys were replaced."""
        now = self._state()
        if now == self._seen:
            return False
        self._seen = now
        try:
            self.entries = parse(keys.read(self._path), self._path)
        except InvalidRequest as error:
            log.error("the previous keys stay in use: %s", error)
            return False
        log.info("keys reloaded: %d", len(self.entries))
        return True


class Zap:
    """Answers ZAP requests of libzmq in the same context. `decide` returns GOOD, UNKNOWN or FULL for a key and an
    address."""

    def __init__(self, context: zmq.Context[Any], decide: Callable[[str, str], bytes]) -> None:
        self._decide = decide
        self._socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind("inproc://zeromq.zap.01")
        self.descriptor = int(self._socket.getsockopt(zmq.FD))

    def answer_requests(self) -> None:
        """Processes all requests: the descriptor is edge-triggered."""
        while zmq_frames.events(self._socket) & zmq_frames.IN:
            self._socket.send_multipart(self._answer(self._socket.recv_multipart(zmq.NOBLOCK)))

    def _answer(self, parts: list[bytes]) -> list[bytes]:
        number = parts[1] if len(parts) > 1 else b""
        status, user = UNKNOWN, b""
        if len(parts) == _ASK_PARTS and parts[5] == _CURVE and len(parts[6]) == _KEY_BYTES:
            user = z85.encode(parts[6])
            status = self._decide(user.decode(), parts[3].decode("utf-8", "replace"))
        return [_VERSION, number, status, b"", user if status == GOOD else b"", b""]

    def close(self) -> None:
        self._socket.close()
