"""What a worker says to the broker, kept until it is sent: one packet for as much as fits.

The rule: messages leave in the order in which they were said, and a descriptor leaves with its message.
"""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from shmserve.protocol.codec import encode
from shmserve.protocol.messages import CHUNK_BYTES, Cancel, Done, Handle, Return, Row, Rows

if TYPE_CHECKING:
    from shmserve.workers.link import Link

_ROW_BYTES = 48
_TENSOR_BYTES = 64
_RETURNED = 4096
"""The most handles of one Return."""


class Outbox:
    """Messages that wait for `flush`. Descriptors stay their owners': a copy is kept until it is sent, as a segment may
    be given up before that."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._messages: list[Any] = []
        self._descriptors: list[int] = []
        self.later: deque[Handle | Cancel] = deque()
        """What collectors, in any thread, want to be said with the next `flush`: handles that are given back, calls
        that nobody waits for."""

    def add(self, message: Any, descriptor: int | None = None) -> None:
        self._messages.append(message)
        if descriptor is not None:
            self._descriptors.append(os.dup(descriptor))

    def flush(self) -> None:
        if self.later:
            self._messages += self._late()
        messages, descriptors = self._messages, self._descriptors
        if not messages:
            return
        self._messages, self._descriptors = [], []
        try:
            packet = encode(messages)
            if len(packet) <= CHUNK_BYTES:
                self._link.send_packet(packet, descriptors)
            else:
                self._link.send(in_chunks(messages), descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _late(self) -> list[Any]:
        found: list[Any] = []
        handles: list[Handle] = []
        for _ in range(len(self.later)):
            what = self.later.popleft()
            if isinstance(what, Handle):
                handles.append(what)
            else:
                found.append(what)
        found += [Return(tuple(handles[at : at + _RETURNED])) for at in range(0, len(handles), _RETURNED)]
        return found


class Unheard(Outbox):
    """Of a model that runs without a broker: nobody is told, and so there is no link."""

    def __init__(self) -> None:
        pass

    def add(self, message: Any, descriptor: int | None = None) -> None:
        pass

    def flush(self) -> None:
        pass


def in_chunks(messages: list[Any]) -> list[Any]:
    """The same, with Rows before each Done whose results are too many for one message."""
    found: list[Any] = []
    for message in messages:
        if not isinstance(message, Done):
            found.append(message)
            continue
        rows = message.rows
        size = start = 0
        for index, row in enumerate(rows):
            taken = row_bytes(row)
            size += taken
            if size > CHUNK_BYTES and index > start:
                found.append(Rows(message.batch, rows[start:index]))
                start, size = index, taken
        found.append(replace(message, rows=rows[start:]))
    return found


def row_bytes(row: Row) -> int:
    """About what a row takes in a packet; never less by more than what PACKET_BYTES leaves over CHUNK_BYTES."""
    size = _ROW_BYTES
    for tensor in row.outputs:
        data = tensor.data
        size += _TENSOR_BYTES + (len(data) if data.__class__ is bytes else 32)
    if row.error is not None:
        size += 4 * len(row.error.text)
    if row.parameters:
        size += sum(16 + 4 * (len(key) + len(str(value))) for key, value in row.parameters.items())
    return size
