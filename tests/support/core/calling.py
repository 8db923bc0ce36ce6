"""Workers whose models call others."""

from __future__ import annotations

from shmserve.protocol.messages import OWNER_SHIFT, Part, Reply
from tests.support.core.fakes.client import FakeClient
from tests.support.core.fakes.tensors import references
from tests.support.core.fakes.worker import FakeWorker


class FakeCaller(FakeClient):
    """A worker as a client: it knows the segments that the worker knows, and also holds handles to its own."""

    def __init__(self, worker: FakeWorker) -> None:
        super().__init__(worker.peer, worker.name + "#", "worker", "memfd")
        self.mapped = worker.mapped

    def _take(self, message: Reply | Part) -> None:
        for handle in references(message.outputs):
            own = handle.segment >> OWNER_SHIFT == self.peer
            assert own or handle.segment in self.mapped, f"{self.name} was never told of {handle.segment}"
            self.holds[handle] += 1


def caller_of(worker: FakeWorker) -> FakeClient:
    if worker.caller is None:
        worker.caller = FakeCaller(worker)
    return worker.caller
