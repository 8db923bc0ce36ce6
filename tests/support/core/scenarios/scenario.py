"""The commands of scenario files."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from shmserve.core import events
from shmserve.core.models import scaling
from shmserve.core.policy import InstanceSpec, MemoryEstimate, ModelPolicy
from shmserve.core.stats.statistics import FailureKind
from shmserve.protocol import messages, worker_messages
from shmserve.protocol.roles import ALL_ROLES, FORWARD, ROLES
from tests.support.core.calling import caller_of
from tests.support.core.fakes.client import FakeClient
from tests.support.core.fakes.lease import FakeLease
from tests.support.core.fakes.tensors import references
from tests.support.core.fakes.worker import FakeWorker
from tests.support.core.policies import nanoseconds, policy_of, resource_of, scaling_of, step_of
from tests.support.core.scenarios.transcript import Transcript, clock
from tests.support.core.world import START

Event = tuple[int, Any]


def size(text: str) -> int:
    """40m is 40 MB."""
    return int(text.removesuffix("m")) * 10**6


def sequence_id(text: str) -> int | str:
    """A number if it is one, else a string."""
    return int(text) if text.lstrip("-").isdigit() else text


def numbers(text: str) -> range:
    """1-5, or 3 alone."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def failure_of(text: str) -> tuple[str, str] | None:
    """CODE:text of an error, if any."""
    code, _, said = text.partition(":")
    return (code, said) if text else None


def given_back(client: FakeClient, number: int) -> messages.Return:
    """The message with which a client returns the answer to a request."""
    answers = client.parts.get(number) or [client.answers[number]]
    handles = tuple(handle for answer in answers for handle in references(answer.outputs))
    for handle in handles:
        if client.holds[handle]:
            client.give_back(handle)
    return messages.Return(handles)


def _counts(pairs: Iterable[tuple[object, int]]) -> str:
    return ", ".join(f"{name} {count}" for name, count in pairs if count) or "none"


