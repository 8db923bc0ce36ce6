"""The worker's lease: a socket to a client that sends one packet of requests at a time. The worker runs it as a batch,
and answers it directly.

Invariant: requests are recorded in the lease's log before their responses are sent, and requests that are not recorded
as running were not run. Anything that the worker does not accept ends the lease; the client then sends the requests to
the broker.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
from collections.abc import Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from shmserve.dtypes import ITEM_BYTES, elements
from shmserve.errors import ProtocolError
from shmserve.protocol.codec import Codec, encode_of_model
from shmserve.protocol.messages import (
    BATCH_REQUESTS,
    OWNER_SHIFT,
    PACKET_BYTES,
    ClientMessage,
    Columns,
    Fail,
    Infer,
    Reply,
    ReplyBatch,
    Tensor,
)
from shmserve.protocol.worker_messages import LeaseLogged, LeaseOver, Lend, Revoke, Row, Work, rows_of
from shmserve.shm.lease_log import RECORDS, LeaseLog
from shmserve.workers.batch.sequence_inputs import NULL

if TYPE_CHECKING:
    from shmserve.shm.mapped import Mapped
    from shmserve.workers.link import BrokerLink
    from shmserve.workers.model_calls.responses import OpenResponses
    from shmserve.workers.outbox import Outbox
    from shmserve.workers.runner import Runner

_Form = tuple[tuple[str, str, tuple[int, ...]], ...]
_SEND = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_NO_WAIT = int(socket.MSG_DONTWAIT)
_FORMS = 256
"""Memoized input shapes; beyond that, the cache is cleared."""
_FIRST = NULL - 1
"""The number of the first work item of a batch; the others have those below. Calls of the model cannot refer to them,
because the broker does not know the requests."""
_TOO_LARGE = "the model returned outputs that differ from its configuration and do not fit into a message"

_decode = Codec(ClientMessage, BATCH_REQUESTS).decode


class _HeldLease:
    """A lease, the socket to its client, and its log."""

    __slots__ = ("log", "order", "sock", "versions")

    def __init__(self, order: Lend, sock: socket.socket, log: LeaseLog) -> None:
        self.order, self.sock, self.log = order, sock, log
        self.versions = (order.version, 0) if order.default else (order.version,)
        """Version numbers that a request may use for the model's version."""


