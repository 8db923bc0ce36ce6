"""Scenario files: conversations with the core, as text. docs/batching.md explains them to readers of the files.

A conversation is stimulus lines, a line `----`, what came out, and an empty line. Lines that begin with # are for
the reader. `server` begins anew; otherwise a conversation goes on where the last one ended. Commands joined by `;`
are one turn. The rule of the file: what is printed is what the core did, never what the runner knows.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from shmserve.core import events
from shmserve.core.effects import Close, Compose, Drained, Forget, Free, Kill, Log, Query, Send, Settled, Spawn
from shmserve.core.limits import ANY_GPU, Limits
from shmserve.core.policy import MemoryEstimate, ModelPolicy
from shmserve.core.records import Instance, Request
from shmserve.core.state import WORKERS_FROM
from shmserve.protocol.messages import (
    Ask,
    Cancel,
    Done,
    EndSequences,
    Execute,
    Fail,
    FailHeld,
    Goodbye,
    Handle,
    Infer,
    Map,
    More,
    Options,
    Part,
    Ping,
    Reclaim,
    Released,
    Reply,
    Return,
    Row,
    Rows,
    Started,
    Stop,
    Streamed,
    Tensor,
    Unmap,
    Wanted,
    Welcome,
    Withdraw,
    Withdrawn,
)
from tests.support.core.calling import Calling, caller_of
from tests.support.core.fakes import FakeClient, FakeWorker, references
from tests.support.core.operating import Operating
from tests.support.core.policies import nanoseconds, policy_of
from tests.support.core.sequencing import sequence_id, told_of_sequences
from tests.support.core.streaming import Streaming
from tests.support.core.world import START

Event = tuple[int, Any]


def clock(ns: int) -> str:
    for unit, size in (("s", 10**9), ("ms", 10**6), ("us", 10**3)):
        if ns % size == 0 or (unit == "s" and ns >= size and ns % 10**6 == 0):
            return f"{ns / size:g}{unit}"
    return f"{ns}ns"


def size(text: str) -> int:
    """40m is 40 MB."""
    return int(text.removesuffix("m")) * 10**6


def plural(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


class Scenario(Operating, Streaming, Calling):
    """A world that understands commands and tells in lines what comes out."""

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__(limits)
        self.lines: list[str] = []
        self.labels: dict[int, str] = {}
        self.named: dict[str, FakeClient] = {}
        self.segments: dict[str, Map] = {}
        self.segment_names: dict[int, str] = {}

    # ------------------------------------------------------------------------------------ what came out

    def line(self, text: str) -> None:
        self.lines.append(f"{clock(self.now - START)}: {text}")

    def reply(self, kind: str, label: str, what: str) -> None:
        """Replies to be sent one after the other are one line."""
        last = self.lines[-1] if self.lines else ""
        if last.startswith(f"{clock(self.now - START)}: {kind} ") and last.endswith(f" {what}"):
            self.lines[-1] = f"{last.removesuffix(what)}{label} {what}"
        else:
            self.line(f"{kind} {label} {what}")

    def tell(self, effect: Any) -> None:
        if isinstance(effect, Send):
            if effect.peer >= WORKERS_FROM:
                self._tell_to_worker(effect.peer, effect.message)
            else:
                self._tell_to_client(self.clients[effect.peer], effect.message)
        elif isinstance(effect, Spawn):
            self.line(f"spawn {self.name_of(effect)}")
        elif isinstance(effect, Kill):
            self.line(f"kill {self.workers[effect.peer].name}: {effect.reason}")
        elif isinstance(effect, Close):
            self.line(f"close {self.clients[effect.peer].name}")
        elif isinstance(effect, Free):
            self.line(f"free {plural(len(effect.handles), 'block')}")
        elif isinstance(effect, Forget):
            self.line(f"forget {self._segment(effect.segment)}")
        elif isinstance(effect, Log):
            self.line(f"log {effect.level}: {effect.text}")
        elif isinstance(effect, Query):
            if isinstance(effect.ask, Ask):
                self.line(f"query {effect.ask.what}")
        elif isinstance(effect, Compose):
            self.line(
                "compose " + " ".join(v.model for v in self.core.state.ensembles if v.compose_number == effect.number)
            )
        elif isinstance(effect, Settled):
            self.line(f"settled {effect.operation}" + (f" {effect.code}: {effect.text}" if effect.code else ""))
        else:
            assert isinstance(effect, Drained)
            self.line("drained")

    def tell_start(self, worker: FakeWorker) -> None:
        self.line(f"{worker.name} starts {self._set(worker.started[-1])}")

    def _set(self, requests: Any, slots: list[int] | None = None) -> str:
        """With the slots of their sequences, where they have any."""
        at = [f"@{slot}" if slot >= 0 else "" for slot in slots or [-1] * len(requests)]
        return "{" + " ".join(self._label(number) + slot for number, slot in zip(requests, at, strict=True)) + "}"

    def _label(self, number: int) -> str:
        request = self.core.state.requests.get(number)
        if request is not None:
            self.labels[number] = self._name(request)
        return self.labels[number]

    def _name(self, request: Request) -> str:
        """Steps are named after their ensemble's request: a1.0, and a row of a mapped step a1.0[3]."""
        run = self.core.state.runs.get(request.step_of)
        if run is None:
            worker = self.workers.get(request.client.number)
            return f"{worker.name + '#' if worker else request.client.name}{request.client_number}"
        index, row, _ = run.spots[request.number]
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
            works = self._set([work.request for work in message.works], [work.slot for work in message.works])
            verb = "extend" if message.join else ("ahead" if message.open else "execute")
            more = ", more follows" if message.more else ""
            total = sum(r.cost for _, piece in batch.pieces for r in piece if r.batch is batch)
            rows = f"to {plural(total, 'row')}" if message.join else plural(total, "row")
            self.line(f"{verb} {name} {works} {rows}, {batch.reason.value}{more}")
        elif isinstance(message, Withdraw):
            self.line(f"withdraw {name} {self._set(message.requests)}")
        elif isinstance(message, Map):
            self.line(f"map {self._segment(message.segment)} to {name}")
        elif isinstance(message, Unmap):
            self.line(f"unmap {self._segment(message.segment)} at {name}")
        elif isinstance(message, Return):
            self.line(f"return {plural(len(message.handles), 'block')} to {name}")
        elif isinstance(message, More):
            self.line(f"more {name} {self._label(message.request)} {message.count}")
        elif isinstance(message, EndSequences):
            self.line(f"end sequence {', '.join(map(str, message.sequences))} at {name}")
        elif isinstance(message, Stop):
            self.line(f"stop {name}")
        else:
            self._tell_to_client(caller_of(self.workers[peer]), message)

    def _tell_to_client(self, client: FakeClient, message: Any) -> None:
        name = client.name
        if isinstance(message, (Reply, Part)):
            handles = references(message.outputs)
            held = f", {plural(len(handles), 'block')}" if handles else ""
            held += " in frames" if held and client.outputs == "frames" else ""
            outputs = " ".join(tensor.name for tensor in message.outputs)
            kind = "reply" if isinstance(message, Reply) else "last" if message.last else "part"
            told = "".join(f", {key} {value}" for key, value in (message.parameters or {}).items())
            self.reply(kind, f"{name}{message.request}", f"({outputs}){held}{told}")
        elif isinstance(message, (Fail, FailHeld)):
            kind = "fail" if isinstance(message, Fail) else "fail, inputs held,"
            self.line(f"{kind} {name}{message.request} {message.code}: {message.text}")
        elif isinstance(message, Released):
            self.line(f"released {name}{message.request}")
        elif isinstance(message, Map):
            self.line(f"map {self._segment(message.segment)} to {name}")
        elif isinstance(message, Unmap):
            self.line(f"unmap {self._segment(message.segment)} at {name}")
        elif isinstance(message, Goodbye):
            self.line(f"goodbye {name} {message.code}: {message.text}")
        elif isinstance(message, Reclaim):
            self.line(f"reclaim {name}")
        elif not isinstance(message, Welcome):
            self.line(f"send {name} {type(message).__name__}")

    # ------------------------------------------------------------------------------------ commands

    def run(self, line: str) -> None:
        happened: list[Event] = []
        words = shlex.split(line)
        if words[0] in ("at", "after"):
            time = nanoseconds(words[1])
            return self.advance(START + time if words[0] == "at" else self.now + time)
        for part in line.split(";"):
            command, *arguments = shlex.split(part)
            options = dict(word.split("=", 1) for word in arguments if "=" in word)
            plain = [word for word in arguments if "=" not in word]
            happened += getattr(self, f"do_{command}")(*plain, **options) or []
        if happened:
            self.turn(happened)
        else:
            self.settle()
        return None

    def do_model(self, name: str, *flags: str, **options: str) -> None:
        """model m max_batch=8 preferred=2,6 delay=10s inputs=x:FP32:[-1] y:... levels=3 timeout=1s ordered ..."""
        policy = policy_of(name, flags, options)
        self.model = name
        if "memory" in options:
            self.sizes[name] = MemoryEstimate(
                size(options["memory"]), size(options.get("on_gpu", "0")), "guess" not in flags
            )
        if "gpu" in options:
            self.gpus[name] = int(options["gpu"])
        if "scale" in options:
            self.scale(name, options["scale"])
        before = len(self.lines)
        self.deploy(policy, int(options.get("instances", 1)), options.get("large", ""), "unloaded" not in flags)
        if "unloaded" not in flags:  # nobody wants to read a hundred times that m_0 was spawned and is ready
            del self.lines[before:]

    def do_measure(self, name: str, host: str = "0", peak: str = "0", gpu: str = "0") -> list[Event]:
        """measure m_0 host=40m: the memory of its process."""
        return [(0, events.Measured(self.worker(name).peer, size(host), max(size(peak), size(host)), size(gpu)))]

    def do_use(self, name: str) -> None:
        self.model = name

    def do_client(self, *names: str, plane: str = "lane", outputs: str = "", audience: str = "uid:1000") -> None:
        for name in names:
            self.named[name] = self.connect(name, plane, outputs, audience)

    def do_infer(self, client: str, first: str, *flags: str, **options: str) -> list[Event]:
        """infer a 1 or infer a 1-5: requests of client a, with rows= shape= x= (the shape of x) without= at= and so on,
        or with sequence=7, and with the flags `start` and `end`."""
        start, _, end = first.partition("-")
        options |= dict.fromkeys(flags, "yes")
        return [self._infer(self.named[client], number, options) for number in range(int(start), int(end or start) + 1)]

    def _infer(self, client: FakeClient, number: int, options: dict[str, str]) -> Event:
        model = options.get("model", self.model)
        versions = [policy for (name, _), policy in self.policies.items() if name == model]
        inputs = [] if not versions else self._inputs(client, versions[0], options)
        given = Options(
            priority=int(options.get("priority", 0)),
            queue_timeout_us=nanoseconds(options.get("queue_timeout", "0s")) // 1000,
            sequence=sequence_id(options.get("sequence", "0")),
            sequence_start="start" in options,
            sequence_end="end" in options,
            window=int(options.get("window", 0)),
        )
        outputs = None
        if "outputs" in options:
            outputs = tuple(self._wanted(text) for text in options["outputs"].split(","))
        timeout = nanoseconds(options.get("timeout", "0s")) // 1000
        if number not in client.open and number:
            client.sends(number, given.window)
        version = int(options.get("version", 0))
        message = Infer(number, model, version, tuple(inputs), outputs, timeout, given if given != Options() else None)
        if "frame" in options:
            return client.peer, events.Framed(message, tuple(references(message.inputs)))
        return client.peer, message

    def _wanted(self, text: str) -> Wanted:
        name, _, place = text.partition("@")
        return Wanted(name, Handle(self.segments[place].segment, 0, 64) if place else None)

    def _inputs(self, client: FakeClient, policy: ModelPolicy, options: dict[str, str]) -> list[Tensor]:
        rows = int(options.get("rows", 1))
        tail = [int(dim) for dim in options.get("shape", "1").split(",")]
        leave_out = options.get("without", "").split(",")
        tensors = []
        for spec in policy.inputs:
            if spec.name in leave_out:
                continue
            given = options.get(spec.name, "") if spec.dtype != "BOOL" else ""
            own = [int(dim) for dim in given.split(",")] if given else tail
            dims = [own[min(i, len(own) - 1)] if dim == -1 else dim for i, dim in enumerate(spec.dims)]
            shape = (rows, *dims) if policy.max_batch else tuple(dims)
            size = 1 if spec.dtype == "BOOL" else 4
            for dim in shape:
                size *= dim
            data: Any = bytes([options.get(spec.name) == "true"]) * size
            if "at" in options:
                data = (self._place(client, options["at"], size),)
            tensors.append(Tensor(spec.name, spec.dtype, shape, data))
        return tensors

    def _place(self, client: FakeClient, text: str, size: int) -> Handle:
        """A place that a client names: `s` or `s+64` in its segment s; `reply 3` what request 3 was answered with."""
        if text.startswith("reply"):
            number = int(text.removeprefix("reply"))
            return references(client.answers[number].outputs)[0]
        name, _, offset = text.partition("+")
        segment = self.segments[name].segment if name in self.segments else int(name)
        return Handle(segment, int(offset or 0), size)

    def do_cancel(self, client: str, number: str) -> list[Event]:
        return [(self.named[client].peer, Cancel(int(number)))]

    def do_gone(self, client: str) -> list[Event]:
        return [(0, events.Closed(self.named[client].peer))]

    def do_ping(self, client: str, number: str) -> list[Event]:
        return [(self.named[client].peer, Ping(int(number)))]

    def do_segment(self, client: str, name: str, size: str) -> list[Event]:
        owner = self.named[client]
        message = self.own_segment(owner, int(size))
        self.segments[name] = message
        self.segment_names[message.segment] = name
        return [(owner.peer, message)]

    def do_unmap(self, client: str, name: str) -> list[Event]:
        return [(self.named[client].peer, Unmap(self.segments[name].segment))]

    def do_return(self, client: str, number: str) -> list[Event]:
        """The client gives back what request `number` was answered with."""
        who = self.named[client]
        answers = who.parts.get(int(number)) or [who.answers[int(number)]]
        handles = tuple(handle for answer in answers for handle in references(answer.outputs))
        for handle in handles:
            if who.holds[handle]:
                who.give_back(handle)
        return [(who.peer, Return(handles))]

    def do_done(self, name: str, took: str = "0s", rows: str = "0", error: str = "", **says: str) -> list[Event]:
        """done m_0, after took= with error= or with rows= told before; flag=true y=[2,3] z=none: what it makes;
        again=a1: what it wants to run once more."""
        worker = self.worker(name)
        code, _, text = error.partition(":")
        if worker.peer not in self.slow_to:
            worker.read()
        again = says.pop("again", "").split(",")
        worker.again = [number for number in worker.started[-1] if self._label(number) in again]
        worker.says = says
        worker.finish(self.now, nanoseconds(took), int(rows), (code, text) if error else None)
        done = worker.outbox[-1]
        if done.next:
            self.tell_start(worker)
        return [] if worker.peer in self.slow_from else self.heard(worker)

    def do_slow(self, name: str, *ways: str) -> None:
        """slow m_0 to, slow m_0 from: what is sent on that way waits until `deliver`."""
        peer = self.worker(name).peer
        self.slow_to |= {peer} if "to" in ways else set()
        self.slow_from |= {peer} if "from" in ways else set()

    def do_deliver(self, way: str, name: str, *flags: str, count: str = "") -> list[Event]:
        """deliver to m_0: the worker reads now; deliver from m_0: the broker does. count=1: only the first message."""
        worker = self.worker(name)
        some = int(count) if count else None
        if way == "to":
            worker.read(some)
            self.let_start(worker)
            return []
        return self.heard(worker, some)

    def do_quick(self, name: str) -> None:
        """Both ways are as fast as light again."""
        peer = self.worker(name).peer
        self.slow_to.discard(peer)
        self.slow_from.discard(peer)
        self.let_start(self.worker(name))

    def do_loaded(self, name: str) -> list[Event]:
        worker = self.worker(name)
        return [(worker.peer, events.Compiled(worker.policy))]

    def do_crash(self, name: str, reason: str = "signal SIGSEGV", loading_error: str = "") -> None:
        self.crash(self.worker(name), reason, loading_error)

    def do_load_failed(self, name: str, text: str) -> list[Event]:
        from shmserve.protocol.messages import LoadFailed

        return [(self.worker(name).peer, LoadFailed("MODEL_FAILED", text))]

    def do_say(self, name: str, what: str, number: str = "0") -> list[Event]:
        """A worker says something that it should not."""
        said: dict[str, Any] = {
            "started": Started(int(number), int(number)),
            "done": Done(int(number), (), (0, 0, 0, 0)),
            "rows": Rows(int(number), ()),
            "part": Streamed((Row(int(number), ()),)),
            "withdrawn": Withdrawn((int(number),)),
        }
        return [(self.worker(name).peer, said[what])]

    def do_forget(self, name: str, client: str, number: str) -> None:
        """The worker loses a request of what it runs."""
        running = self.worker(name).running
        assert running is not None
        lost = self.named[client].peer, int(number)
        requests = self.core.state.requests
        running.works = [
            work
            for work in running.works
            if (requests[work.request].client.number, requests[work.request].client_number) != lost
        ]

    def do_own_segment(self) -> list[Event]:
        """The broker's own arena."""
        message = Map(1, 1 << 20)
        self.segments["broker"], self.segment_names[1] = message, "broker"
        return [(0, events.OwnSegment(message))]

    def do_drain(self, limit: str) -> list[Event]:
        return [(0, events.Drain(nanoseconds(limit)))]

    def do_show(self, *what: str) -> None:
        """What is counted of the model, or where everything stands."""
        failed = self.core.state.models[self.model].failed
        if "change" in what:
            self.line(
                f"the last change failed at {clock(failed.at - START)}: {failed.reason}" if failed else "all well"
            )
        for version in self.core.state.models[self.model].generations():
            counted = version.statistics
            if "reasons" in what:
                reasons = sorted((reason.value, count) for reason, count in counted.reasons.items())
                self.line("reasons " + ", ".join(f"{name} {count}" for name, count in reasons))
            if "counts" in what:
                self.line(
                    f"executions {counted.execution_count}, inferences {counted.inference_count}, "
                    f"succeeded {counted.success_count}, failed {counted.fail_count}, rejected {counted.rejected}, "
                    f"cancelled {counted.cancelled}, queued {clock(counted.queue_ns)} in all"
                )
            if "sequences" in what:
                self.lines += [f"{clock(self.now - START)}: {line}" for line in told_of_sequences(self, version)]
            if "queue" in what:
                waiting = version.queue.in_order()
                self.line(f"queue {self._set([request.number for request in waiting])}")
            if "state" in what:
                why = f": {version.reason}" if version.reason else ""
                states = ", ".join(f"{self._name_of(i)} {i.state.value}" for i in version.instances)
                self.line(f"{version.label} {version.state.value}{why}; {states}")

    def _name_of(self, instance: Instance) -> str:
        worker = self.workers.get(instance.peer)
        return worker.name if worker else instance.spec.name


