"""The commands of scenario files."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any

from shmserve.core import events
from shmserve.core.policy import MemoryEstimate, ModelPolicy
from shmserve.core.stats.statistics import FailureKind
from shmserve.protocol.messages import (
    PROTOCOL,
    Ask,
    Bye,
    Cancel,
    Handle,
    Hello,
    Infer,
    Map,
    Options,
    Ping,
    Return,
    Tensor,
    Unmap,
    Wanted,
)
from shmserve.protocol.roles import ALL_ROLES, FORWARD, ROLES
from shmserve.protocol.worker_messages import Done, Row, Rows, Started, Streamed, Withdrawn
from tests.support.core.calling import Calling
from tests.support.core.fakes.client import FakeClient
from tests.support.core.fakes.tensors import references
from tests.support.core.policies import nanoseconds, policy_of, resource_of
from tests.support.core.scenarios.leasing import Leasing
from tests.support.core.scenarios.operating import Operating
from tests.support.core.scenarios.streaming import Streaming
from tests.support.core.scenarios.transcript import clock
from tests.support.core.world import START

Event = tuple[int, Any]


def size(text: str) -> int:
    """40m is 40 MB."""
    return int(text.removesuffix("m")) * 10**6


def sequence_id(text: str) -> int | str:
    """A number if it is one, else a string."""
    return int(text) if text.lstrip("-").isdigit() else text


def _counts(pairs: Iterable[tuple[object, int]]) -> str:
    return ", ".join(f"{name} {count}" for name, count in pairs if count) or "none"


class Scenario(Operating, Streaming, Leasing, Calling):
    """A world that understands commands, and describes in `lines` what the core does."""

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
            self.gpus[name] = tuple(map(int, options["gpu"].split(",")))
        if "resources" in options:
            self.resources[name] = tuple(resource_of(text) for text in options["resources"].split(","))
        self.turns[name] = int(options.get("turn", 1))
        if "scale" in options:
            self.scale(name, options["scale"])
        before = len(self.lines)
        self.deploy(policy, int(options.get("instances", 1)), options.get("large", ""), "unloaded" not in flags)
        if "unloaded" not in flags:  # keeps the start of workers out of the scenarios' output
            del self.lines[before:]

    def do_measure(self, name: str, host: str = "0", peak: str = "0", gpu: str = "0") -> list[Event]:
        """measure m_0 host=40m: the memory of its process."""
        return [(0, events.Measured(self.worker(name).peer, size(host), max(size(peak), size(host)), size(gpu)))]

    def do_use(self, name: str) -> None:
        self.model = name

    def do_client(
        self, *names: str, plane: str = "lane", outputs: str = "", audience: str = "uid:1000", roles: str = ""
    ) -> None:
        """client a b leases: clients that accept leases. `keeps`: they keep inputs for shadows. `forwards`: they
        speak for callers. roles=infer: without other roles."""
        flags = [name for name in names if name in ("leases", "keeps", "forwards")]
        granted = ALL_ROLES | (FORWARD if "forwards" in flags else 0)
        for name in names:
            if name not in flags:
                self.named[name] = self.connect(
                    name,
                    plane,
                    outputs,
                    audience,
                    ROLES[roles] if roles else granted,
                    "leases" in flags,
                    "keeps" in flags,
                )

    def do_infer(self, client: str, first: str, *flags: str, **options: str) -> list[Event]:
        """infer a 1 or infer a 1-5: requests of client a, with rows= shape= x= (the shape of x) fill= (each byte)
        without= at= payer= and so on, or with sequence=7, and with the flags `start` and `end`."""
        start, _, end = first.partition("-")
        options |= dict.fromkeys(flags, "yes")
        return [self._infer(self.named[client], number, options) for number in range(int(start), int(end or start) + 1)]

    def _infer(self, client: FakeClient, number: int, options: dict[str, str]) -> Event:
        message = self.make_infer(client, number, options)
        if number not in client.open and number:
            client.sends(number, message.options.window if message.options is not None else 0)
        if "frame" in options:
            return client.peer, events.Framed(message, tuple(references(message.inputs)))
        return client.peer, message

    def make_infer(self, client: FakeClient, number: int, options: dict[str, str]) -> Infer:
        model = options.get("model", self.model)
        versions = [policy for (name, _), policy in self.policies.items() if name == model.partition("@")[0]]
        inputs = [] if not versions else self._inputs(client, versions[0], options)
        given = Options(
            priority=int(options.get("priority", 0)),
            queue_timeout_us=nanoseconds(options.get("queue_timeout", "0s")) // 1000,
            sequence=sequence_id(options.get("sequence", "0")),
            sequence_start="start" in options,
            sequence_end="end" in options,
            window=int(options.get("window", 0)),
            caller=options.get("caller", ""),
        )
        outputs = None
        if "outputs" in options:
            outputs = tuple(self._wanted(text) for text in options["outputs"].split(","))
        timeout = nanoseconds(options.get("timeout", "0s")) // 1000
        version = int(options.get("version", 0))
        sent = given if given != Options() else None
        return Infer(number, model, version, tuple(inputs), outputs, timeout, sent, options.get("payer", ""))

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
            fill = int(options.get("fill", 0)) if spec.dtype != "BOOL" else options.get(spec.name) == "true"
            data: Any = bytes([fill]) * size
            if "at" in options:
                data = (self._place(client, options["at"], size),)
            tensors.append(Tensor(spec.name, spec.dtype, shape, data))
        return tensors

    def _place(self, client: FakeClient, text: str, size: int) -> Handle:
        """The handle for a client's text: `s` or `s+64` in its segment s; `reply 3` is the answer to request 3."""
        if text.startswith("reply"):
            number = int(text.removeprefix("reply"))
            return references(client.answers[number].outputs)[0]
        name, _, offset = text.partition("+")
        segment = self.segments[name].segment if name in self.segments else int(name)
        return Handle(segment, int(offset or 0), size)

    def do_cancel(self, client: str, number: str) -> list[Event]:
        return [(self.named[client].peer, Cancel(int(number)))]

    def do_gone(self, client: str) -> list[Event]:
        self.named[client].leave()
        return [(0, events.Closed(self.named[client].peer))]

    def do_ping(self, client: str, number: str) -> list[Event]:
        return [(self.named[client].peer, Ping(int(number)))]

    def do_ask(self, client: str, numbers: str, what: str, model: str = "") -> list[Event]:
        """ask a 1-9 metrics: queries of client a."""
        first, _, last = numbers.partition("-")
        who, asked = self.named[client], range(int(first), int(last or first) + 1)
        for number in asked:
            if number not in who.open:
                who.sends(number)
        return [(who.peer, Ask(number, what, model)) for number in asked]

    def do_answered(self, client: str, number: str) -> list[Event]:
        """The broker has answered this query."""
        self.named[client].open.remove(int(number))
        return [(0, events.Answered(self.named[client].peer, int(number)))]

    def do_behind(self, client: str, *flags: str) -> list[Event]:
        """behind a: much of what was sent to the client is unread; `no more`: it has caught up."""
        return [(0, events.Behind(self.named[client].peer, "no" not in flags))]

    def do_garbled(self, client: str, number: str = "0", count: str = "1") -> list[Event]:
        """Messages that cannot be read, with the number of a request if that can be read."""
        if int(number):
            self.named[client].open.add(int(number))
        return [(self.named[client].peer, events.Garbled(int(number), "no message"))] * int(count)

    def do_bye(self, client: str) -> list[Event]:
        return [(self.named[client].peer, Bye())]

    def do_hello(self, client: str) -> list[Event]:
        """A second one."""
        return [(self.named[client].peer, Hello(PROTOCOL, 1, client, "memfd"))]

    def do_turn(self) -> None:
        """A turn that is due at once."""
        if self.core.deadline() == self.now:
            self._carry_out(self.core.tick(self.now))
        else:
            self.line("no turn is due")

    def do_segment(self, client: str, name: str, size: str, *flags: str, **options: str) -> list[Event]:
        """segment a s 4096; `named`: shared memory that others may open by its name, or as called=."""
        owner = self.named[client]
        message = self.own_segment(owner, int(size))
        if "named" in flags:
            message.name = f"/{name}"
        if "called" in options:
            message.name = options["called"].encode().decode("unicode_escape")
        self.segments[name] = message
        self.segment_names[message.segment] = name
        return [(owner.peer, message)]

    def do_unmap(self, client: str, name: str) -> list[Event]:
        return [(self.named[client].peer, Unmap(self.segments[name].segment))]

    def do_return(self, client: str, number: str) -> list[Event]:
        """The client returns the answer to request `number`."""
        who = self.named[client]
        answers = who.parts.get(int(number)) or [who.answers[int(number)]]
        handles = tuple(handle for answer in answers for handle in references(answer.outputs))
        for handle in handles:
            if who.holds[handle]:
                who.give_back(handle)
        return [(who.peer, Return(handles))]

    def do_done(self, name: str, took: str = "0s", rows: str = "0", error: str = "", **says: str) -> list[Event]:
        """done m_0, after took= with error= or with rows= reported before; flag=true y=[2,3] z=none: its outputs;
        again=a1: a request to run again."""
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

    def do_alias(self, *names: str) -> None:
        """alias m_0: from now on, it returns inputs as outputs without copying them, where that is permitted."""
        for name in names:
            self.worker(name).aliasing = True

    def do_forge(self, name: str) -> None:
        """The next output of m_0 is behind its input, in memory that it did not receive."""
        worker = self.worker(name)
        assert worker.running is not None
        (handle,) = references(worker.running.work_items[0].inputs)
        worker.passes["y"] = Handle(handle.segment, handle.offset + handle.size, handle.size)

    def do_slow(self, name: str, *ways: str) -> None:
        """slow m_0 to, slow m_0 from: messages in that direction wait until `deliver`."""
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
        """Both directions are fast again."""
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
        from shmserve.protocol.worker_messages import LoadFailed

        return [(self.worker(name).peer, LoadFailed("MODEL_FAILED", text))]

    def do_say(self, name: str, what: str, number: str = "0") -> list[Event]:
        """A worker sends an invalid message."""
        said: dict[str, Any] = {
            "started": Started(int(number), int(number)),
            "done": Done(int(number), (), (0, 0, 0, 0)),
            "rows": Rows(int(number), ()),
            "part": Streamed((Row(int(number), ()),)),
            "withdrawn": Withdrawn((int(number),)),
        }
        return [(self.worker(name).peer, said[what])]

    def do_forget(self, name: str, client: str, number: str) -> None:
        """The worker loses a running request."""
        running = self.worker(name).running
        assert running is not None
        lost = self.named[client].peer, int(number)
        requests = self.core.state.requests
        running.work_items = [
            work
            for work in running.work_items
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
        """Shows the model's counters, or the current state."""
        failed = self.core.state.models[self.model].failed
        if "change" in what:
            self.line(
                f"the last change failed at {clock(failed.at - START)}: {failed.reason}" if failed else "all well"
            )
        if "loads" in what:
            loads = self.core.state.models[self.model].loads
            self.line(f"loads done {loads.done}, failed {loads.failed}")
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
            if "failures" in what:
                kinds = [kind.name.lower() for kind in FailureKind]
                refused = _counts(self.core.state.observers.refusals.items())
                self.line(f"failures {_counts(zip(kinds, counted.failures, strict=True))}; refused {refused}")
            if "batches" in what:
                self.line(f"batches by rows: {_counts((rows, one.count) for rows, one in counted.batches.items())}")
            if "restarts" in what:
                self.line(f"restarts {_counts(counted.restarts.items())}")
            if "cache" in what:
                self.line(f"cache hits {counted.cache_hits}, misses {counted.cache_misses}")
            if "sequences" in what:
                self.sequences(version)
            if "leases" in what:
                names = " ".join(self.leased_workers[lease] for lease in self.core.state.leases)
                idle = " ".join(sorted(map(self._name_of, version.idle)))
                self.line(f"leased: {names or 'none'}; idle: {idle or 'none'}")
            if "comparisons" in what:
                counts = self.core.state.models[self.model].comparisons.get((1, 2), {})
                self.line("compared: " + (", ".join(f"{name} {count}" for name, count in counts.items()) or "none"))
                break
            if "queue" in what:
                waiting = version.service.queue.in_order()
                self.line(f"queue {self._set([request.number for request in waiting])}")
            if "state" in what:
                why = f": {version.reason}" if version.reason else ""
                states = ", ".join(f"{self._name_of(i)} {i.state.value}" for i in version.instances)
                self.line(f"{version.label} {version.state.value}{why}; {states}")