class LeaseHolder:
    """At most one lease at a time. `streams`: the open responses of the model, if it can send responses on its own."""

    def __init__(
        self,
        link: BrokerLink,
        outbox: Outbox,
        runner: Runner[Any],
        mapped: Mapped,
        streams: OpenResponses | None = None,
    ) -> None:
        self._lease: _HeldLease | None = None
        self._running = False
        """A request is running. Orders may be handled while it runs."""
        self._ending = False
        """The lease ends when the running request has been answered."""
        self._link = link
        self._outbox = outbox
        self._runner = runner
        self._mapped = mapped
        self._streams = streams
        # Not a bytearray: most workers never hold a lease, and untouched pages cost no memory.
        self._buffer = mmap.mmap(-1, PACKET_BYTES + 1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = memoryview(self._buffer)
        self._poll = select.poll()
        self._poll.register(link.fileno(), select.POLLIN)
        self._known: dict[_Form, tuple[int, list[int]]] = {}
        """Names, types and shapes of inputs -> rows, and bytes of each input."""

    @property
    def active(self) -> bool:
        return self._lease is not None

    @property
    def fit(self) -> bool:
        """False if threads of the model may need the link while the worker waits for requests."""
        return self._streams is None or not self._streams.shared

    # ------------------------------------------------------------------------------------ orders

    def lend(self, order: Lend, descriptors: list[int]) -> None:
        """Takes ownership of the descriptors."""
        sock = socket.socket(fileno=descriptors[0])
        try:
            if self._lease is not None:
                raise ProtocolError(f"lease {order.lease} while lease {self._lease.order.lease} lasts")
            if not self.fit:
                sock.close()
                self._outbox.add(LeaseOver(order.lease, True))
                return
            self._lease = _HeldLease(order, sock, LeaseLog(descriptors[1]))
        finally:
            os.close(descriptors[1])
        self._known.clear()
        self._poll.register(sock, select.POLLIN)

    def revoke(self, order: Revoke) -> None:
        if self._lease is None or order.lease != self._lease.order.lease:
            self._outbox.add(LeaseOver(order.lease))
        else:
            self.end()

    def end(self) -> None:
        """Answers a request that is running or has arrived, and ends the lease."""
        if self._running:
            self._ending = True
            return
        if self._lease is not None:
            self._outbox.flush()
            self._serve(self._lease)
        self._end()

    def _end(self) -> None:
        lease = self._lease
        if lease is not None:
            self._lease, self._ending = None, False
            self._poll.unregister(lease.sock)
            lease.sock.close()
            lease.log.close()
            self._outbox.add(LeaseOver(lease.order.lease, not self.fit))

    # ------------------------------------------------------------------------------------ requests

    def receive(self) -> tuple[list[Any], list[int]] | None:
        """Serves the client until an order arrives, and returns its packet; None if the lease has ended before."""
        link, broker = self._link, self._link.fileno()
        while (lease := self._lease) is not None:
            if not self.fit:
                self.end()
                return None
            ready = link.wait(lambda: self._poll.poll(0) or None, self._poll.poll)
            for fd, _ in ready:
                if fd == broker:
                    return link.drain()
            self._serve(lease)
        return None

    def _serve(self, lease: _HeldLease) -> None:
        """Answers the next packet, if one has arrived. Ends the lease if the client has left or sent anything else."""
        try:
            size = lease.sock.recv_into(self._buffer, 0, _NO_WAIT)
        except BlockingIOError:
            return
        except OSError:
            size = 0
        arrived = monotonic_ns()
        try:
            messages = _decode(self._view[:size]) if size else []  # type: ignore[arg-type]  # it accepts any buffer
        except ProtocolError:
            messages = []
        rows = self._check(lease, messages)
        if rows is None:
            self._end()
        else:
            self._run(lease, messages, rows, arrived)

    def _run(self, lease: _HeldLease, requests: list[Infer], rows: int, arrived: int) -> None:
        """Runs requests with `rows` each."""
        log, count = lease.log, len(requests)
        log.begin(requests[0].request, requests[-1].request, arrived)
        self._running = True
        work_items = [Work(_FIRST - index, rows, one.inputs, None, "") for index, one in enumerate(requests)]
        results, times, _ = self._runner.run_batch(work_items)
        self._running = False
        answers = self._answers(lease, requests, results)
        if self._streams is not None:
            self._streams.read()
        failed = sum([type(answer) is Fail for answer in answers])
        unread = log.end(arrived, times, rows, failed, count)
        try:
            lease.sock.send(encode_of_model(answers), _SEND)
        except OSError:  # the client has disconnected, or does not read its responses
            self._ending = True
        log.answered()
        if unread == RECORDS // 2:
            self._outbox.add(LeaseLogged(lease.order.lease))
            self._outbox.flush()
        if self._ending or unread >= RECORDS:
            self._end()

    def _answers(
        self, lease: _HeldLease, requests: list[Infer], results: Sequence[Row] | Columns
    ) -> list[Reply | Fail | ReplyBatch]:
        if len(requests) == 1:
            rows = rows_of(results)
            return [self._answer(lease, requests[0].request, rows[0] if rows else None)]
        if isinstance(results, Columns):
            results.requests = tuple([requests[_FIRST - number].request for number in results.requests])
            return [ReplyBatch(lease.order.version, results)]
        rows_by_number = {row.request: row for row in results}
        return [self._answer(lease, one.request, rows_by_number.get(_FIRST - at)) for at, one in enumerate(requests)]

    def _answer(self, lease: _HeldLease, number: int, row: Row | None) -> Reply | Fail:
        if row is None:
            return Fail(number, "INTERNAL", "the model sent no response to this request")
        if row.error is not None:
            return Fail(number, row.error.code, row.error.text)
        for tensor in row.outputs:
            if type(tensor.data) is not bytes:
                self._runner.discard(row)
                return Fail(number, "MODEL_FAILED", _TOO_LARGE)
        return Reply(number, lease.order.version, row.outputs, row.parameters)

    def _check(self, lease: _HeldLease, messages: list[Any]) -> int | None:
        """Returns the rows of each of the requests, which may run over the lease as a batch; None for any others."""
        first = messages[0] if messages else None
        if type(first) is not Infer:
            return None
        key = _key(first)
        known = self._form(lease, key, first.inputs)
        if known is None:
            return None
        rows, sizes = known
        count, order = len(messages), lease.order
        if count > 1 and (not 0 < rows * count <= order.batch or sum(sizes) * count > order.input_bytes):
            return None
        last = 0
        for message in messages:
            if message is not first and (type(message) is not Infer or _key(message) != key):
                return None
            if message.request <= last or not self._allows(lease, message, sizes):
                return None
            last = message.request
        return rows

    def _form(self, lease: _HeldLease, key: _Form, inputs: tuple[Tensor, ...]) -> tuple[int, list[int]] | None:
        known = self._known.get(key)
        if known is None:
            known = _check_form(lease.order, inputs)
            if known is not None:
                if len(self._known) >= _FORMS:
                    self._known.clear()
                self._known[key] = known
        return known

    def _allows(self, lease: _HeldLease, request: Infer, sizes: list[int]) -> bool:
        if request.outputs is not None or request.options is not None:
            return False
        if request.model != lease.order.model or request.version not in lease.versions:
            return False
        for tensor, size in zip(request.inputs, sizes, strict=True):
            data = tensor.data
            if (type(data) is not bytes or len(data) != size) and not self._may_read(lease, data, size):
                return False
        return True

    def _may_read(self, lease: _HeldLease, data: Any, size: int) -> bool:
        """True if it is a single handle to `size` bytes of the client's own memory."""
        if type(data) is not tuple or len(data) != 1:
            return False
        handle = data[0]
        return handle.size == size and handle.segment >> OWNER_SHIFT == lease.order.owner and self._mapped.has(handle)


def _key(request: Infer) -> _Form:
    return tuple([(tensor.name, tensor.dtype, tensor.shape) for tensor in request.inputs])


def _check_form(lease: Lend, inputs: tuple[Tensor, ...]) -> tuple[int, list[int]] | None:
    forms = {form.name: form for form in lease.inputs}
    max_batch = lease.rows
    rows = inputs[0].shape[0] if max_batch and inputs and inputs[0].shape else 0
    if len(inputs) != len(forms) or (max_batch and not 0 < rows <= max_batch):
        return None
    sizes: list[int] = []
    for tensor in inputs:
        form = forms.pop(tensor.name, None)
        shape = tensor.shape
        if form is None or tensor.dtype != form.dtype or len(shape) != len(form.dims) + bool(max_batch):
            return None
        dims = shape[1:] if max_batch else shape
        if (max_batch and shape[0] != rows) or any(dim < 0 for dim in dims):
            return None
        if any(want not in (-1, dim) for want, dim in zip(form.dims, dims, strict=True)):
            return None
        sizes.append(elements(shape) * ITEM_BYTES[form.dtype])
    return None if sum(sizes) > lease.input_bytes else (rows, sizes)
