"""Lines of text for what the core does: effects, and messages to clients and workers."""

from __future__ import annotations

from typing import Any

from shmserve.core import effects
from shmserve.core.limits import Limits
from shmserve.core.records import Instance, Request, Version
from shmserve.core.state import WORKERS_FROM
from shmserve.protocol import messages
from shmserve.protocol.worker_messages import EndSequences, Execute, Expect, Revoke, Stop, Withdraw
from tests.support.core.calling import caller_of
from tests.support.core.fakes.client import FakeClient
from tests.support.core.fakes.tensors import references
from tests.support.core.fakes.worker import FakeWorker
from tests.support.core.world import START, World


def clock(ns: int) -> str:
    for unit, size in (("s", 10**9), ("ms", 10**6), ("us", 10**3)):
        if ns % size == 0 or (unit == "s" and ns >= size and ns % 10**6 == 0):
            return f"{ns / size:g}{unit}"
    return f"{ns}ns"


def plural(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


class Transcript(World):
    """Invariant: a line depends only on what the core did, never on what the runner knows."""

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__(limits)
        self.lines: list[str] = []
        self.labels: dict[int, str] = {}
        self.named: dict[str, FakeClient] = {}
        self.segments: dict[str, messages.Map] = {}
        self.segment_names: dict[int, str] = {}
        self.leased_workers: dict[int, str] = {}
        """Lease -> the name of its worker."""

    def line(self, text: str) -> None:
        self.lines.append(f"{clock(self.now - START)}: {text}")

    def reply(self, kind: str, label: str, what: str) -> None:
        """Writes consecutive replies on one line."""
        last = self.lines[-1] if self.lines else ""
        if last.startswith(f"{clock(self.now - START)}: {kind} ") and last.endswith(f" {what}"):
            self.lines[-1] = f"{last.removesuffix(what)}{label} {what}"
        else:
            self.line(f"{kind} {label} {what}")

    def tell(self, effect: Any) -> None:
        if isinstance(effect, effects.Send):
            if effect.peer >= WORKERS_FROM:
                self._tell_to_worker(effect.peer, effect.message)
            else:
                self._tell_to_client(self.clients[effect.peer], effect.message)
        elif isinstance(effect, effects.Spawn):
            self.line(f"spawn {self.name_of(effect)}")
        elif isinstance(effect, effects.Kill):
            self.line(f"kill {self.workers[effect.peer].name}: {effect.reason}")
        elif isinstance(effect, effects.Close):
            self.line(f"close {self.clients[effect.peer].name}")
        elif isinstance(effect, effects.Pause):
            self.line(f"pause {self.clients[effect.peer].name} until {clock(effect.until - START)}")
        elif isinstance(effect, effects.Free):
            self.line(f"free {plural(len(effect.handles), 'block')}")
        elif isinstance(effect, effects.Forget):
            self.line(f"forget {self._segment(effect.segment)}")
        elif isinstance(effect, effects.Log):
            self.line(f"log {effect.level}: {effect.text}")
        elif isinstance(effect, effects.Query):
            if isinstance(effect.ask, messages.Ask):
                who = self.clients.get(effect.peer) or caller_of(self.workers[effect.peer])
                self.line(f"query {who.name}{effect.ask.request} {effect.ask.what}")
        elif isinstance(effect, effects.Compose):
            self.line(
                "compose " + " ".join(v.model for v in self.core.state.ensembles if v.compose_number == effect.number)
            )
        elif isinstance(effect, effects.Settled):
            self.line(f"settled {effect.operation}" + (f" {effect.code}: {effect.text}" if effect.code else ""))
        elif isinstance(effect, effects.StartLease):
            name = self.leased_workers[effect.of_client.lease] = self.workers[effect.worker].name
            which = "" if effect.of_client.default else f", for version {effect.of_client.version} only"
            rows = plural(effect.of_client.rows, "row")
            self.line(f"lease {name} to {self.clients[effect.client].name}, up to {rows}{which}")
        elif isinstance(effect, effects.ReadLease):
            last = ", which has ended" if effect.final else ""
            self.line(f"read the log of the lease of {self.leased_workers[effect.lease]}{last}")
        else:
            assert isinstance(effect, effects.Drained)
            self.line("drained")

    def tell_start(self, worker: FakeWorker) -> None:
        self.line(f"{worker.name} starts {self._set(worker.started[-1])}")

    def _set(self, requests: Any, slots: list[int] | None = None) -> str:
        """The requests, with the slots of their sequences, if any."""
        at = [f"@{slot}" if slot >= 0 else "" for slot in slots or [-1] * len(requests)]
        return "{" + " ".join(self._label(number) + slot for number, slot in zip(requests, at, strict=True)) + "}"

    def _label(self, number: int) -> str:
        request = self.core.state.requests.get(number)
        if request is not None:
            self.labels[number] = self._name(request)
        return self.labels[number]

    def _name(self, request: Request) -> str:
        """Steps are named after their ensemble's request: a1.0, and a row of a mapped step a1.0[3]."""
        run = self.core.state.runs.get(request.parent)
        if run is None:
            worker = self.workers.get(request.client.number)
            return f"{worker.name + '#' if worker else request.client.name}{request.client_number}"
        index, row, _ = run.in_flight[request]
        return f"{self._name(run.request)}.{index}" + (f"[{row}]" if run.graph.steps[index].mapped else "")

    def _segment(self, number: int) -> str:
        owner = self.workers.get(number >> 32)
        return self.segment_names.get(number) or f"{owner.name if owner else 'a dead worker'}/{number & 0xFFFFFFFF}"

    def _tell_to_worker(self, peer: int, message: Any) -> None:
        found = self.core.state.instances.get(peer)
        name = self.workers[peer].name
        if isinstance(message, Execute):
            assert found is not None
            instance = found[1]
            batch = next(batch for batch in instance.batches() if message.batch in batch.numbers)
            work_items = self._set(
                [work.request for work in message.work_items], [work.slot for work in message.work_items]
            )
            verb = "extend" if message.join else ("ahead" if message.open else "execute")
            more = ", more follows" if message.more else ""
            total = sum(r.cost for _, piece in batch.pieces for r in piece if r.batch is batch)
            rows = f"to {plural(total, 'row')}" if message.join else plural(total, "row")
            near = sorted({output for work in message.work_items if work.step is not None for output in work.step.near})
            stays = f", {' '.join(near)} on its GPU" if near else ""
            self.line(f"{verb} {name} {work_items} {rows}, {batch.reason.value}{stays}{more}")
        elif isinstance(message, Withdraw):
            self.line(f"withdraw {name} {self._set(message.requests)}")
        elif isinstance(message, messages.Map):
            self.line(f"map {self._segment(message.segment)} to {name}")
        elif isinstance(message, messages.Unmap):
            self.line(f"unmap {self._segment(message.segment)} at {name}")
        elif isinstance(message, messages.Return):
            self.line(f"return {plural(len(message.handles), 'block')} to {name}")
        elif isinstance(message, messages.More):
            self.line(f"more {name} {self._label(message.request)} {message.count}")
        elif isinstance(message, EndSequences):
            self.line(f"end sequence {', '.join(map(str, message.sequences))} at {name}")
        elif isinstance(message, Expect):
            self.line(f"expect of {name} the outputs ({' '.join(tensor.name for tensor in message.outputs)})")
        elif isinstance(message, Revoke):
            self.line(f"revoke the lease of {name}")
        elif isinstance(message, Stop):
            self.line(f"stop {name}")
        else:
            self._tell_to_client(caller_of(self.workers[peer]), message)

    def _tell_to_client(self, client: FakeClient, message: Any) -> None:
        name = client.name
        if isinstance(message, (messages.Reply, messages.Part)):
            handles = references(message.outputs)
            held = f", {plural(len(handles), 'block')}" if handles else ""
            held += " in frames" if held and client.outputs == "frames" else ""
            outputs = " ".join(tensor.name for tensor in message.outputs)
            kind = "reply" if isinstance(message, messages.Reply) else "last" if message.last else "part"
            held += ", inputs held" if isinstance(message, messages.ReplyHeld) else ""
            told = "".join(f", {key} {value}" for key, value in (message.parameters or {}).items())
            self.reply(kind, f"{name}{message.request}", f"({outputs}){held}{told}")
        elif isinstance(message, (messages.Fail, messages.FailHeld)):
            kind = "fail" if isinstance(message, messages.Fail) else "fail, inputs held,"
            self.line(f"{kind} {name}{message.request} {message.code}: {message.text}")
        elif isinstance(message, messages.Released):
            self.line(f"released {name}{message.request}")
        elif isinstance(message, messages.Map):
            self.line(f"map {self._segment(message.segment)} to {name}")
        elif isinstance(message, messages.Unmap):
            self.line(f"unmap {self._segment(message.segment)} at {name}")
        elif isinstance(message, messages.Goodbye):
            self.line(f"goodbye {name} {message.code}: {message.text}")
        elif isinstance(message, messages.Reclaim):
            self.line(f"reclaim {name}")
        elif isinstance(message, messages.LeaseEnd):
            error = f", {message.error.code}: {message.error.text}" if message.error else ""
            self.line(f"lease of {self.leased_workers[message.lease]} ends for {name}{error}")
        elif not isinstance(message, messages.Welcome):
            self.line(f"send {name} {type(message).__name__}")

    def sequences(self, version: Version) -> None:
        assert version.service.sequence_slots is not None
        for sequence in version.service.sequence_slots.all():
            worker = self.workers.get(sequence.instance.peer) if sequence.instance is not None else None
            where = f"slot {sequence.slot} of {worker.name}" if worker is not None else "in the backlog"
            self.line(f"sequence {sequence.id}: {where}, {len(sequence.requests)} wait")

    def _name_of(self, instance: Instance) -> str:
        worker = self.workers.get(instance.peer)
        return worker.name if worker else instance.spec.name
