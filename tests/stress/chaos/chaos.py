"""The chaos soak: fourteen clients of all kinds send requests while processes, including the gateway, are killed and
stopped, models are loaded and unloaded, and the broker itself is killed once.

The seed determines the events and their times. Every failure reports the last 200 events.
"""

from __future__ import annotations

import os
import random
import select
import signal
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from time import monotonic
from typing import Any

from bench.hostile.run import BrokerSnapshot
from bench.lib import models, processes
from bench.lib.child import Child, ChildFailed
from bench.soak.run import BATCH, SLOW, batch_of
from shmserve.testing import Server
from tests.stress.chaos import scheduled
from tests.stress.chaos.clients import WIDTH
from tests.support.system.ports import free_ports

CLIENTS = "tests.stress.chaos.clients"
DTYPES = ("FP32", "INT8", "BYTES", "FP64")
AWAY = "identity_INT8"
"""The model that is unloaded and reloaded: only its requests may fail because it is missing."""
LONE = {"lone": 1, "pair": 2, "own": 1}
"""Models and their instances. Their requests fit into messages, so that clients get leases."""
MODELS = (*(f"identity_{dtype}" for dtype in DTYPES), "slow", *LONE, *scheduled.MODELS)
LARGEST = 1 << 20
OUTPUT_BYTES = 6 << 20
"""Output memory of one worker: small enough that held answers fill it now and then."""
EVENTS = 200
GAP_S = 0.6
"""The mean time between two events."""
GROWTH_BYTES = 24 << 20
PATIENCE = 60.0
"""Seconds that clients wait for a server to come back, and that all processes get to end."""
VICTIMS = (1, 3, 4, 8, 11, 13)
"""Clients that may be killed, one of each public kind. The others account for all their requests at the end."""
CONNECT_S = 3.0
"""After this time, running clients have connected."""
END_S = 5.0
"""Time without events at the end, so that requests in flight can be answered."""

ALLOWED = {
    "MODEL_FAILED": r"worker process of instance .* ended (while it|after \d+ responses? to this request) .*SIGKILL",
    "UNAVAILABLE": "no room for |worker process with its state ended"
    "|was asleep and cannot be loaded: .* signal SIGKILL"
    rf"|^{AWAY}: .*(unload|not at ready state|no available versions|not found)"
    "|^calls: .*before its own timeout:",
    "NOT_FOUND": rf"^{AWAY}: .*(not found|no available versions)",
    **scheduled.ALLOWED,
}
ALLOWED_TO_OPERATORS = {
    "CONNECTION_LOST": "the connection ended before",
    "UNAVAILABLE": "SIGKILL|stopping|superseded|replaced|unload|load",
    "NOT_FOUND": "not (?:found|served|loaded)",
    "INVALID_ARG": "not (?:served|loaded)",
}


@dataclass
class Member:
    """One of the clients. If it is killed, another one replaces it."""

    target: str
    setup: dict[str, Any]
    child: Child
    told: bool = False
    """The client has been set up and is running."""
    since: float = 0.0
    """When that was reported."""

    @property
    def name(self) -> str:
        kind = self.setup.get("link") or self.setup["url"].partition(":")[0]
        return f"{self.target.partition(':')[2]} {kind}, process {self.child.pid}"


@dataclass
class Chaos:
    """The results. `faults` should be empty."""

    seed: int
    began: float = field(default_factory=monotonic)
    counts: Counter[str] = field(default_factory=Counter)
    leased: int = 0
    """How often clients have seen a lease."""
    happened: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    events: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=EVENTS))
    operations: list[tuple[float, str]] = field(default_factory=list)

    def note(self, kind: str, text: str) -> None:
        self.happened[kind] += 1
        self.events.append((monotonic(), f"{kind}: {text}"))

    def fault(self, text: str) -> None:
        self.faults.append(f"at {monotonic() - self.began:.2f} s: {text}")

    def text(self) -> str:
        counts = ", ".join(f"{key} {count:,}" for key, count in sorted(self.counts.items()))
        happened = ", ".join(f"{key} {count}" for key, count in sorted(self.happened.items()))
        return f"seed {self.seed}; requests: {counts}; leases seen: {self.leased}; events: {happened}"

    def report(self) -> str:
        events = sorted([*self.events, *self.operations])[-EVENTS:]
        told = [f"{when - self.began:8.2f} {text}" for when, text in events]
        return "\n".join([self.text(), *self.faults[:20], f"the last {len(told)} events:", *told])


