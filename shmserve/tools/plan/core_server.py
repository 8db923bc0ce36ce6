"""A server of a fleet that runs the product's core with simulated workers, in a separate simulation."""

from __future__ import annotations

from random import Random
from zlib import crc32

from msgspec.structs import replace

from shmserve.core.owners.cache import OVERHEAD
from shmserve.protocol.messages import Infer
from shmserve.sim.load import AUDIENCE
from shmserve.sim.plan import Plan
from shmserve.sim.processes.clients import SimClient, SimRequest
from shmserve.sim.processes.tensors import SimInputs, size_of
from shmserve.sim.results import SECOND, ModelResult
from shmserve.sim.run import Simulation
from shmserve.tools.plan.plan import FleetPlan
from shmserve.tools.plan.server import FOREVER, Answered, Flight

CLIENTS = 4
"""Connections over which a server receives its requests."""
SETTLED = 2 * SECOND
"""Time in the server's simulation at which it enters the fleet: its model is deployed, and its clients are connected.
"""


class _Request(SimRequest, kw_only=True):
    flight: Flight


class CoreServer:
    """`began`: fleet time at which the server starts. All servers of a fleet share the model of `plan`."""

    closed = False
    audience = AUDIENCE

    def __init__(self, plan: FleetPlan, name: str, began: int, answered: Answered) -> None:
        policy = plan.model.policy
        self._simulation = simulation = Simulation(server_plan(plan, name))
        simulation.deploy()
        self._world = simulation.world
        self._offset = SETTLED - began
        self._answered = answered
        self._model = policy.name
        self._timeout_us = plan.timeout_ns // 1000
        self._inputs = SimInputs(policy, 1)
        self._draws = Random(0)  # never used: requests have fixed rows and lengths
        self._rows = 1 if policy.max_batch else 0
        self.result = ModelResult(policy.name)
        self._clients = [simulation.connect(self) for _ in range(CLIENTS)]
        self._turn = 0
        self._world.advance(SETTLED)

    @property
    def busy_ns(self) -> int:
        return self._simulation.model_result(self._model).busy_ns

    @property
    def hits(self) -> int:
        return self._simulation.core.state.cache.hits

    def submit(self, flight: Flight, at: int) -> None:
        self._turn += 1
        client = self._clients[self._turn % CLIENTS]
        number = client.next_number()
        client.open[number] = _Request(self, at, 0, flight=flight)
        make = self._inputs
        rows = self._rows
        inputs = make.make(rows, client.segment, self._draws) if flight.key < 0 else make.of_key(rows, flight.key)
        message = Infer(number, self._model, 0, inputs, None, self._timeout_us, None)
        self._world.send_from_client(at + self._offset, client.peer, message)

    def advance(self, end: int) -> int:
        following = self._world.advance(end + self._offset)
        return following - self._offset if following < FOREVER else FOREVER

    def answered(self, request: SimRequest, at: int, code: str) -> None:
        assert isinstance(request, _Request)
        self._answered(request.flight, at - self._offset, code)

    def replace(self, dead: SimClient) -> None:
        raise AssertionError("clients of a fleet's server do not die")


def server_plan(plan: FleetPlan, name: str) -> Plan:
    model = plan.model
    limits = Plan((model,)).limits
    if plan.cached:
        model = replace(model, policy=replace(model.policy, cached=True))
        tensors = *model.policy.inputs, *model.policy.outputs
        size = OVERHEAD + sum(size_of(spec.dtype, spec.dims) for spec in tensors)
        limits = replace(limits, cache_bytes=plan.cached * size)
    return Plan((model,), seed=crc32(f"{plan.seed} {name}".encode()), limits=limits)
