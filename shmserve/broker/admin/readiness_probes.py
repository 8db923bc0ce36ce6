"""Readiness checks that models implement: sends probes to their workers and collects the results.

Invariant: every query is answered exactly once, even if workers exit or do not respond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct

from shmserve.protocol.worker_messages import Probe, Probed

LIMIT_S = 5.0
"""A model that does not respond within this time is not ready."""


class _Probe(Struct, eq=False):
    pending: set[int]
    answer: Callable[[bool], None]
    timer: Any = None


class Probes:
    """Probes in progress, and the workers that support them. `send(peer, message)` sends a message to a worker."""

    def __init__(self, loop: Any, send: Callable[[int, Probe], None]) -> None:
        self._loop = loop
        self._send = send
        self._able: set[int] = set()
        self._numbers = 0
        self._open: dict[int, _Probe] = {}

    def probe(self, peers: Iterable[int], answer: Callable[[bool], None]) -> bool:
        """Probes the workers that support it, then calls `answer(ready)`, with true if all of them are ready.

        Returns False, without calling `answer`, if no worker supports probes.
        """
        pending = self._able.intersection(peers)
        if not pending:
            return False
        self._numbers += 1
        probe = self._open[self._numbers] = _Probe(pending, answer)
        probe.timer = self._loop.call_later(LIMIT_S, self._settle, self._numbers, False)
        for peer in sorted(pending):
            self._send(peer, Probe(self._numbers))
        return True

    def probed(self, peer: int, message: Probed) -> None:
        """Processes the result of a probe. Number 0 announces that the worker supports probes."""
        if not message.number:
            self._able.add(peer)
            return
        probe = self._open.get(message.number)
        if probe is None or peer not in probe.pending:
            return
        probe.pending.discard(peer)
        if not message.ready or not probe.pending:
            self._settle(message.number, message.ready)

    def worker_exited(self, peer: int) -> None:
        self._able.discard(peer)
        for number, probe in list(self._open.items()):
            if peer in probe.pending:
                self._settle(number, False)

    def close(self) -> None:
        for number in list(self._open):
            self._settle(number, False)

    def _settle(self, number: int, ready: bool) -> None:
        probe = self._open.pop(number)
        probe.timer.cancel()
        probe.answer(ready)