def write_repository(root: Path) -> None:
    for dtype in DTYPES:
        name = f"identity_{dtype}"
        config = "STRING" if dtype == "BYTES" else dtype
        made = models.identity(config, max_batch=batch_of(name), instances=2 if dtype == "FP32" else 1)
        models.write(root, name, made, {})
    slow = models.Model("python", {"x": ("FP32", [-1])}, {"y": ("FP32", [-1])}, max_batch=4, dynamic=True, instances=2)
    models.write(root, "slow", slow, {"model.py": SLOW})
    for name, instances in LONE.items():
        dims = {"x": ("FP32", [WIDTH])}, {"y": ("FP32", [WIDTH])}
        lone = models.Model("python", *dims, max_batch=4, dynamic=True, instances=instances)
        models.write(root, name, lone, {"model.py": SLOW})
    scheduled.write(root)
    assert batch_of("identity_FP32") == BATCH


class Director:
    def __init__(self, server: Server, root: Path, seconds: float, seed: int) -> None:
        self.found = Chaos(seed)
        self._server = server
        self._random = random.Random(seed)
        self._seconds = seconds
        self._end = 0.0
        self._held: list[tuple[float, int, str]] = []
        """(until when, pidfd, name) of processes that are stopped."""
        self._seed = seed * 1000
        url, zmq = server.url, server.zmq_url
        lane = url.removeprefix("unix://")
        patient = {"allowed": ALLOWED, "reconnect_timeout": PATIENCE}
        public = {"largest": LARGEST, "dtypes": DTYPES, **patient}
        bare = {"dtypes": DTYPES, "allowed": ALLOWED}
        lone = (("lone", "own"), ("pair", "lone"), ("own",))
        self._members = [
            *(self._start("bench.soak.clients:waiting", url=link, **public) for link in (url, url, zmq, zmq)),
            *(self._start("bench.soak.clients:awaiting", url=link, **public) for link in (url, zmq)),
            self._start(f"{CLIENTS}:raw", link="lane", path=lane, **bare),
            self._start(f"{CLIENTS}:raw", link="zmq", path=zmq.removeprefix("ipc://"), **bare),
            *(self._start("tests.stress.chaos.scheduled:scheduled", url=link, **patient) for link in (url, zmq)),
            self._start(f"{CLIENTS}:gateway", url=f"http://{server.endpoints['http']}", allowed=ALLOWED),
            *(self._start(f"{CLIENTS}:alone", url=url, models=models, **patient) for models in lone),
        ]
        self._operator = Child(
            f"{CLIENTS}:operator",
            url=url, seed=seed, root=str(root), models=MODELS, away=AWAY, allowed=ALLOWED_TO_OPERATORS,
        )  # fmt: skip

    def _start(self, target: str, **setup: Any) -> Member:
        self._seed += 1
        return Member(target, setup, Child(target, **setup, seed=self._seed))

    # ------------------------------------------------------------------------------------ the course of it

    def run(self) -> None:
        for child in (self._operator, *(member.child for member in self._members)):
            child.ready()
        begin = monotonic()
        self._end = begin + self._seconds
        last = self._end - END_S
        for member in self._members:
            self._tell(member)
        self._operator.tell(seconds=last - begin, pause=max(1.0, self._seconds / 60))
        kill_at, look_at = begin + 0.4 * self._seconds, begin + 0.6 * self._seconds
        resident = 0
        acts, weights = zip(*self._acts(), strict=True)
        first = self._random.sample(acts, len(acts))  # each act happens at least once, however short the time
        while self._pause() and monotonic() < last:
            if kill_at and monotonic() > kill_at and self._all_connected():
                kill_at = 0.0
                self._kill_broker()
            elif not kill_at and not resident and monotonic() > look_at:
                resident = processes.private_bytes(self._server.pid)
            else:
                (first.pop() if first else self._random.choices(acts, weights)[0])()
        self._let_go(float("inf"))
        self._collect()
        self._collect_operator()
        grown = processes.private_bytes(self._server.pid) - resident
        if resident and grown > GROWTH_BYTES:
            self.found.fault(f"the broker has grown by {grown >> 10} KiB to {(resident + grown) >> 10} KiB")

    def close(self) -> None:
        """Ends all processes, whatever has happened."""
        self._let_go(float("inf"))
        for child in (self._operator, *(member.child for member in self._members)):
            self._end_of(child)

    def _end_of(self, child: Child) -> None:
        child.kill()
        child.close()

    def _acts(self) -> list[tuple[Callable[[], None], int]]:
        workers, clients = (self._kill_worker, self._stop_worker), (self._kill_client, self._stop_client)
        return [*zip(workers, (5, 5), strict=True), *zip(clients, (2, 4), strict=True), (self._kill_gateway, 2)]

    def _pause(self) -> bool:
        """Waits until the next event. A client that ends in between has failed, since none may end before the soak."""
        until = monotonic() + self._random.expovariate(1 / GAP_S)
        while (left := until - monotonic()) > 0 and not self.found.faults:
            due = min((when for when, _, _ in self._held), default=until) - monotonic()
            outputs = {member.child.fileno(): member for member in self._members}
            for output in select.select(list(outputs), [], [], max(0.0, min(left, due)))[0]:
                member = outputs[output]
                if member.told and monotonic() >= self._end:
                    return not self.found.faults  # starting the broker again has taken the rest of the time
                if member.told:
                    self.found.fault(f"{member.name} has ended before its time")
                else:
                    self._tell(member)
            self._let_go(monotonic())
        return not self.found.faults

    def _tell(self, member: Member) -> None:
        try:
            member.child.tell(seconds=max(0.1, self._end - monotonic()))
            member.told, member.since = True, monotonic()
        except ChildFailed as error:
            self.found.fault(f"{member.name}: {error}")

    # ------------------------------------------------------------------------------------ what happens

    def _kill_worker(self) -> None:
        self._to_worker(signal.SIGKILL, "killed worker", 0.0)

    def _stop_worker(self) -> None:
        self._to_worker(signal.SIGSTOP, "stopped worker", 2.0)

    def _kill_gateway(self) -> None:
        for pid in gateways(self._server.pid):
            self.found.note("killed gateway", f"process {pid}")
            os.kill(pid, signal.SIGKILL)

    def _to_worker(self, number: signal.Signals, kind: str, most: float) -> None:
        found = sorted({*processes.descendants(self._server.pid)} - gateways(self._server.pid))
        if not found:
            return
        pid = self._random.choice(found)
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:  # it has just ended
            return
        self.found.note(kind, f"process {pid}")
        self._send(pidfd, number, f"worker process {pid}", most)

    def _stop_client(self) -> None:
        member = self._random.choice(self._members)
        if not member.told:  # connecting has a timeout, so a client stopped for this long fails
            return
        self.found.note("stopped client", member.name)
        self._send(os.pidfd_open(member.child.pid), signal.SIGSTOP, member.name, 4.0)

    def _send(self, pidfd: int, number: signal.Signals, name: str, most: float) -> None:
        try:
            signal.pidfd_send_signal(pidfd, number)
        except ProcessLookupError:
            number = signal.SIGKILL
        if number is signal.SIGSTOP:
            self._held.append((monotonic() + self._random.random() * most, pidfd, name))
        else:
            os.close(pidfd)

    def _let_go(self, now: float) -> None:
        for entry in [entry for entry in self._held if entry[0] <= now]:
            self._held.remove(entry)
            _, pidfd, name = entry
            self.found.note("continued", name)
            self._send(pidfd, signal.SIGCONT, name, 0.0)

    def _kill_client(self) -> None:
        place = self._random.choice(VICTIMS)
        member = self._members[place]
        if not member.told or monotonic() > self._end - 2 * END_S:
            return
        self.found.note("killed client", member.name)
        self._end_of(member.child)
        self._members[place] = self._start(member.target, **member.setup)

    def _all_connected(self) -> bool:
        """Whether all clients have connected, as far as known: no client reconnects to a server that never ran."""
        return all(member.told and monotonic() - member.since > CONNECT_S for member in self._members)

    def _kill_broker(self) -> None:
        self.found.note("killed broker", f"process {self._server.pid}")
        self._server.kill()
        self._server.start()
        self.found.note("started broker", f"process {self._server.pid}")

    # ------------------------------------------------------------------------------------ what came out

    def _answer(self, child: Child, name: str) -> dict[str, Any]:
        left = self._end + PATIENCE - monotonic()
        if not select.select([child.fileno()], [], [], max(1.0, left))[0]:
            self.found.fault(f"{name} did not end within {PATIENCE:g} s of the end; standard error says where it is")
            child.dump_stacks()
            return {}
        try:
            return child.answer()
        except ChildFailed as error:
            self.found.fault(f"{name}: {error}")
            return {}

    def _collect(self) -> None:
        for member in self._members:
            if not member.told:
                self._tell(member)
            found = self._answer(member.child, member.name)
            if not found:
                continue
            counts, lost = Counter(found["counts"]), found["lost"]
            self.found.counts.update(counts)
            self.found.counts["sent"] += found["sent"]
            self.found.counts["lost"] += lost
            self.found.leased += found.get("over leases", 0)
            if lost or found["wrong"] or found.get("twice"):
                self.found.fault(f"{member.name}: {found}")
            elif counts.total() != found["sent"]:
                self.found.fault(f"{member.name} has sent {found['sent']} requests, and {counts.total()} ended")
            if len(found.get("ends", [])) > self.found.happened["killed broker"]:
                self.found.fault(f"{member.name} was sent away: {found['ends']}")

    def _collect_operator(self) -> None:
        found = self._answer(self._operator, "operator")
        self.found.counts["operations"] = found.get("counts", {}).get("operations", 0)
        self.found.operations = [tuple(entry) for entry in found.get("log", [])]
        for text in found.get("examples", []):
            self.found.fault(f"operator: {text}")


