"""The queue of a worker's messages to the broker; a flush sends as many as fit in one packet.

Invariant: messages are sent in the order of `add`, and a descriptor is sent with its message.
"""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from shmserve.protocol.codec import encode_of_model
from shmserve.protocol.messages import CHUNK_BYTES, Cancel, Handle, Return
from shmserve.protocol.worker_messages import Done, Row, Rows, rows_of

if TYPE_CHECKING:
    from shmserve.workers.link import BrokerLink

_ROW_BYTES = 48
_TENSOR_BYTES = 64
_RETURNED = 4096
"""Maximum number of handles in one Return."""


class Outbox:
    """Messages that wait for `flush`. The caller keeps its descriptor: the outbox sends a duplicate, because the
    segment may be closed before the flush."""

    def __init__(self, link: BrokerLink) -> None:
        self.link = link
        self._messages: list[Any] = []
        self._descriptors: list[int] = []
        self.deferred: deque[Handle | Cancel] = deque()
        """Handles to return and calls to cancel, added by finalizers in any thread and sent with the next `flush`."""

    def add(self, message: Any, descriptor: int | None = None) -> None:
        self._messages.append(message)
        if descriptor is not None:
            self._descriptors.append(os.dup(descriptor))

    def flush(self) -> None:
        if self.deferred:
            self._messages += self._late()
        messages, descriptors = self._messages, self._descriptors
        if not messages:
            return
        self._messages, self._descriptors = [], []
        try:
            packet = encode_of_model(messages)
            if len(packet) <= CHUNK_BYTES:
                self.link.send_packet(packet, descriptors)
            else:
                self.link.send(in_chunks(messages), descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _late(self) -> list[Any]:
        messages: list[Any] = []
        handles: list[Handle] = []
        for _ in range(len(self.deferred)):
            item = self.deferred.popleft()
            if isinstance(item, Handle):
                handles.append(item)
            else:
                messages.append(item)
        messages += [Return(tuple(handles[at : at + _RETURNED])) for at in range(0, len(handles), _RETURNED)]
        return messages


def in_chunks(messages: list[Any]) -> list[Any]:
    """Splits each Done that has too many results for one message: Rows messages precede it."""
    chunks: list[Any] = []
    for message in messages:
        if not isinstance(message, Done):
            chunks.append(message)
            continue
        rows = message.rows if message.columns is None else tuple(rows_of(message.columns))
        size = start = 0
        for index, row in enumerate(rows):
            taken = row_bytes(row)
            size += taken
            if size > CHUNK_BYTES and index > start:
                chunks.append(Rows(message.batch, rows[start:index]))
                start, size = index, taken
        chunks.append(replace(message, rows=rows[start:], columns=None))
    return chunks


def row_bytes(row: Row) -> int:
    """Estimates the size of a row in a packet. The error is less than PACKET_BYTES - CHUNK_BYTES."""
    size = _ROW_BYTES
    for tensor in row.outputs:
        data = tensor.data
        size += _TENSOR_BYTES + (len(data) if data.__class__ is bytes else 32)
    if row.error is not None:
        size += 4 * len(row.error.text)
    if row.parameters:
        size += sum(16 + 4 * (len(key) + len(str(value))) for key, value in row.parameters.items())
    return size
