"""The broker's side of leases: creates the socket pair and the log of each lease, and reads the logs. The core decides
when leases start and end."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

from shmserve.broker.link import SEND_BUFFER, PeerLink
from shmserve.core.effects import ReadLease, StartLease
from shmserve.core.events import LeaseRead
from shmserve.protocol.worker_messages import LeasedBatch, LeaseOver
from shmserve.shm import lease_log
from shmserve.shm.lease_log import LeaseLog


class Leases:
    """`put(peer, event)` passes an event to the core. `kill(peer, reason)` kills a worker whose log is invalid."""

    def __init__(
        self, links: Mapping[int, Any], put: Callable[[int, Any], None], kill: Callable[[int, str], None]
    ) -> None:
        self._links = links
        self._put = put
        self._kill = kill
        self._logs: dict[int, tuple[LeaseLog, int]] = {}
        """Lease -> its log and its worker."""

    def start(self, effect: StartLease) -> None:
        """Creates the lease. If the client or worker has disconnected, or no descriptors are left, reports LeaseOver at
        once."""
        client, worker = self._links.get(effect.client), self._links.get(effect.worker)
        if not isinstance(client, PeerLink) or not isinstance(worker, PeerLink):
            self._put(effect.worker, LeaseOver(effect.of_client.lease))
            return
        number = effect.of_client.lease
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with ours, theirs:
                for end in (ours, theirs):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
                fd = lease_log.create()
                try:
                    self._logs[number] = LeaseLog(fd), effect.worker
                    client.send_now([effect.of_client], [theirs.fileno()])
                    worker.send_now([effect.of_worker], [ours.fileno(), fd])  # last, as the worker then ends the lease
                finally:
                    os.close(fd)
        except OSError:
            self._put(effect.worker, LeaseOver(number))

    def read(self, effect: ReadLease) -> None:
        """Reports the new records of the log, and closes the log if this is the final read."""
        known = self._logs.get(effect.lease)
        if known is None:
            self._put(0, LeaseRead(effect.lease, [], final=effect.final))
            return
        log, worker = known
        reading = self._read(effect.lease, log, worker)
        reading.final = effect.final
        self._put(0, reading)
        if effect.final:
            del self._logs[effect.lease]
            log.close()

    def read_all(self) -> list[LeaseRead]:
        """The new records of all logs."""
        return [self._read(number, log, worker) for number, (log, worker) in self._logs.items()]

    def _read(self, number: int, log: LeaseLog, worker: int) -> LeaseRead:
        running = log.running()
        return LeaseRead(number, self._take(log, worker), *running)

    def _take(self, log: LeaseLog, worker: int) -> list[LeasedBatch]:
        try:
            return log.take()
        except ValueError as error:
            self._kill(worker, f"the log of its lease is invalid: {error}")
            return []

    def close(self) -> None:
        for log, _ in self._logs.values():
            log.close()
        self._logs.clear()
