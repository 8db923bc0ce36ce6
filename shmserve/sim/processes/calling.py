"""A simulated model that calls other models for each request of a batch, before it computes.

It returns response memory immediately, and the batch continues when all calls have been answered.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from shmserve.protocol.messages import OWNER_SHIFT, Fail, FailHeld, Failure, Map, Options, Part, Released, Reply, Return
from shmserve.protocol.worker_messages import Call, Work
from shmserve.sim.plan import SimModel, may_stream
from shmserve.sim.processes.tensors import SEGMENT_BYTES, SimInputs
from shmserve.sim.world import World

ANSWERS = frozenset((Reply, Part, Fail, FailHeld, Released))
_OWN = 1 << 20
"""Lower half of the segment number for its inputs to calls, far above those of its outputs."""
_ENOUGH = 1 << 20
"""Response window for decoupled models, large enough never to matter."""


class SimCalls:
    """`models`: the models that it calls, one after another."""

    def __init__(self, world: World, peer: int, models: list[SimModel], draws: Random) -> None:
        self._world = world
        self._peer = peer
        self._models = models
        self._draws = draws
        self._inputs = [SimInputs(model.policy, 1) for model in models]
        self._segment = (peer << OWNER_SHIFT) + _OWN
        self._announced = False
        self._last = 0
        self._step = 0
        self._works: list[Work] = []
        self._open: dict[int, int] = {}
        """Call -> the request for which it is made."""
        self._done: Callable[[], None] = lambda: None
        self.failed: dict[int, Failure] = {}
        """Requests with a failed call."""

    def begin(self, works: list[Work], done: Callable[[], None]) -> None:
        """Starts the calls for these requests. `done` is called after the last response."""
        self._works, self._done, self._step = works, done, 0
        self.failed.clear()
        self._make_calls()

    def _make_calls(self) -> None:
        model, inputs = self._models[self._step], self._inputs[self._step]
        policy = model.policy
        window = _ENOUGH if may_stream(model, self._world.plan.models) else 0
        for work in self._works:
            if work.request in self.failed:
                continue
            self._last = number = self._last + 1
            tensors = inputs.make(1, self._segment, self._draws)
            if not self._announced and any(isinstance(tensor.data, tuple) for tensor in tensors):
                self._announced = True
                self._world.send_from_worker(self._peer, Map(self._segment, SEGMENT_BYTES, None, "internal"))
            options = Options(window=window) if window else None
            if policy.sequence is not None:
                options = Options(window=window, sequence=(self._peer << 32) + number)
                options.sequence_start = options.sequence_end = True
            self._open[number] = work.request
            self._world.send_from_worker(
                self._peer, Call(number, work.request, policy.name, 0, tensors, None, 0, options)
            )
        if not self._open:
            self._done()

    def receive(self, message: Any) -> None:
        kind = type(message)
        if kind is Released:
            return
        if kind is Reply or kind is Part:
            handles = [part for tensor in message.outputs if isinstance(tensor.data, tuple) for part in tensor.data]
            if handles:
                self._world.send_from_worker(self._peer, Return(tuple(handles)))
            if kind is Part and not message.last:
                return
        request = self._open.pop(message.request)
        if kind is Fail or kind is FailHeld:
            self.failed[request] = Failure(message.code, message.text)
        if self._open:
            return
        self._step += 1
        if self._step < len(self._models):
            self._make_calls()
        else:
            self._done()
