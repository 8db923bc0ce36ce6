"""A packet that a client sends to a worker over its lease, which bypasses all checks of the broker.

Invariant: only requests that Lend allows are run, and each is answered once. Anything else just ends the lease.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from math import prod
from time import monotonic_ns
from typing import Any

from msgspec.structs import replace

from bench.hostile.packets import PacketGenerator
from shmserve.protocol import codec
from shmserve.protocol.messages import (
    OWNER_SHIFT,
    PACKET_BYTES,
    BrokerMessage,
    Fail,
    Handle,
    Infer,
    Options,
    Reply,
    Tensor,
    TensorForm,
    Wanted,
)
from shmserve.protocol.worker_messages import LeaseOver, Lend, Row, Work
from shmserve.shm import lease_log
from shmserve.shm.extents import memfd
from shmserve.shm.lease_log import LeaseLog
from shmserve.shm.mapped import Mapped
from shmserve.workers.leases import LeaseHolder

ROWS, BATCH = 4, 6
CLIENT = 3
OWN, OTHERS = CLIENT << OWNER_SHIFT | 1, (CLIENT + 1) << OWNER_SHIFT | 1
PAGE = 4096
FORMS = (TensorForm("x", "FP32", (-1,)), TensorForm("z", "INT64", (2, -1)))
SIZES = {"x": 4, "z": 8}
_decode = codec.Codec(BrokerMessage).decode


class _Link:
    """Waits for `packets` packets of the client, then brings an order."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0)
        self.packets = 0

    def fileno(self) -> int:
        return self._fd

    def wait(self, attempt: Any, block: Any) -> Any:
        self.packets -= 1
        return (attempt() or block()) if self.packets >= 0 else [(self._fd, select.POLLIN)]

    def drain(self) -> None:
        """An order without content."""


class _Outbox(list[Any]):
    def add(self, message: Any) -> None:
        self.append(message)

    def flush(self) -> None:
        """Everything is sent at once."""


class _Runner:
    """Asserts that it runs nothing that Lend does not allow."""

    def __init__(self) -> None:
        self.ran = self.batches = 0

    def run_batch(self, work_items: list[Work]) -> Any:
        assert len({work.request for work in work_items}) == len(work_items)
        assert len(work_items) == 1 or sum(work.rows for work in work_items) <= BATCH
        shapes = {tuple((tensor.name, tensor.shape) for tensor in work.inputs) for work in work_items}
        assert len(shapes) == 1
        for work in work_items:
            self._verify(work)
        self.ran += len(work_items)
        self.batches += 1
        now = monotonic_ns()
        rows = [Row(work.request, (Tensor("y", "FP32", (1,), bytes(4)),)) for work in work_items]
        return rows, (now, now, now, now), None

    def _verify(self, work: Work) -> None:
        assert work.request < 0
        assert 0 < work.rows <= ROWS
        assert sorted(tensor.name for tensor in work.inputs) == sorted(SIZES)
        for tensor in work.inputs:
            form = next(form for form in FORMS if form.name == tensor.name)
            assert tensor.dtype == form.dtype
            assert len(tensor.shape) == 1 + len(form.dims)
            assert tensor.shape[0] == work.rows
            assert all(want in (-1, dim) for want, dim in zip(form.dims, tensor.shape[1:], strict=True))
            size = SIZES[tensor.name] * prod(tensor.shape)
            if isinstance(tensor.data, tuple):
                assert len(_mapped.memory(*tensor.data)) == size
                assert tensor.data[0].segment == OWN
            else:
                assert isinstance(tensor.data, bytes)
                assert len(tensor.data) == size


def _memory() -> Mapped:
    """A segment of the client, and a segment of another client."""
    mapped = Mapped()
    for segment in (OWN, OTHERS):
        extent = memfd.create(PAGE)
        mapped.add(segment, PAGE, fd=os.dup(extent.fd))
        extent.close()
    return mapped


_link, _outbox, _runner, _mapped = _Link(), _Outbox(), _Runner(), _memory()


def run(data: bytes) -> None:
    """Input: a size of two bytes, a packet of this size, and a second packet."""
    holder: Any = LeaseHolder(_link, _outbox, _runner, _mapped)  # type: ignore[arg-type]
    client, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fd = lease_log.create()
    log = LeaseLog(fd)
    _outbox.clear()
    _runner.ran = _runner.batches = 0
    try:
        holder.lend(Lend(1, "m", 1, True, FORMS, ROWS, CLIENT, batch=BATCH), [worker.detach(), fd])
        size = int.from_bytes(data[:2], "little")
        for packet in (data[2 : 2 + size], data[2 + size :]):
            if holder.active and packet:
                client.send(packet[:PACKET_BYTES])
                before = _runner.ran
                _link.packets = 1
                holder.receive()
                _verify(holder, client, _runner.ran - before)
        records = log.take()
        assert (len(records), sum(count for *_, count in records)) == (_runner.batches, _runner.ran)
        assert not any(failed for *_, failed, _ in records)
        assert log.running()[0] == 0
        assert _outbox == ([] if holder.active else [LeaseOver(1)])
        client.close()
        while holder.active:
            _link.packets = 1
            holder.receive()
        assert _outbox == [LeaseOver(1)]
    finally:
        client.close()
        log.close()


def _verify(holder: Any, client: socket.socket, ran: int) -> None:
    client.setblocking(False)
    try:
        answer = client.recv(PACKET_BYTES)
    except BlockingIOError:
        answer = None
    if not ran:
        assert answer == b"" or answer is None
        assert not holder.active
        return
    assert answer
    answers = _decode(answer)
    assert len(answers) == ran == len({message.request for message in answers})
    assert all(isinstance(message, (Reply, Fail)) and message.request > 0 for message in answers)


def beginnings() -> Iterator[bytes]:
    """A good packet, followed by others. tests/unit/workers/test_leases.py has a packet of each invalid kind."""
    x, z = Tensor("x", "FP32", (2, 3), bytes(24)), Tensor("z", "INT64", (2, 2, 1), bytes(32))
    shared = Tensor("x", "FP32", (2, 3), (Handle(OWN, 64, 24),))
    good = Infer(5, "m", 0, (x, z))
    first = codec.encode([good])
    packets = [
        *(codec.encode([good, *(replace(good, request=6 + number) for number in range(count))]) for count in (0, 1, 3)),
        codec.encode([Infer(14, "m", 0, (shared, z))]),
        codec.encode([Infer(7, "m", 0, (z, x), (Wanted("y"),), 5, Options(priority=1))]),
    ]
    hostile = PacketGenerator(2, "m")
    for packet in (*packets, *(hostile.packet()[:1000] for _ in range(50))):
        yield len(first).to_bytes(2, "little") + first + packet