def gateways(server: int) -> set[int]:
    """The gateways of a server."""
    found = set()
    for pid in processes.descendants(server):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:  # it has just ended
            continue
        if b"gateway" in words:
            found.add(pid)
    return found


def ask_gateway(server: Server) -> None:
    """Sends a request, after which the gateway is connected to the server."""
    endpoint = HTTPConnection(server.endpoints["http"], timeout=PATIENCE)
    try:
        endpoint.request("GET", "/v2/health/ready")
        assert endpoint.getresponse().status == 200, server.log
    finally:
        endpoint.close()


def run_chaos(root: Path, seconds: float, seed: int, sleeping: bool = False) -> Chaos:
    """`sleeping`: models sleep when idle, and because there is memory for only some of them."""
    write_repository(root)
    segments = processes.segments()
    options = ["--worker-output-bytes", str(OUTPUT_BYTES), "--model-control-mode", "explicit"]
    options += ["--idle-unload-secs", "0.4", "--model-memory-budget", "180MiB"] if sleeping else []
    options += ["--http-port", *map(str, free_ports(1)), *(f"--load-model={name}" for name in MODELS)]
    with Server(root, *options, gateway=True) as server:
        ask_gateway(server)
        idle = BrokerSnapshot.of(server.pid)
        director = Director(server, root, seconds, seed)
        found = director.found
        try:
            director.run()
        finally:
            director.close()
        for text in worse(server, idle, sleeping):
            found.fault(f"in the end: {text}")
        living = processes.Living([server.pid, *processes.descendants(server.pid)])
        server.stop()
    if left := living.still_there():
        found.fault(f"{left} processes have outlived the server")
    if names := processes.segments() - segments:
        found.fault(f"segments were left behind: {sorted(names)}")
    return found


def worse(server: Server, before: BrokerSnapshot, sleeping: bool) -> list[str]:
    """Resources of which there are more after all clients have gone than before the first one came. Worker processes
    and their memory have changed by then; if models sleep, there are fewer."""
    end = monotonic() + PATIENCE
    with server.client() as client:
        while True:
            client.live()  # a round trip: the server has noticed everything that ended before
            now = BrokerSnapshot.of(server.pid)
            extra = now.descriptors - before.descriptors - Counter({"socket": 1})
            found = [f"{count} x {kind}" for kind, count in extra.items() if not kind.startswith("/memfd:")]
            if len(now.workers) != len(before.workers) and not (sleeping and len(now.workers) < len(before.workers)):
                found.append(f"{len(now.workers)} workers, not {len(before.workers)}")
            if not found or monotonic() > end:
                return found