# ------------------------------------------------------------------------------------------------ the files


def _server(line: str) -> Scenario:
    words = dict(word.split("=", 1) for word in line.split()[1:])
    gpus = words.pop("gpu_budget", "")
    values: dict[str, Any] = {
        key: nanoseconds(value) if value[-1] == "s" else size(value) if value[-1] == "m" else int(value)
        for key, value in words.items()
    }
    if gpus:
        values["gpu_budgets"] = ((ANY_GPU, size(gpus)),)
    return Scenario(Limits(**values))


def play(path: Path) -> tuple[str, str]:
    """The text of the file, and the text as it should be: with what really came out."""
    text = path.read_text()
    played: list[str] = []
    scenario = Scenario()
    expected = False
    for number, line in enumerate(text.splitlines(), 1):
        if expected:
            expected = line != ""
            if expected:
                continue
        if line == "----":
            played += [line, *scenario.lines]
            scenario.lines.clear()
            expected = True
            continue
        played.append(line)
        if line.startswith("#") or not line:
            continue
        try:
            if line.split()[0] == "server":
                scenario = _server(line)
            else:
                scenario.run(line)
        except Exception as error:
            raise AssertionError(f"{path.name}:{number}: {line}\n{type(error).__name__}: {error}") from error
    return text, "\n".join(played) + "\n"
