"""A simulation: the core in place of a broker, with simulated clients and workers.

This module executes the effects of the core. The behaviour of clients and workers is in `processes`.
"""

from __future__ import annotations

from random import Random
from typing import Any

from shmserve.core import events
from shmserve.core.core import Core
from shmserve.core.effects import Close, Compose, Drained, Kill, Log, ReadLease, Send, Settled, Spawn, StartLease
from shmserve.core.state import WORKERS_FROM
from shmserve.errors import InvalidRequest, Unavailable
from shmserve.protocol.worker_messages import LeaseOver
from shmserve.sim.load import Replay
from shmserve.sim.plan import Plan, SimModel
from shmserve.sim.processes.clients import LoadSource, RequestSource, SimClient
from shmserve.sim.processes.sim_lease import SimLease
from shmserve.sim.processes.worker import EXITED, SimWorker
from shmserve.sim.results import SECOND, ModelResult, Result
from shmserve.sim.world import START, World

SPINS = 1000
"""Turns without progress in time after which the simulation is considered stuck."""


def simulate(plan: Plan) -> Result:
    """Runs the plan. Raises Unavailable if the models cannot be served, AssertionError if an invariant of the core is
    broken."""
    simulation = Simulation(plan)
    simulation.deploy()
    simulation.run()
    return simulation.result()


