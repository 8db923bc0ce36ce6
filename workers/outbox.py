"""The queue of a worker's messages to the broker; a flush sends as many as fit in one packet.

Invariant: messages are sent in the order of `add`, and a descriptor is sent with its message, by whichever thread.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from shmserve.protocol.codec import encode
from shmserve.protocol.messages import CHUNK_BYTES, Cancel, Done, Handle, Return, Row, Rows, rows_of

if TYPE_CHECKING:
    from shmserve.workers.link import BrokerLink

_Batch = tuple["list[Any]", "list[int]"]
"""Messages, and the descriptors that are sent and closed with them."""
_ROW_BYTES = 48
_TENSOR_BYTES = 64
_RETURNED = 4096
"""The most handles in one Return."""


class Outbox:
    """Messages that wait for `flush`. The caller keeps its descriptor: the outbox sends a duplicate, as the segment may
    be closed before the flush."""

    def __init__(self, link: BrokerLink) -> None:
        self._link = link
        self._messages: list[Any] = []
        self._descriptors: list[int] = []
        self.later: deque[Handle | Cancel] = deque()
        """Handles to return and calls to cancel, added by finalizers in any thread and sent with the next `flush`."""
        self._sender: _Sender | None = None

    def add(self, message: Any, descriptor: int | None = None) -> None:
        self._messages.append(message)
        if descriptor is not None:
            self._descriptors.append(os.dup(descriptor))

    def flush(self) -> None:
        batch = self._take()
        if self._sender is not None:
            self._sender.send_now(batch)
        elif batch is not None:
            self._send(*batch)

    def flush_aside(self) -> None:
        """Lets another thread send, which pays if the caller then releases the GIL, as sending wakes the broker and
        takes up to 100 us. Errors are raised by the next flush."""
        batch = self._take()
        if batch is None:
            return
        if self._sender is None:
            self._sender = _Sender(self._send)
        self._sender.put(batch)

    def close(self) -> None:
        """Sends what is left, and ends the thread."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()
        self.flush()

    def _take(self) -> _Batch | None:
        if self.later:
            self._messages += self._late()
        if not self._messages:
            return None
        batch = self._messages, self._descriptors
        self._messages, self._descriptors = [], []
        return batch

    def _send(self, messages: list[Any], descriptors: list[int]) -> None:
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
        messages: list[Any] = []
        handles: list[Handle] = []
        for _ in range(len(self.later)):
            item = self.later.popleft()
            if isinstance(item, Handle):
                handles.append(item)
            else:
                messages.append(item)
        messages += [Return(tuple(handles[at : at + _RETURNED])) for at in range(0, len(handles), _RETURNED)]
        return messages


class _Sender:
    """A thread that sends batches of messages. Invariant: batches are sent in order, by the thread or by `send_now`,
    one at a time."""

    def __init__(self, send: Callable[[list[Any], list[int]], None]) -> None:
        self._send = send
        self._batches: deque[_Batch] = deque()
        self._sending = threading.Lock()
        self._work = threading.Lock()
        """Locked while there is nothing to do for the thread."""
        self._work.acquire()
        self._error: Exception | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="shmserve-sender", daemon=True)
        self._thread.start()

    def put(self, batch: _Batch) -> None:
        self._check()
        self._batches.append(batch)
        self._wake()

    def send_now(self, batch: _Batch | None) -> None:
        with self._sending:
            self._send_all()
            self._check()
            if batch is not None:
                self._send(*batch)

    def close(self) -> None:
        self._closed = True
        self._wake()
        self._thread.join()
        self._send_all()
        self._check()

    def _wake(self) -> None:
        if self._work.locked():
            self._work.release()

    def _run(self) -> None:
        while not self._closed:
            self._work.acquire()
            with self._sending:
                self._send_all()

    def _send_all(self) -> None:
        while self._batches and self._error is None:
            try:
                self._send(*self._batches.popleft())
            except Exception as error:
                self._error = error

    def _check(self) -> None:
        if self._error is not None:
            raise self._error


class NullOutbox(Outbox):
    """Discards all messages. Used without a broker, for example by warm-up."""

    def __init__(self) -> None:
        pass

    def add(self, message: Any, descriptor: int | None = None) -> None:
        pass

    def flush(self) -> None:
        pass

    def flush_aside(self) -> None:
        pass

    def close(self) -> None:
        pass


def in_chunks(messages: list[Any]) -> list[Any]:
    """Splits each Done with too many results for one message: Rows messages go before it."""
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
