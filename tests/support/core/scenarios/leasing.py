"""Commands of scenario files for leases. The answers to leased requests do not pass through the core, so they are not
in the transcript."""

from __future__ import annotations

from typing import Any

from shmserve.protocol.messages import Infer
from shmserve.protocol.worker_messages import LeaseLogged, LeaseOver
from tests.support.core.fakes.client import FakeClient
from tests.support.core.fakes.lease import FakeLease
from tests.support.core.policies import nanoseconds
from tests.support.core.scenarios.transcript import Transcript

Event = tuple[int, Any]


class Leasing(Transcript):
    def make_infer(self, client: FakeClient, number: int, options: dict[str, str]) -> Infer:
        raise NotImplementedError

    def _lease_at(self, name: str) -> FakeLease:
        lease = self.worker(name).lease
        assert lease is not None, f"{name} is not leased"
        return lease

    def do_alone(self, client: str, numbers: str, **options: str) -> None:
        """alone a 1-17: requests that a sends one after the other; only what concerns leases is shown."""
        first, _, last = numbers.partition("-")
        who, before = self.named[client], len(self.lines)
        for number in range(int(first), int(last or first) + 1):
            who.sends(number)
            self.turn([(who.peer, self.make_infer(who, number, options))])
            self.finish_running()
        self.lines[before:] = [line for line in self.lines[before:] if "lease" in line or " map " in line]

    def do_leased(self, client: str, number: str, **options: str) -> None:
        """leased a 18: a sends a request over its lease. The worker does not begin it."""
        who = self.named[client]
        (lease,) = who.leases.values()
        who.send_leased(lease, self.make_infer(who, int(number), options))

    def do_begin(self, name: str, ago: str = "0s") -> None:
        """begin m_0 ago=2ms: the worker has begun its leased request."""
        self._lease_at(name).begin(self.now - nanoseconds(ago))

    def do_serve(self, name: str, *flags: str, took: str = "0s", error: str = "") -> None:
        """serve m_0 took=2ms: the worker runs and answers its leased request; `unanswered`: the request is recorded,
        but not answered."""
        code, _, text = error.partition(":")
        failure = (code, text) if error else None
        self.worker(name).run_leased(self.now, nanoseconds(took), failure, "unanswered" not in flags)

    def do_logged(self, name: str) -> list[Event]:
        """The worker asks the broker to read the log of its lease."""
        return [(self.worker(name).peer, LeaseLogged(self._lease_at(name).number))]

    def do_end_lease(self, name: str, *flags: str) -> list[Event]:
        """The worker ends its lease; `unfit`: it cannot be leased."""
        worker, lease = self.worker(name), self._lease_at(name)
        worker.lease, lease.worker_open = None, False
        return [(worker.peer, LeaseOver(lease.number, "unfit" in flags))]

    def do_descriptors(self, *flags: str) -> None:
        """descriptors none: the broker cannot create sockets."""
        self.out_of_descriptors = "none" in flags
