"""The event heap, the clock, and everything between the core and those who are simulated around it.

The rule of the file: whatever happens at one time happens in the order in which it was planned; nothing is drawn here.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random
from typing import Any

from shmserve.core import events
from shmserve.core.core import Core
from shmserve.core.effects import Close, Compose, Drained, Kill, Log, Send, Settled, Spawn
from shmserve.core.state import WORKERS_FROM
from shmserve.errors import InvalidRequest, Unavailable
from shmserve.sim.clients import Client, Source
from shmserve.sim.faults import Fate
from shmserve.sim.load import Replay
from shmserve.sim.plan import Plan, SimModel
from shmserve.sim.results import SECOND, Digest, ModelResult, Result
from shmserve.sim.worker import Worker

START = SECOND
"""The first moment: 0 is no time for the core."""
KEPT_LOG = 20
FOREVER = 1 << 62
SPINS = 1000
"""So many turns without time passing, and it will never pass."""


def simulate(plan: Plan) -> Result:
    """The whole of it. Unavailable: the models cannot be served. AssertionError: the core has contradicted itself."""
    simulation = Simulation(plan)
    simulation.deploy()
    simulation.run()
    return simulation.result()


class Simulation:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.core = Core("simulated", plan.limits)
        self.fate = Fate(plan.faults, plan.seed)
        self.digest = Digest()
        self.now = START
        self.began = START
        self.ends = FOREVER
        """When sending does."""
        self._last = FOREVER
        """When the last that was sent has arrived."""
        self._sent = 0
        self._exhausted = False
        self._turns = 0
        self._heap: list[tuple[int, int, Callable[[Any], object], Any]] = []
        self._number = 0
        self._inbox: list[tuple[int, Any]] = []
        self._take_turn: Callable[[Any], object] = self._turn
        self._due = False
        """A turn is planned for what is in the inbox."""
        self._free = START
        """When the broker has done with its last turn."""
        self._armed = 0
        self._models: dict[tuple[str, int], SimModel] = {}
        self._results: dict[str, ModelResult] = {}
        self._clients: dict[int, Client] = {}
        self._workers: dict[int, Worker] = {}
        self._draws: dict[str, Random] = {}
        self._homes: dict[int | str, int] = {}
        self._sources: list[Source] = []
        self._last_client = 0
        self._settled = self._operations = 0
        self._reloads = Random(f"{plan.seed} reloads")
        self._drained = False
        self.owed = 0
        """Requests without an answer, and those of sequences that are still to come."""
        self.last_answer = START
        self._spins = 0
        self._last_turn = START
        self._log: list[str] = []
        for model in plan.models:
            policy = model.policy
            self._models[policy.name, policy.version] = model
            result = self._results.setdefault(policy.name, ModelResult(policy.name))
            result.instances += sum(not spec.passive for spec in model.instances)

    # ------------------------------------------------------------------------------------ time

    def at(self, time: int, what: Callable[[Any], object], argument: Any) -> None:
        """Plans it."""
        self._number += 1
        heapq.heappush(self._heap, (time, self._number, what, argument))

    def _run_until(self, over: Callable[[], bool], limit: int) -> None:
        heap, pop = self._heap, heapq.heappop
        while heap and not over():
            if heap[0][0] > limit:
                return
            self.now, _, what, argument = pop(heap)
            what(argument)

    # ------------------------------------------------------------------------------------ to the broker

    def send(self, at: int, peer: int, message: Any) -> None:
        """From a client."""
        self._number += 1
        heapq.heappush(self._heap, (at + self.plan.link_ns, self._number, self.arrive, (peer, message)))

    def say(self, peer: int, message: Any) -> None:
        """From a worker, now."""
        self._number += 1
        heapq.heappush(self._heap, (self.now + self.plan.link_ns, self._number, self.arrive, (peer, message)))

    def arrive(self, event: tuple[int, Any]) -> None:
        self._inbox.append(event)
        if not self._due:
            self._due = True
            now, free = self.now, self._free
            self._number += 1  # whatever else comes at that very moment is in the turn
            heapq.heappush(self._heap, (now if now > free else free, FOREVER + self._number, self._take_turn, None))

    def _turn(self, _: None) -> None:
        self._due = False
        inbox, self._inbox = self._inbox, []
        self._free = self.now + self.plan.turn_ns + self.plan.message_ns * len(inbox)
        self._carry_out(self.core.handle(inbox, self.now))

    def _tick(self, due: int) -> None:
        if due == self._armed:
            self._armed = 0
            self._free = max(self._free, self.now + self.plan.turn_ns)
            self._carry_out(self.core.tick(self.now))

    def _arm(self) -> None:
        due = self.core.deadline()
        if due is not None and due != self._armed:
            self._armed = due
            self.at(max(due, self._free, self.now), self._tick, due)

    # ------------------------------------------------------------------------------------ from the broker

    def _carry_out(self, effects: list[Any]) -> None:
        """They leave when the turn is over; what goes to one worker goes in one packet."""
        self._turns += 1
        leaves = self._free if self._free > self.now else self.now
        there = leaves + self.plan.link_ns
        packets: dict[int, list[Any]] = {}
        clients = self._clients
        for effect in effects:
            if type(effect) is Send:
                peer = effect.peer
                if peer < WORKERS_FROM:
                    client = clients.get(peer)
                    if client is not None:
                        client.hear(effect.message, there)
                elif peer in packets:
                    packets[peer].append(effect.message)
                else:
                    packets[peer] = [effect.message]
            else:
                self._rare(effect, there)
        for peer, packet in packets.items():
            worker = self._workers.get(peer)
            if worker is not None:
                self.at(there, worker.take, packet)
        every = self.plan.check_every
        if every and self._turns % every == 0:
            self.core.check()
        self._arm()
        self._spins = 0 if self.now > self._last_turn else self._spins + 1
        self._last_turn = self.now
        assert self._spins < SPINS, f"time stands still at {self.now}: turn follows turn"

    def _rare(self, effect: Any, there: int) -> None:
        if isinstance(effect, Spawn):
            self._spawn(effect, there)
        elif isinstance(effect, Kill):
            self.at(there, self._kill, effect)
        elif isinstance(effect, Close):
            self.at(there, self._closed, self._clients[effect.peer])
        elif isinstance(effect, Compose):
            self.arrive((0, events.Composed(effect.source, effect.number)))
        elif isinstance(effect, Settled):
            self._settled += 1
            if effect.code and not self._sources:
                raise Unavailable(f"the models of the plan cannot be served: {effect.text}")
            if effect.code:
                self.note(effect.text)
        elif isinstance(effect, Drained):
            self._drained = True
        elif isinstance(effect, Log) and effect.level in ("warning", "error", "critical"):
            self.note(effect.text)

    def note(self, text: str) -> None:
        if len(self._log) < KEPT_LOG:
            self._log.append(f"{(self.now - self.began) / SECOND:.6f} {text}")

    # ------------------------------------------------------------------------------------ workers

    def _spawn(self, effect: Spawn, there: int) -> None:
        model = self._models[effect.model, effect.version]
        name = f"{self.plan.seed} {effect.model} {effect.instance.name}"
        draws = self._draws.setdefault(name, Random(name))
        worker = Worker(self, effect.peer, model, draws, self._results[effect.model])
        self._workers[effect.peer] = worker
        late, dies = self.fate.worker()
        loaded = there + late + model.load.ns(1, draws)
        self.at(loaded, self._loaded, worker)
        if dies:
            self.at(loaded + dies, self._dies, worker)

    def _loaded(self, worker: Worker) -> None:
        if not worker.dead:
            self.say(worker.peer, events.Compiled(worker.model.policy))

    def _dies(self, worker: Worker) -> None:
        if not worker.dead:
            self.end_worker(worker, "signal SIGKILL")

    def _kill(self, effect: Kill) -> None:
        worker = self._workers.get(effect.peer)
        if worker is not None and not worker.dead:
            self.end_worker(worker, f"killed: {effect.reason}")

    def lives_at(self, sequence: int | str, peer: int) -> None:
        """No two sequences here share an id, so each has one worker for good."""
        home = self._homes.setdefault(sequence, peer)
        assert home == peer, f"sequence {sequence} moved from worker {home} to {peer}"

    def end_worker(self, worker: Worker, reason: str) -> None:
        """Its process has ended. What it had said before arrives before that does."""
        worker.dead = True
        result = self._results[worker.model.policy.name]
        if worker.running is not None:
            result.busy_ns += self.now - worker.running.began
        if reason != "exit code 0":
            result.deaths += 1
        self.at(self.now + self.plan.link_ns, self._gone, events.Exited(worker.peer, reason))

    def _gone(self, exited: events.Exited) -> None:
        del self._workers[exited.peer]
        self.arrive((0, exited))

    # ------------------------------------------------------------------------------------ clients

    def connect(self, source: Source) -> Client:
        self._last_client += 1
        hold, dies = self.fate.client()
        client = self._clients[self._last_client] = Client(self, self._last_client, source, hold)
        if dies:
            self.at(self.now + dies, self._client_dies, client)
        return client

    def _client_dies(self, client: Client) -> None:
        if self.sending or client.open:
            self._closed(client)

    def _closed(self, client: Client) -> None:
        if client.dead:
            return
        client.dead = True
        del self._clients[client.peer]
        self.arrive((0, events.Closed(client.peer)))
        client.source.replace(client)

    @property
    def sending(self) -> bool:
        return bool(self._sources) and not self._exhausted and self.now <= self._last

    def may_send(self, at: int) -> bool:
        """One more request; False: the time, or the number of requests, is up."""
        if self._exhausted or at > self.ends:
            return False
        self._sent += 1
        if self._sent == self.plan.requests:
            self._exhausted = True
            self.ends = at
        return True

    # ------------------------------------------------------------------------------------ the whole

    def deploy(self) -> None:
        """All models, and waits until they are READY."""
        _check_calls(self.plan.models)
        names = list(dict.fromkeys(model.policy.name for model in self.plan.models))
        for name in names:
            self._deploy(name, False)
        limit = self.now + round(self.plan.patience_s * SECOND)
        self._run_until(lambda: self._settled == len(names), limit)
        if self._settled < len(names):
            raise Unavailable(f"the models of the plan are not ready after {self.plan.patience_s:g} s")

    def _deploy(self, name: str, fresh: bool) -> None:
        targets = []
        for source, model in enumerate(self.plan.models, 1):
            policy = model.policy
            if policy.name == name:
                known = policy if policy.steps is not None else None
                targets.append(events.Target(policy.version, source, model.instances, known))
        self._operations += 1
        self.arrive((0, events.Deploy(name, tuple(targets), self._operations, fresh)))

    def _plan_reload(self) -> None:
        mean = self.plan.reload_every_s
        if mean:
            self.at(self.now + round(self._reloads.expovariate(1 / mean) * SECOND), self._reload, None)

    def _reload(self, _: None) -> None:
        if self.sending:
            self._deploy(self._reloads.choice(self.plan.models).policy.name, True)
            self._plan_reload()

    def run(self) -> None:
        """Sends all, has all answered, and lets the server stop: nothing may be left of any of it."""
        plan = self.plan
        patience = round(plan.patience_s * SECOND)
        self.began = self.now
        if plan.seconds:
            self.ends = self.now + round(plan.seconds * SECOND)
            self._last = self.ends + plan.link_ns
        self._plan_reload()
        self._make_sources()
        for source in list(self._sources):
            source.begin()
        while self.sending and self._heap and self._heap[0][0] <= self._last:
            self._run_some()
        self._exhausted = True
        self.ends = self.now if self.ends == FOREVER else self.ends
        self._run_until(lambda: not self.owed, self.now + patience)
        if self.owed:
            return
        self._run_until(self._at_rest, self.now + patience)
        self._stop(patience)

    def _run_some(self) -> None:
        """Events by the hundred: whether it is over need not be asked before each."""
        heap, pop, until = self._heap, heapq.heappop, self._last
        for _ in range(100):
            if not heap or heap[0][0] > until or self._exhausted:
                return
            self.now, _, what, argument = pop(heap)
            what(argument)

    def _make_sources(self) -> None:
        plan = self.plan
        for number, load in enumerate(plan.loads):
            if not plan.seconds and not plan.requests and not isinstance(load.arrivals, Replay):
                raise InvalidRequest("a plan needs an end: seconds, or a number of requests")
            found = [model for model in plan.models if model.policy.name == load.model]
            if not found:
                raise InvalidRequest(f"the load asks for model '{load.model}', which the plan does not have")
            model = max(found, key=lambda model: model.policy.version)
            self._sources.append(Source(self, load, model, self._results[load.model], number))

    def exhausted(self, source: Source) -> None:
        """It has nothing more to send."""
        self._sources.remove(source)

    def _at_rest(self) -> bool:
        """Every request has left its worker too, and every answer has been given back."""
        return not self.core.state.requests and not any(
            client.holds or client.held_inputs for client in self._clients.values()
        )

    def _stop(self, patience: int) -> None:
        for client in self._clients.values():
            client.dead = True
            self.arrive((0, events.Closed(client.peer)))
        self._clients.clear()
        self.arrive((0, events.Drain(patience)))
        self._run_until(lambda: self._drained, self.now + patience)
        state = self.core.state
        assert self._drained, "the server does not stop"
        assert not state.requests, "requests are left"
        if not len(state.cache):  # which keeps what it has; the memory goes with the process
            assert not state.ledger.holds, "memory is held by nobody"
            assert not state.ledger.segments, "segments are left"

    def result(self) -> Result:
        seconds = (self.ends - self.began) / SECOND
        elapsed = (self.last_answer - self.began) / SECOND
        for result in self._results.values():
            result.seconds = seconds
            result.elapsed_s = max(elapsed, seconds)
        cache = self.core.state.cache
        return Result(
            self._results, seconds, self._turns, self.owed, self.digest.text(), self._log, cache.hits, cache.misses
        )


def _check_calls(models: tuple[SimModel, ...]) -> None:
    known = {model.policy.name for model in models}
    for model in models:
        name = model.policy.name
        lacking = [called for called in model.calls if called not in known]
        if lacking:
            raise InvalidRequest(f"model '{name}' calls '{lacking[0]}', which the plan does not have")
        if model.calls and (model.policy.steps is not None or model.policy.decoupled or model.runs > 1):
            raise InvalidRequest(f"model '{name}' cannot call others here: it does not answer once, by itself")
