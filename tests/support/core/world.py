"""A core, a clock that only the test advances, fake workers and clients, and the links between them.

`check()` runs after every turn. Messages to and from a worker can be held back, so that messages cross.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from shmserve.core import effects, events, states
from shmserve.core.core import Core
from shmserve.core.limits import Limits
from shmserve.core.policy import InstanceSpec, MemoryEstimate, ModelPolicy, Resource, ScalingPolicy
from shmserve.core.state import WORKERS_FROM, State
from shmserve.protocol.messages import Hello, Map
from shmserve.protocol.roles import ALL_ROLES
from shmserve.protocol.worker_messages import LeaseOver
from tests.support.core.fakes.client import FakeClient
from tests.support.core.fakes.lease import FakeLease
from tests.support.core.fakes.worker import FakeWorker

START = 1_000_000 * 10**9
OUTPUTS = {"lane": "memfd", "zmq": "posix"}
T = TypeVar("T")


class World:
    def __init__(self, limits: Limits | None = None, checks: bool = True) -> None:
        self.core = Core("test", limits)
        self.history = states.History()
        self.checks = checks
        self.now = START
        self.clients: dict[int, FakeClient] = {}
        self.workers: dict[int, FakeWorker] = {}
        self.policies: dict[tuple[str, int], ModelPolicy] = {}
        self.targets: dict[str, dict[int, events.Target]] = {}
        self.scalings: dict[str, ScalingPolicy] = {}
        """Model -> its autoscaling policy."""
        self.large: dict[str, frozenset[str]] = {}
        self.loads_itself: dict[str, bool] = {}
        self.sizes: dict[str, MemoryEstimate] = {}
        self.gpus: dict[str, tuple[int, ...]] = {}
        """Model -> GPUs of its instances, in turn; -1: a CPU."""
        self.resources: dict[str, tuple[Resource, ...]] = {}
        """Model -> resources of each instance, for the rate limiter."""
        self.turns: dict[str, int] = {}
        self.slow_to: set[int] = set()
        self.slow_from: set[int] = set()
        self.freed: list[Any] = []
        self.paused: dict[int, int] = {}
        """Paused clients -> end of the pause. They are read nevertheless."""
        self.leases: dict[int, FakeLease] = {}
        """Leases whose log the broker still has."""
        self.out_of_descriptors = False
        """No lease can be started."""
        self.forgotten: list[int] = []
        self.misfits: dict[str, str] = {}
        """Ensembles whose steps do not fit together -> the reason."""
        self.drained = False
        self._last_client = 0
        self.pending: list[tuple[int, Any]] = []

    # ------------------------------------------------------------------------------------ for subclasses that print

    def tell(self, effect: Any) -> None:
        """Called before an effect is carried out."""

    def tell_start(self, worker: FakeWorker) -> None:
        """Called when an open batch has started at the worker."""

    def delivered(self, happened: list[tuple[int, Any]]) -> Iterable[tuple[int, Any]]:
        """The events of a turn. The core takes them one by one."""
        return happened

    # ------------------------------------------------------------------------------------ turns and time

    def turn(self, happened: list[tuple[int, Any]]) -> None:
        """Processes these events in one turn, and everything that follows from them without time passing."""
        self._handle(happened)
        self.settle()

    def _handle(self, happened: list[tuple[int, Any]]) -> None:
        states.history = self.history if self.checks else None
        self.history.turn = f"{self.now}: {', '.join(type(event).__name__ for _, event in happened)}"
        self._carry_out(self.core.handle(self.delivered(happened), self.now))
        for _, event in happened:
            if isinstance(event, events.Exited):
                del self.workers[event.peer]
            elif isinstance(event, events.Closed):
                del self.clients[event.peer]

    def settle(self) -> None:
        while True:
            for worker in list(self.workers.values()):
                if worker.peer not in self.slow_to and worker.inbox and not worker.dead:
                    worker.read()
                    self.let_start(worker)
                if worker.peer not in self.slow_from and not worker.dead:
                    worker.notice()
            for client in self.clients.values():
                client.read_leases()
            happened, self.pending = self.pending, []
            for worker in list(self.workers.values()):
                if worker.peer not in self.slow_from and not worker.dead:
                    happened += self.heard(worker)
                    if worker.stopping and worker.running is None and not worker.inbox and not worker.dead:
                        worker.end_streams()
                        happened += self.heard(worker)
                        worker.dead = True
                        happened.append((0, events.Exited(worker.peer, "exit code 0")))
            if not happened:
                return
            self._handle(happened)

    def heard(self, worker: FakeWorker, count: int | None = None) -> list[tuple[int, Any]]:
        said = worker.outbox[:count]
        del worker.outbox[: len(said)]
        return [(worker.peer, message) for message in said]

    def let_start(self, worker: FakeWorker) -> None:
        if worker.running is None:
            batch = worker.start()
            if batch is not None and batch.open:
                self.tell_start(worker)

    def advance(self, until: int) -> None:
        """Time passes; the core's timer fires whenever it is due."""
        again = 0
        while (due := self.core.deadline()) is not None and due <= until:
            again = again + 1 if due <= self.now else 0
            assert again < 20, "the timer is due again at once: the loop would spin"
            self.now = max(self.now, due)
            self._carry_out(self.core.tick(self.now))
            self.settle()
        self.now = max(self.now, until)

    def change(self, what: Callable[[State], Any]) -> None:
        """Runs a turn in which a part of the core changes something."""
        produced = self.core.state.begin()
        self.core.state.now = self.now
        what(self.core.state)
        self.core._process_work(self.now)  # noqa: SLF001 - as at the end of each turn
        self._carry_out(produced)
        self.settle()

    def _carry_out(self, produced: list[Any]) -> None:
        if self.checks:
            self.core.check()
        for effect in produced:
            self.tell(effect)
            if isinstance(effect, effects.Send):
                self._send(effect)
            elif isinstance(effect, effects.Spawn):
                self._spawn(effect)
            elif isinstance(effect, effects.Kill):
                self.die(self.workers[effect.peer], f"killed: {effect.reason}")
            elif isinstance(effect, effects.Close):
                self.clients[effect.peer].leave()
                self.pending.append((0, events.Closed(effect.peer)))
            elif isinstance(effect, effects.StartLease):
                self._start_lease(effect)
            elif isinstance(effect, effects.ReadLease):
                self._read_lease(effect)
            elif isinstance(effect, effects.Compose):
                self.pending.append((0, self._composed(effect)))
            elif isinstance(effect, effects.Free):
                self.freed += effect.handles
            elif isinstance(effect, effects.Forget):
                self.forgotten.append(effect.segment)
            elif isinstance(effect, effects.Pause):
                self.paused[effect.peer] = effect.until
            elif isinstance(effect, effects.Drained):
                assert not self.drained
                self.drained = True
            else:
                assert isinstance(effect, (effects.Log, effects.Query, effects.Settled, effects.Traced))

    def _composed(self, effect: effects.Compose) -> events.Composed:
        names = [version.model for version in self.core.state.ensembles if version.compose_number == effect.number]
        problem = self.misfits.get(names[0], "") if names else ""
        return events.Composed(effect.source, effect.number, problem)

    def _send(self, effect: effects.Send) -> None:
        if effect.peer >= WORKERS_FROM:
            worker = self.workers.get(effect.peer)
            assert worker is not None, f"{effect.message} was sent to a worker that has been reported dead"
            if not worker.dead:
                worker.inbox.append(effect.message)
            return
        client = self.clients.get(effect.peer)
        assert client is not None, f"{effect.message} was sent to a client that has been reported gone"
        client.receive(effect.message)
        resent, client.unsent = client.unsent, []
        self.pending += [(client.peer, request) for request in resent]

    def _start_lease(self, effect: effects.StartLease) -> None:
        number = effect.of_client.lease
        worker, client = self.workers[effect.worker], self.clients[effect.client]
        if self.out_of_descriptors or worker.dead or client.ended:
            self.pending.append((effect.worker, LeaseOver(number)))
            return
        assert client.takes_leases, f"{client.name} takes no leases"
        lease = self.leases[number] = FakeLease(number, effect.of_client.model, self.now)
        worker.offered[number] = lease
        worker.inbox.append(effect.of_worker)
        client.lends(effect.of_client, lease)

    def _read_lease(self, effect: effects.ReadLease) -> None:
        lease = self.leases.get(effect.lease)
        empty = events.LeaseRead(effect.lease, [], final=effect.final)
        self.pending.append((0, lease.read(effect.final) if lease is not None else empty))
        if effect.final:
            self.leases.pop(effect.lease, None)

    # ------------------------------------------------------------------------------------ workers

    def deploy(self, policy: ModelPolicy, instances: int = 1, large: str = "", load: bool = True) -> None:
        name = policy.name
        self.policies[name, policy.version] = policy
        self.large[name] = frozenset(large.split())
        self.loads_itself[name] = load
        served = self.targets.setdefault(name, {})
        served[policy.version] = self.target(policy, 0, instances)
        self.turn([(0, events.Deploy(name, tuple(served.values())))])

    def target(self, policy: ModelPolicy, source: int, instances: int) -> events.Target:
        if policy.steps is not None:
            return events.Target(policy.version, source, (), policy)
        gpus = self.gpus.get(policy.name)
        devices = [(gpus or (-1,))[index % len(gpus or (-1,))] for index in range(instances)]
        specs = tuple(
            InstanceSpec(
                f"{policy.name}_{index}",
                "KIND_CPU" if device < 0 else "KIND_GPU",
                max(device, 0),
                resources=self.resources.get(policy.name, ()),
                turn=self.turns.get(policy.name, 1),
            )
            for index, device in enumerate(devices)
        )
        memory, scaling = self.sizes.get(policy.name, MemoryEstimate()), self.scalings.get(policy.name)
        return events.Target(policy.version, source, specs, memory=memory, scaling=scaling)

    def _spawn(self, effect: effects.Spawn) -> None:
        policy = self.policies[effect.model, effect.version]
        worker = FakeWorker(effect.peer, self.name_of(effect), policy, self.large[effect.model])
        worker.on_gpu = effect.instance.kind == "KIND_GPU" and policy.leaves_on_device
        self.workers[effect.peer] = worker
        if self.loads_itself[effect.model]:
            worker.outbox.append(events.Compiled(policy))

    def name_of(self, effect: effects.Spawn) -> str:
        """The name of the instance, with a ~ if another process of that name still runs, as in a reload."""
        name = effect.instance.name
        while any(worker.name == name and not worker.dead for worker in self.workers.values()):
            name += "~"
        return name

    def worker(self, name: str) -> FakeWorker:
        """The newest process of that name."""
        return [worker for worker in self.workers.values() if worker.name == name][-1]

    def die(self, worker: FakeWorker, reason: str, loading_error: str = "") -> None:
        """The process has ended; messages sent before are still read."""
        if not worker.dead:
            worker.dead = True
            self.pending += self.heard(worker)
            self.pending.append((0, events.Exited(worker.peer, reason, loading_error)))

    def finish(self, name: str = "m_0", took: int = 0, error: tuple[str, str] | None = None) -> FakeWorker:
        worker = self.worker(name)
        worker.finish(self.now, took, error=error)
        self.settle()
        return worker

    def finish_running(self, took: int = 0) -> None:
        for worker in list(self.workers.values()):
            if worker.running is not None:
                worker.finish(self.now, took)
        self.settle()

    def finish_all(self) -> None:
        """All queued requests are run, without time passing."""
        while any(worker.running is not None for worker in self.workers.values()):
            self.finish_running()

    def crash(self, worker: FakeWorker, reason: str = "signal SIGSEGV", loading_error: str = "") -> None:
        self.die(worker, reason, loading_error)
        self.settle()

    # ------------------------------------------------------------------------------------ clients

    def connect(
        self, name: str, plane: str = "lane", outputs: str = "", audience: str = "uid:1000", roles: int = ALL_ROLES,
        leases: bool = False, keeps: bool = False, offers: bool = False,
    ) -> FakeClient:  # fmt: skip
        self._last_client += 1
        peer = self._last_client
        client = FakeClient(peer, name, plane, outputs or OUTPUTS[plane])
        self.clients[peer] = client
        client.takes_leases = leases
        hello = Hello(1, 4000 + peer, name, client.outputs, leases, keeps, offers)
        self.turn([(0, events.Opened(peer, audience, plane, roles)), (peer, hello)])
        return client

    def gone(self, client: FakeClient) -> None:
        """The client's link has ended. Sending to it after this is an error."""
        client.leave()
        self.turn([(0, events.Closed(client.peer))])

    def own_segment(self, client: FakeClient, size: int) -> Map:
        """A Map message for a new segment of the client."""
        number = (client.peer << 32) + 1 + len(client.own)
        client.own[number] = size
        return Map(number, size, None if client.plane == "lane" else f"/segment-{number}")


class Recorded(World):
    """Keeps the effects, in order."""

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__(limits)
        self.effects: list[Any] = []

    def tell(self, effect: Any) -> None:
        self.effects.append(effect)

    def of(self, kind: type[T]) -> list[T]:
        return [effect for effect in self.effects if isinstance(effect, kind)]