class Simulation:
    def __init__(self, plan: Plan) -> None:
        self.core = Core("simulated", plan.limits)
        self._plan = plan
        self.world = World(plan, self._turn)
        self._turns = 0
        self._armed = 0
        self._models: dict[tuple[str, int], SimModel] = {}
        self._results: dict[str, ModelResult] = {}
        self._clients: dict[int, SimClient] = {}
        self._workers: dict[int, SimWorker] = {}
        self._leases: dict[int, SimLease] = {}
        """Leases whose logs the broker holds."""
        self._draws: dict[str, Random] = {}
        self._last_client = 0
        self._settled = self._operations = 0
        self._reloads = Random(f"{plan.seed} reloads")
        self._stopping = self._drained = False
        self._spins = 0
        self._last_turn = START
        for model in plan.models:
            policy = model.policy
            self._models[policy.name, policy.version] = model
            result = self._results.setdefault(policy.name, ModelResult(policy.name))
            result.instances += sum(not spec.passive for spec in model.instances)

    # ------------------------------------------------------------------------------------ turns of the broker

    def _turn(self, inbox: list[tuple[int, Any]]) -> None:
        self._execute_effects(self.core.handle(inbox, self.world.now))

    def _tick(self, due: int) -> None:
        if due == self._armed:
            self._armed = 0
            self.world.take_empty_turn()
            self._execute_effects(self.core.tick(self.world.now))

    def _arm(self) -> None:
        due = self.core.deadline()
        if due is not None and due != self._armed:
            self._armed = due
            world = self.world
            world.at(max(due, world.free, world.now), self._tick, due)

    # ------------------------------------------------------------------------------------ effects

    def _execute_effects(self, effects: list[Any]) -> None:
        """Executes effects at the end of the turn. All messages for one worker travel in one packet."""
        self._turns += 1
        world = self.world
        now, free = world.now, world.free
        there = (free if free > now else now) + self._plan.link_ns
        packets: dict[int, list[Any]] = {}
        clients = self._clients
        for effect in effects:
            if type(effect) is Send:
                peer = effect.peer
                if peer < WORKERS_FROM:
                    client = clients.get(peer)
                    if client is not None:
                        client.receive(effect.message, there)
                elif peer in packets:
                    packets[peer].append(effect.message)
                else:
                    packets[peer] = [effect.message]
            else:
                self._execute_rare(effect, there)
        for peer, packet in packets.items():
            worker = self._workers.get(peer)
            if worker is not None:
                world.at(there, worker.receive, packet)
        every = self._plan.check_every
        if every and self._turns % every == 0:
            self.core.check()
        self._arm()
        self._spins = 0 if now > self._last_turn else self._spins + 1
        self._last_turn = now
        assert self._spins < SPINS, f"time stands still at {now}: turn follows turn"

    def _execute_rare(self, effect: Any, there: int) -> None:
        if isinstance(effect, Spawn):
            self._spawn(effect, there)
        elif isinstance(effect, StartLease):
            self._start_lease(effect, there)
        elif isinstance(effect, ReadLease):
            lease = self._leases.pop(effect.lease, None) if effect.final else self._leases.get(effect.lease)
            empty = events.LeaseRead(effect.lease, [], final=effect.final)
            self.world.arrive((0, lease.read(effect.final) if lease is not None else empty))
        elif isinstance(effect, Kill):
            self.world.at(there, self._kill, effect)
        elif isinstance(effect, Close):
            self.world.at(there, self._closed, self._clients[effect.peer])
        elif isinstance(effect, Compose):
            self.world.arrive((0, events.Composed(effect.source, effect.number)))
        elif isinstance(effect, Settled):
            self._settled += 1
            if effect.code and not self.world.sources:
                raise Unavailable(f"the models of the plan cannot be served: {effect.text}")
            if effect.code:
                self.world.note(effect.text)
        elif isinstance(effect, Drained):
            self._drained = True
        elif isinstance(effect, Log) and effect.level in ("warning", "error", "critical"):
            self.world.note(effect.text)

    def _start_lease(self, effect: StartLease, there: int) -> None:
        message = effect.of_client
        client, worker = self._clients.get(effect.client), self._workers.get(effect.worker)
        if client is None or worker is None or worker.dead:
            self.world.arrive((effect.worker, LeaseOver(message.lease)))
            return
        lease = SimLease(self.world, message, there, worker.serve, client.receive_leased)
        self._leases[message.lease] = lease
        self.world.at(there, worker.lend, lease)
        client.leases[message.model, message.version] = lease

    # ------------------------------------------------------------------------------------ workers

    def _spawn(self, effect: Spawn, there: int) -> None:
        world, model = self.world, self._models[effect.model, effect.version]
        name = f"{self._plan.seed} {effect.model} {effect.instance.name}"
        draws = self._draws.setdefault(name, Random(name))
        worker = SimWorker(world, effect.peer, model, draws, self._results[effect.model], self._end_worker)
        self._workers[effect.peer] = worker
        late, dies = world.faults.worker()
        loaded = there + late + model.load.ns(1, draws)
        world.at(loaded, self._loaded, worker)
        if dies:
            world.at(loaded + dies, self._dies, worker)

    def _loaded(self, worker: SimWorker) -> None:
        if not worker.dead:
            self._count_instance(worker, 1)
            self.world.send_from_worker(worker.peer, events.Compiled(worker.model.policy))

    def _count_instance(self, worker: SimWorker, more: int) -> None:
        worker.loaded = more > 0
        if self._stopping:
            return
        self._results[worker.model.policy.name].resized(self.world.now, more)

    def _dies(self, worker: SimWorker) -> None:
        if not worker.dead:
            self._end_worker(worker, "signal SIGKILL")

    def _kill(self, effect: Kill) -> None:
        worker = self._workers.get(effect.peer)
        if worker is not None and not worker.dead:
            self._end_worker(worker, f"killed: {effect.reason}")

    def _end_worker(self, worker: SimWorker, reason: str) -> None:
        """A worker process ends. Messages that it sent before arrive first."""
        worker.dead = True
        if worker.loaded:
            self._count_instance(worker, -1)
        result = self._results[worker.model.policy.name]
        if worker.running is not None:
            result.busy_ns += self.world.now - worker.running.began
        if reason != EXITED:
            result.deaths += 1
        self.world.at(self.world.now + self._plan.link_ns, self._gone, events.Exited(worker.peer, reason))

    def _gone(self, exited: events.Exited) -> None:
        del self._workers[exited.peer]
        self.world.arrive((0, exited))

    # ------------------------------------------------------------------------------------ clients

    def connect(self, source: RequestSource) -> SimClient:
        world = self.world
        self._last_client += 1
        hold, dies = world.faults.client()
        client = self._clients[self._last_client] = SimClient(world, self._last_client, source, hold)
        if dies:
            world.at(world.now + dies, self._client_dies, client)
        return client

    def _client_dies(self, client: SimClient) -> None:
        if self.world.sending or client.open:
            self._closed(client)

    def _closed(self, client: SimClient) -> None:
        if client.dead:
            return
        client.dead = True
        del self._clients[client.peer]
        self.world.arrive((0, events.Closed(client.peer)))
        client.source.replace(client)

    # ------------------------------------------------------------------------------------ phases

    def deploy(self) -> None:
        """Deploys all models and waits until they are READY."""
        _check_calls(self._plan.models)
        names = list(dict.fromkeys(model.policy.name for model in self._plan.models))
        for name in names:
            self._deploy(name, False)
        limit = self.world.now + round(self._plan.patience_s * SECOND)
        self.world.run_until(lambda: self._settled == len(names), limit)
        if self._settled < len(names):
            raise Unavailable(f"the models of the plan are not ready after {self._plan.patience_s:g} s")

    def _deploy(self, name: str, fresh: bool) -> None:
        targets = []
        for source, model in enumerate(self._plan.models, 1):
            policy = model.policy
            if policy.name == name:
                ensemble = policy if policy.steps is not None else None
                targets.append(
                    events.Target(policy.version, source, model.instances, ensemble, model.memory, model.scaling)
                )
        self._operations += 1
        self.world.arrive((0, events.Deploy(name, tuple(targets), self._operations, fresh)))

    def _plan_reload(self) -> None:
        mean = self._plan.reload_every_s
        if mean:
            self.world.at(self.world.now + round(self._reloads.expovariate(1 / mean) * SECOND), self._reload, None)

    def _reload(self, _: None) -> None:
        if self.world.sending:
            self._deploy(self._reloads.choice(self._plan.models).policy.name, True)
            self._plan_reload()

    def run(self) -> None:
        """Sends all requests, waits for all responses, stops the server and asserts that nothing is left."""
        world = self.world
        patience = round(self._plan.patience_s * SECOND)
        world.begin_load()
        self._plan_reload()
        for source in self._make_sources():
            source.begin()
        world.run_load()
        world.run_until(lambda: not world.unanswered, world.now + patience)
        if world.unanswered:
            return
        world.run_until(self._at_rest, world.now + patience)
        self._stop(patience)

    def _make_sources(self) -> list[LoadSource]:
        plan = self._plan
        sources = []
        for number, load in enumerate(plan.loads):
            if not plan.seconds and not plan.requests and not isinstance(load.arrivals, Replay):
                raise InvalidRequest("a plan needs an end: seconds, or a number of requests")
            versions = [model for model in plan.models if model.policy.name == load.model]
            if not versions:
                raise InvalidRequest(f"the load asks for model '{load.model}', which the plan does not have")
            model = max(versions, key=lambda model: model.policy.version)
            sources.append(LoadSource(self.world, load, model, self._results[load.model], number, self.connect))
        return sources

    def _at_rest(self) -> bool:
        """Every request has left its worker, and every output has been returned."""
        return not self.core.state.requests and not any(
            client.holds or client.held_inputs for client in self._clients.values()
        )

    def _stop(self, patience: int) -> None:
        self._stopping = True
        for client in self._clients.values():
            client.dead = True
            self.world.arrive((0, events.Closed(client.peer)))
        self._clients.clear()
        self.world.arrive((0, events.Drain(patience)))
        self.world.run_until(lambda: self._drained, self.world.now + patience)
        state = self.core.state
        assert self._drained, "the server does not stop"
        assert not state.requests, "requests are left"
        if not len(state.cache):  # otherwise the cache still holds memory, which is freed with the process
            assert not state.ledger.holds, "holds are left, but all clients have disconnected"
            assert not state.ledger.segments, "segments are left"

    def model_result(self, name: str) -> ModelResult:
        """What the instances of a model have done so far."""
        return self._results[name]

    def result(self) -> Result:
        world, cache = self.world, self.core.state.cache
        scaled = {model.policy.name for model in self._plan.models if model.scaling is not None}
        seconds = (world.ends - world.began) / SECOND
        elapsed = (world.last_answer - world.began) / SECOND
        for result in self._results.values():
            result.seconds = seconds
            result.elapsed_s = max(elapsed, seconds)
            if result.name in scaled:
                result.end_sizes(world.began)
        return Result(
            self._results,
            seconds,
            self._turns,
            world.unanswered,
            world.digest.text(),
            world.log,
            cache.hits,
            cache.misses,
        )


def _check_calls(models: tuple[SimModel, ...]) -> None:
    known = {model.policy.name for model in models}
    for model in models:
        name = model.policy.name
        lacking = [called for called in model.calls if called not in known]
        if lacking:
            raise InvalidRequest(f"model '{name}' calls '{lacking[0]}', which the plan does not have")
        if model.calls and (model.policy.steps is not None or model.policy.decoupled or model.iterations > 1):
            raise InvalidRequest(f"model '{name}' cannot call others here: it does not answer once, by itself")
