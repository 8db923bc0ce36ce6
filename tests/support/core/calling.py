"""Workers whose models call others, and commands of scenario files for them."""

from __future__ import annotations

from typing import Any

from shmserve.protocol.messages import (
    OWNER_SHIFT,
    Ask,
    Cancel,
    Handle,
    More,
    Options,
    Part,
    Reply,
    Return,
    Tensor,
    Wanted,
)
from shmserve.protocol.worker_messages import Call
from tests.support.core.fakes.client import FakeClient
from tests.support.core.fakes.tensors import references
from tests.support.core.fakes.worker import FakeWorker
from tests.support.core.policies import nanoseconds
from tests.support.core.world import World

Event = tuple[int, Any]


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


class Calling(World):
    def _number(self, label: str) -> int:
        """The broker's number of a request that workers have."""
        return next(request.number for request in self.core.state.requests.values() if self._name(request) == label)

    def _name(self, request: Any) -> str:
        raise NotImplementedError

    def do_call(self, name: str, number: str, model: str, *flags: str, **options: str) -> list[Event]:
        """call m_0 1 n parent=a1: m_0, which runs a1, asks model n, as its call 1, and waits; with `aside`, it does not
        wait. at=own, at=parent, at=parent+8, at=reply1: location of the input. Also size= window= timeout= version= and
        place=own."""
        worker = self.worker(name)
        if worker.peer not in self.slow_to:
            worker.read()
        caller = caller_of(worker)
        parent = self._number(options["parent"]) if "parent" in options else 0
        window = int(options.get("window", 0))
        caller.sends(int(number), window)
        worker.waits_for |= set() if "aside" in flags else {int(number)}
        size = int(options.get("size", 4))
        data: Any = self._bytes_of(worker, options["at"], size, parent) if "at" in options else bytes(size)
        policy = next((policy for (known, _), policy in self.policies.items() if known == model), None)
        lead = (1,) if policy is not None and policy.max_batch else ()
        specs = policy.inputs if policy is not None else ()
        inputs = tuple(Tensor(spec.name, spec.dtype, (*lead, size // 4), data) for spec in specs)
        outputs = None
        if "place" in options:
            outputs = (Wanted("y", worker.allocate("internal", 64)),)
        worker.outbox.append(
            Call(
                int(number), parent, model, int(options.get("version", 0)), inputs, outputs,
                nanoseconds(options.get("timeout", "0s")) // 1000, Options(window=window) if window else None,
                "aside" not in flags,
            )
        )  # fmt: skip
        return [] if worker.peer in self.slow_from else self.heard(worker)

    def _bytes_of(self, worker: FakeWorker, text: str, size: int, parent: int) -> tuple[Handle, ...]:
        where, _, offset = text.partition("+")
        if where == "own":
            handle = worker.allocate("internal", size)
            del worker.out[handle]  # no model receives it
            return (handle,)
        if where == "parent":
            whole = references(self.core.state.requests[parent].inputs)[0]
        else:
            whole = references(caller_of(worker).answers[int(where.removeprefix("reply"))].outputs)[0]
        return (Handle(whole.segment, whole.offset + int(offset or 0), size),)

    def do_take_back(self, name: str, number: str) -> list[Event]:
        """The worker cancels its call."""
        worker = self.worker(name)
        worker.outbox.append(Cancel(int(number)))
        return self.heard(worker)

    def do_more_of(self, name: str, number: str, count: str) -> list[Event]:
        worker = self.worker(name)
        caller_of(worker).windows[int(number)] += int(count)
        worker.outbox.append(More(int(number), int(count)))
        return self.heard(worker)

    def do_give_back(self, name: str, number: str) -> list[Event]:
        """The worker returns the handles in the answer to its call."""
        worker, caller = self.worker(name), caller_of(self.worker(name))
        answers = caller.parts.get(int(number)) or [caller.answers[int(number)]]
        handles = tuple(handle for answer in answers for handle in references(answer.outputs))
        for handle in handles:
            if caller.holds[handle]:
                caller.give_back(handle)
        worker.outbox.append(Return(handles))
        return self.heard(worker)

    def do_pass_on(self, name: str, output: str, number: str, size: str = "") -> None:
        """The next batch passes on the answer to the call as this output: all of it, or its last bytes."""
        worker = self.worker(name)
        handle = references(caller_of(worker).answers[int(number)].outputs)[0]
        if size:
            handle = Handle(handle.segment, handle.offset + handle.size - int(size), int(size))
        worker.passes[output] = handle

    def do_wants(self, name: str, what: str, model: str = "") -> list[Event]:
        """The worker sends the server a query."""
        worker = self.worker(name)
        number = 1000 + len(caller_of(worker).open)
        caller_of(worker).sends(number)
        worker.outbox.append(Ask(number, what, model))
        return self.heard(worker)