class Scenario(Transcript):
    """A world that understands commands, and describes in `lines` what the core does."""

    model = ""
    """The model that commands mean unless they name another one."""

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
        """model m max_batch=8 preferred=2,6 delay=10s inputs=x:FP32:[-1] y:... scale=1-3,up=50ms ordered ..."""
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
            bounds, *delays = options["scale"].split(",")
            self.do_scale(name, bounds, **dict(delay.split("=") for delay in delays))
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
        options |= dict.fromkeys(flags, "yes")
        return [self._infer(self.named[client], number, options) for number in numbers(first)]

    def _infer(self, client: FakeClient, number: int, options: dict[str, str]) -> Event:
        message = self.make_infer(client, number, options)
        if number not in client.open and number:
            client.sends(number, message.options.window if message.options is not None else 0)
        if "frame" in options:
            return client.peer, events.Framed(message, tuple(references(message.inputs)))
        return client.peer, message

    def make_infer(self, client: FakeClient, number: int, options: dict[str, str]) -> messages.Infer:
        model = options.get("model", self.model)
        versions = [policy for (name, _), policy in self.policies.items() if name == model.partition("@")[0]]
        inputs = [] if not versions else self._inputs(client, versions[0], options)
        given = messages.Options(
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
        sent = given if given != messages.Options() else None
        return messages.Infer(number, model, version, tuple(inputs), outputs, timeout, sent, options.get("payer", ""))

    def _wanted(self, text: str) -> messages.Wanted:
        name, _, place = text.partition("@")
        return messages.Wanted(name, messages.Handle(self.segments[place].segment, 0, 64) if place else None)

    def _inputs(self, client: FakeClient, policy: ModelPolicy, options: dict[str, str]) -> list[messages.Tensor]:
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
            tensors.append(messages.Tensor(spec.name, spec.dtype, shape, data))
        return tensors

    def _place(self, client: FakeClient, text: str, size: int) -> messages.Handle:
        """The handle for a client's text: `s` or `s+64` in its segment s; `reply 3` is the answer to request 3."""
        if text.startswith("reply"):
            number = int(text.removeprefix("reply"))
            return references(client.answers[number].outputs)[0]
        name, _, offset = text.partition("+")
        segment = self.segments[name].segment if name in self.segments else int(name)
        return messages.Handle(segment, int(offset or 0), size)

    def do_cancel(self, client: str, number: str) -> list[Event]:
        return [(self.named[client].peer, messages.Cancel(int(number)))]

    def do_gone(self, client: str) -> list[Event]:
        self.named[client].leave()
        return [(0, events.Closed(self.named[client].peer))]

    def do_ask(self, client: str, asked: str, what: str, model: str = "") -> list[Event]:
        """ask a 1-9 metrics: queries of client a."""
        who = self.named[client]
        for number in numbers(asked):
            if number not in who.open:
                who.sends(number)
        return [(who.peer, messages.Ask(number, what, model)) for number in numbers(asked)]

    def do_answered(self, client: str, number: str) -> list[Event]:
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
        return [(self.named[client].peer, messages.Bye())]

    def do_hello(self, client: str) -> list[Event]:
        """A second one."""
        return [(self.named[client].peer, messages.Hello(messages.PROTOCOL, 1, client, "memfd"))]

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
        return [(self.named[client].peer, messages.Unmap(self.segments[name].segment))]

    def do_return(self, client: str, number: str) -> list[Event]:
        """The client returns the answer to request `number`."""
        who = self.named[client]
        return [(who.peer, given_back(who, int(number)))]

    def do_done(self, name: str, took: str = "0s", rows: str = "0", error: str = "", **says: str) -> list[Event]:
        """done m_0, after took= with error= or with rows= reported before; flag=true y=[2,3] z=none: its outputs;
        again=a1: a request to run again."""
        worker = self.worker(name)
        if worker.peer not in self.slow_to:
            worker.read()
        again = says.pop("again", "").split(",")
        worker.again = [number for number in worker.started[-1] if self._label(number) in again]
        worker.says = says
        worker.finish(self.now, nanoseconds(took), int(rows), failure_of(error))
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
        worker.passes["y"] = messages.Handle(handle.segment, handle.offset + handle.size, handle.size)

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
        return [(self.worker(name).peer, worker_messages.LoadFailed("MODEL_FAILED", text))]

    def do_say(self, name: str, what: str, number: str = "0") -> list[Event]:
        """A worker sends an invalid message."""
        said: dict[str, Any] = {
            "started": worker_messages.Started(int(number), int(number)),
            "done": worker_messages.Done(int(number), (), (0, 0, 0, 0)),
            "rows": worker_messages.Rows(int(number), ()),
            "part": worker_messages.Streamed((worker_messages.Row(int(number), ()),)),
            "withdrawn": worker_messages.Withdrawn((int(number),)),
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
        message = messages.Map(1, 1 << 20)
        self.segments["broker"], self.segment_names[1] = message, "broker"
        return [(0, events.OwnSegment(message))]

    def do_drain(self, limit: str) -> list[Event]:
        return [(0, events.Drain(nanoseconds(limit)))]

    def do_show(self, *what: str) -> None:
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

    # ------------------------------------------------------------------------------------ models

    def do_scale(self, name: str, bounds: str, up: str = "50ms", down: str = "2s") -> None:
        """scale m 1-3 up=50ms down=2s: the number of instances in the next deploy."""
        self.scalings[name] = scaling_of(name, bounds, up, down)

    def do_by_hand(self, name: str) -> None:
        """From now on, the model's workers do not load by themselves."""
        self.loads_itself[name] = False

    def do_gpu(self, number: str, reason: str = "") -> list[Event]:
        """gpu 1 "GPU 1 is broken": no instance may run on it. Without a reason: it is healthy again."""
        return [(0, events.DeviceHealth(int(number), reason))]

    def do_deploy(self, name: str, *versions: str, op: str = "0", present: str = "") -> list[Event]:
        """deploy m 1:7x2 3:8 op=1: version 1 of source 7 with 2 instances, version 3 of source 8 with one. `fresh`:
        also load what is already served. `unloaded`: the workers do not load by themselves. `present=1,3`: the versions
        in the repository, if they are known."""
        flags = [word for word in versions if ":" not in word]
        targets = tuple(self._target(name, word) for word in versions if ":" in word)
        self.loads_itself[name] = "unloaded" not in flags
        known = tuple(map(int, present.split(","))) if present else None
        return [(0, events.Deploy(name, targets, int(op), "fresh" in flags, known))]

    def _target(self, name: str, word: str) -> events.Target:
        number, _, what = word.partition(":")
        source, _, instances = what.partition("x")
        known = next(policy for (model, _), policy in self.policies.items() if model == name)
        policy = self.policies[name, int(number)] = replace(known, version=int(number))
        return self.target(policy, int(source), int(instances or 1))

    def do_ensemble(self, name: str, *words: str, **options: str) -> None:
        """ensemble e inputs=x:[-1] outputs=z m(x:x)->(y:t) n(x:t)->(y:z)/map:t/if:flag"""
        steps = tuple(step_of(word) for word in words if "->" in word)
        flags = ("single", *(word for word in words if "->" not in word))
        self.model = name
        policy = policy_of(name, flags, {"max_batch": "0"} | options)
        self.deploy(replace(policy, steps=steps, ahead=int(options.get("ahead", 0))), 0)

    def do_misfit(self, name: str, problem: str = "") -> None:
        """From now on, the steps of this ensemble do not fit together, for this reason; without a reason, they fit."""
        self.misfits[name] = problem

    def do_unload(self, name: str, *flags: str, op: str = "0") -> list[Event]:
        return [(0, events.Unload(name, int(op), "force" in flags))]

    def do_restart(self, name: str, instance: str = "", version: str = "0", op: str = "0") -> list[Event]:
        return [(0, events.Restart(name, int(version), instance, int(op)))]

    def do_join(self, name: str, instance: str, *flags: str) -> None:
        """join m m_1: as if the core had decided to add this instance to m. `unloaded`: it does not load."""
        self.loads_itself[name] = "unloaded" not in flags
        version = self.core.state.look_up(name, 0)
        self.change(lambda state: scaling.join(state, version, InstanceSpec(instance)))

    def do_leave(self, name: str, instance: str) -> None:
        version = self.core.state.look_up(name, 0)
        found = next(one for one in version.instances if one.spec.name == instance and not one.over)
        self.change(lambda state: scaling.leave(state, version, found))

    def do_traffic(self, name: str, shares: str = "", shadow: str = "", aliases: str = "") -> list[Event]:
        """traffic m shares=1:90,2:10 shadow=2:100 aliases=prod:1,old:0; 0: no alias any more."""
        parts, shadows, names = (
            [pair.split(":") for pair in text.split(",") if pair] for text in (shares, shadow, aliases)
        )
        wanted, shadowed = ({int(version): int(percent) for version, percent in one} for one in (parts, shadows))
        named = {alias: int(version) or None for alias, version in names}
        return [(0, events.SetTraffic(name, wanted, named, shadow=shadowed))]

    def do_differ(self, name: str, *outputs: str) -> None:
        """differ m_0~ y: from now on, this shadow reports the output as different."""
        self.worker(name).differs = set(outputs)

    def do_service(self, *flags: str) -> list[Event]:
        """service out: the server is taken out of service; `service`: it is put back."""
        return [(0, events.SetService("out" in flags))]

    def do_refuse(self, name: str, version: str, reason: str) -> list[Event]:
        return [(0, events.Refuse(name, int(version), reason))]

    # ------------------------------------------------------------------------------------ streams

    def do_part(
        self, name: str, label: str, *flags: str, count: str = "1", error: str = "", **says: str
    ) -> list[Event]:
        """part m_0 a1 count=3: the worker sends this many responses; `last`, and `empty`: only the end; y=none and so
        on as for `done`."""
        worker = self.worker(name)
        if worker.peer not in self.slow_to:
            worker.read()
        worker.says = says
        request = next(number for number in worker.streams if self._label(number) == label)
        for index in range(int(count)):
            final = "last" in flags and index == int(count) - 1
            worker.part(request, final, "empty" in flags, failure_of(error))
        return [] if worker.peer in self.slow_from else self.heard(worker)

    def do_unread(self, name: str, label: str) -> list[Event]:
        """The model waits until the caller accepts more responses: those that are queued take too much memory."""
        worker = self.worker(name)
        assert worker.running is not None
        return [
            (
                worker.peer,
                worker_messages.Unread(
                    next(w.request for w in worker.running.work_items if self._label(w.request) == label)
                ),
            )
        ]

    def do_prefill(self, name: str, label: str, tokens: str) -> list[Event]:
        """prefill m_0 a1 120: the engine has computed the prompt of the request, which has 120 tokens."""
        number = next(number for number in self.worker(name).streams if self._label(number) == label)
        return [(self.worker(name).peer, worker_messages.Prefilled(number, int(tokens)))]

    def do_more(self, client: str, number: str, count: str) -> list[Event]:
        who = self.named[client]
        if int(number) in who.windows:
            who.windows[int(number)] += int(count)
        return [(who.peer, messages.More(int(number), int(count)))]

    # ------------------------------------------------------------------------------------ leases

    def _lease_at(self, name: str) -> FakeLease:
        lease = self.worker(name).lease
        assert lease is not None, f"{name} is not leased"
        return lease

    def do_alone(self, client: str, sent: str, **options: str) -> None:
        """alone a 1-17: requests that a sends one after the other; only what concerns leases is shown."""
        who, before = self.named[client], len(self.lines)
        for number in numbers(sent):
            who.sends(number)
            self.turn([(who.peer, self.make_infer(who, number, options))])
            self.finish_running()
        self.lines[before:] = [line for line in self.lines[before:] if "lease" in line or " map " in line]

    def do_leased(self, client: str, number: str, **options: str) -> None:
        """leased a 18: a sends a request over its lease. The worker does not begin it."""
        who = self.named[client]
        (lease,) = who.leases.values()
        who.send_leased(lease, self.make_infer(who, int(number), options))

    def do_begin(self, name: str, ago: str = "0s") -> None:
        """begin m_0 ago=2ms: the worker has begun its leased request."""
        self._lease_at(name).begin(self.now - nanoseconds(ago))

    def do_serve(self, name: str, *flags: str, took: str = "0s", error: str = "") -> None:
        """serve m_0 took=2ms: the worker runs and answers its leased request; `unanswered`: the request is recorded,
        but not answered."""
        self.worker(name).run_leased(self.now, nanoseconds(took), failure_of(error), "unanswered" not in flags)

    def do_logged(self, name: str) -> list[Event]:
        """The worker asks the broker to read the log of its lease."""
        return [(self.worker(name).peer, worker_messages.LeaseLogged(self._lease_at(name).number))]

    def do_end_lease(self, name: str, *flags: str) -> list[Event]:
        """The worker ends its lease; `unfit`: it cannot be leased."""
        worker, lease = self.worker(name), self._lease_at(name)
        worker.lease, lease.worker_open = None, False
        return [(worker.peer, worker_messages.LeaseOver(lease.number, "unfit" in flags))]

    def do_descriptors(self, *flags: str) -> None:
        """descriptors none: the broker cannot create sockets."""
        self.out_of_descriptors = "none" in flags

    # ------------------------------------------------------------------------------------ calls

    def _number(self, label: str) -> int:
        """The broker's number of a request that workers have."""
        return next(request.number for request in self.core.state.requests.values() if self._name(request) == label)

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
        inputs = tuple(messages.Tensor(spec.name, spec.dtype, (*lead, size // 4), data) for spec in specs)
        outputs = None
        if "place" in options:
            outputs = (messages.Wanted("y", worker.allocate("internal", 64)),)
        worker.outbox.append(
            worker_messages.Call(
                int(number), parent, model, int(options.get("version", 0)), inputs, outputs,
                nanoseconds(options.get("timeout", "0s")) // 1000, messages.Options(window=window) if window else None,
                "aside" not in flags,
            )
        )  # fmt: skip
        return [] if worker.peer in self.slow_from else self.heard(worker)

    def _bytes_of(self, worker: FakeWorker, text: str, size: int, parent: int) -> tuple[messages.Handle, ...]:
        where, _, offset = text.partition("+")
        if where == "own":
            handle = worker.allocate("internal", size)
            del worker.out[handle]  # no model receives it
            return (handle,)
        if where == "parent":
            whole = references(self.core.state.requests[parent].inputs)[0]
        else:
            whole = references(caller_of(worker).answers[int(where.removeprefix("reply"))].outputs)[0]
        return (messages.Handle(whole.segment, whole.offset + int(offset or 0), size),)

    def do_take_back(self, name: str, number: str) -> list[Event]:
        worker = self.worker(name)
        worker.outbox.append(messages.Cancel(int(number)))
        return self.heard(worker)

    def do_more_of(self, name: str, number: str, count: str) -> list[Event]:
        worker = self.worker(name)
        caller_of(worker).windows[int(number)] += int(count)
        worker.outbox.append(messages.More(int(number), int(count)))
        return self.heard(worker)

    def do_give_back(self, name: str, number: str) -> list[Event]:
        """The worker returns the handles in the answer to its call."""
        worker = self.worker(name)
        worker.outbox.append(given_back(caller_of(worker), int(number)))
        return self.heard(worker)

    def do_pass_on(self, name: str, output: str, number: str, size: str = "") -> None:
        """The next batch passes on the answer to the call as this output: all of it, or its last bytes."""
        worker = self.worker(name)
        handle = references(caller_of(worker).answers[int(number)].outputs)[0]
        if size:
            handle = messages.Handle(handle.segment, handle.offset + handle.size - int(size), int(size))
        worker.passes[output] = handle

    def do_wants(self, name: str, what: str, model: str = "") -> list[Event]:
        """The worker sends the server a query."""
        worker = self.worker(name)
        number = 1000 + len(caller_of(worker).open)
        caller_of(worker).sends(number)
        worker.outbox.append(messages.Ask(number, what, model))
        return self.heard(worker)
