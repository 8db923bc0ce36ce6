"""A core with a client that accepts leases of the model `m`."""

from __future__ import annotations

from typing import Any

from shmserve.core.effects import StartLease
from shmserve.core.limits import Limits
from shmserve.core.policy import BatchPolicy, ModelPolicy, TensorSpec
from shmserve.core.records import Lending, Version
from shmserve.core.service.lending import ALONE
from shmserve.core.stats.statistics import Statistics
from shmserve.protocol.messages import Handle, Infer
from tests.support.core.fakes.client import FakeClient
from tests.support.core.fakes.lease import FakeLease
from tests.support.core.fakes.tensors import one_input
from tests.support.core.fakes.worker import FakeWorker
from tests.support.core.world import Recorded

MS = 10**6
X, Y = (TensorSpec("x", "FP32", (1,)),), (TensorSpec("y", "FP32", (1,)),)
BATCHES = BatchPolicy()


def model(name: str = "m", max_batch: int = 8, batching: BatchPolicy | None = BATCHES, **more: Any) -> ModelPolicy:
    return ModelPolicy(name, more.pop("version", 1), max_batch, X, Y, batching, **more)


class Lent(Recorded):
    """With the model `m` and a client that accepts leases. Records the messages about them."""

    def __init__(self, policy: ModelPolicy | None = None, instances: int = 1, **limits: Any) -> None:
        super().__init__(Limits(**limits))
        self.numbers = 0
        self.deploy(policy or model(), instances)
        self.client = self.connect("a", leases=True)

    def infer(self, client: FakeClient, rows: int = 1, model: str = "m", **more: Any) -> Infer:
        """`data`: of its input, instead of inline bytes."""
        self.numbers += 1
        tensor = one_input(rows)
        tensor.data = more.pop("data", tensor.data)
        return Infer(self.numbers, model, more.pop("version", 0), (tensor,), **more)

    def ask(self, client: FakeClient, rows: int = 1, model: str = "m", **more: Any) -> Infer:
        message = self.infer(client, rows, model, **more)
        client.sends(message.request)
        self.turn([(client.peer, message)])
        return message

    def alone(self, count: int = ALONE + 1, client: FakeClient | None = None, **more: Any) -> None:
        for _ in range(count):
            self.ask(client or self.client, **more)
            self.finish_running()

    def lease(self, client: FakeClient | None = None) -> FakeLease:
        (lease,) = (client or self.client).leases.values()
        return lease

    def holder(self) -> FakeWorker:
        (worker,) = [worker for worker in self.workers.values() if worker.lease is not None]
        return worker

    def leased(self, client: FakeClient | None = None, rows: int = 1, **more: Any) -> Infer:
        client = client or self.client
        message = self.infer(client, rows, **more)
        client.send_leased(self.lease(client), message)
        return message

    def segment(self, client: FakeClient | None = None, name: str | None = None) -> Handle:
        """Four bytes in a new segment of the client."""
        client = client or self.client
        announcement = self.own_segment(client, 4096)
        announcement.name = name
        self.turn([(client.peer, announcement)])
        return Handle(announcement.segment, 128, 4)

    def serve(self, took: int = 0, error: tuple[str, str] | None = None) -> None:
        self.holder().run_leased(self.now, took, error)
        self.settle()

    def started(self) -> list[StartLease]:
        return self.of(StartLease)

    @property
    def version(self) -> Version:
        return self.core.state.ready["m"]

    @property
    def statistics(self) -> Statistics:
        return self.version.statistics

    @property
    def lending(self) -> Lending:
        assert self.version.service.lending is not None
        return self.version.service.lending

    def is_over(self) -> bool:
        """Asserts that no lease is left anywhere and that the instances are idle again."""
        version, state = self.version, self.core.state
        workers = [worker for worker in self.workers.values() if worker.lease is not None]
        idle = all(instance in version.idle for instance in version.instances if instance.usable)
        return idle and not (state.leases or self.leases or workers or self.client.leases)
