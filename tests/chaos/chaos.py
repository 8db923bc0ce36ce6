"""The chaos soak: eight clients of all kinds at work, while processes are killed and stopped, models come and go, and
the broker itself is killed once.

The rule of the file: what is done, and when, comes from the seed; the last 200 events are told with every failure.
"""

from __future__ import annotations

import random
import select
import signal
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from bench import models, processes
from bench.child import Child
from bench.soak import BATCH, SLOW, batch_of
from shmserve.testing import Server

DTYPES = ("FP32", "INT8", "BYTES", "FP64")
AWAY = "identity_INT8"
"""The model that is unloaded and loaded again: only its requests may be told that it is not there."""
MODELS = (*(f"identity_{dtype}" for dtype in DTYPES), "slow")
LARGEST = 1 << 20
OUTPUT_BYTES = 6 << 20
"""Of one worker: little enough that answers which are held fill it now and then."""
EVENTS = 200
GAP_S = 0.6
"""The mean time between two events."""
GROWTH_BYTES = 24 << 20
END_S = 5.0
"""Without events at the end, so that what was begun can be answered."""

ALLOWED = {
    "MODEL_FAILED": r"worker process of instance .* ended while it .*SIGKILL",
    "UNAVAILABLE": rf"no room for |^{AWAY}: .*(unload|not at ready state|no available versions|not found)",
    "NOT_FOUND": rf"^{AWAY}: .*(not found|no available versions)",
}
ALLOWED_TO_OPERATORS = {
    "CONNECTION_LOST": "the connection ended before",
    "UNAVAILABLE": "SIGKILL|stopping|superseded|replaced|unload|load",
    "NOT_FOUND": "not (?:found|served|loaded)",
    "INVALID_ARG": "not (?:served|loaded)",
}


@dataclass
class Worker:
    """One of the eight. It may be killed, and then another takes its place."""

    target: str
    setup: dict[str, Any]
    child: Child
    stopped: bool = False


@dataclass
class Chaos:
    """What came out. `faults` should be empty."""

    seed: int
    began: float = field(default_factory=monotonic)
    counts: Counter[str] = field(default_factory=Counter)
    happened: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    events: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=EVENTS))

    def note(self, kind: str, text: str) -> None:
        self.happened[kind] += 1
        self.events.append((monotonic(), f"{kind}: {text}"))

    def fault(self, text: str) -> None:
        self.faults.append(f"at {monotonic() - self.began:.2f} s: {text}")

    def text(self) -> str:
        counts = ", ".join(f"{key} {count:,}" for key, count in sorted(self.counts.items()))
        happened = ", ".join(f"{key} {count}" for key, count in sorted(self.happened.items()))
        return f"seed {self.seed}; requests: {counts}; events: {happened}"

    def report(self) -> str:
        told = [f"{when - self.began:8.2f} {text}" for when, text in sorted(self.events)[-EVENTS:]]
        return "\n".join([self.text(), *self.faults[:20], f"the last {len(told)} events:", *told])


def write_repository(root: Path) -> None:
    for dtype in DTYPES:
        name = f"identity_{dtype}"
        config = "STRING" if dtype == "BYTES" else dtype
        made = models.identity(config, max_batch=batch_of(name), instances=2 if dtype == "FP32" else 1)
        models.write(root, name, made, {})
    slow = models.Model("python", {"x": ("FP32", [-1])}, {"y": ("FP32", [-1])}, max_batch=4, dynamic=True, instances=2)
    models.write(root, "slow", slow, {"model.py": SLOW})
    assert batch_of("identity_FP32") == BATCH


class Director:
    def __init__(self, server: Server, root: Path, seconds: float, seed: int) -> None:
        self.found = Chaos(seed)
        self._server = server
        self._random = random.Random(seed)
        self._end = monotonic() + seconds
        self._continue: list[tuple[float, int, str]] = []
        """(when, pidfd, name) of processes that are stopped."""
        self._seed = seed
        url, zmq = server.url, server.zmq_url
        lane, socket = url.removeprefix("unix://"), zmq.removeprefix("ipc://")
        public = {"largest": LARGEST, "dtypes": DTYPES, "allowed": ALLOWED}
        bare = {"dtypes": DTYPES, "allowed": ALLOWED}
        self._workers = [
            self._start("bench.soak_client:waiting", url=url, **public),
            self._start("bench.soak_client:waiting", url=url, **public),
            self._start("bench.soak_client:waiting", url=zmq, **public),
            self._start("bench.soak_client:waiting", url=zmq, **public),
            self._start("bench.soak_client:awaiting", url=url, **public),
            self._start("bench.soak_client:awaiting", url=zmq, **public),
            self._start("tests.chaos.clients:raw", link="lane", path=lane, **bare),
            self._start("tests.chaos.clients:raw", link="zmq", path=socket, **bare),
        ]
        self._operator = Child(
            "tests.chaos.clients:operator",
            url=url, seed=seed, root=str(root), models=MODELS, away=AWAY, allowed=ALLOWED_TO_OPERATORS,
        )  # fmt: skip

    def _start(self, target: str, **setup: Any) -> Worker:
        self._seed += 1
        return Worker(target, setup, Child(target, **setup, seed=self._seed))

    # ------------------------------------------------------------------------------------ the course of it

    def run(self) -> None:
        for worker in self._workers:
            worker.child.ready()
        left = self._end - END_S - monotonic()
        for worker in self._workers:
            worker.child.tell(seconds=self._end - monotonic())
        self._operator.tell(seconds=left, pause=max(1.0, left / 60))
        halfway, killed, resident = monotonic() + left * 0.4, False, 0
        last = self._end - END_S
        acts = self._acts()
        while (now := monotonic()) < last and not self.found.faults:
            self._pause(now)
            if not killed and now > halfway:
                killed = True
                self._kill_broker()
            elif killed and not resident and now > halfway + left * 0.2:
                resident = processes.private_bytes(self._server.pid)
            else:
                self._random.choices([act for act, _ in acts], [weight for _, weight in acts])[0]()
        self._let_go(float("inf"))
        self._collect()
        grown = processes.private_bytes(self._server.pid) - resident
        if resident and grown > GROWTH_BYTES:
            self.found.fault(f"the broker has grown by {grown >> 10} KiB to {(resident + grown) >> 10} KiB")
        self.found.counts["broker KiB grown"] = grown >> 10

    def _acts(self) -> list[tuple[Any, int]]:
        return [(self._kill_worker, 5), (self._stop_worker, 5), (self._kill_client, 2), (self._stop_client, 4)]

    def _pause(self, now: float) -> None:
        """Until the next event; a client that ends meanwhile has failed, as nobody is to answer before the end."""
        until = now + self._random.expovariate(1 / GAP_S)
        while (left := until - monotonic()) > 0:
            due = min((when for when, _, _ in self._continue), default=until)
            talking = {worker.child.output: worker for worker in self._workers if not worker.child.waiting_for_setup}
            ready = select.select(list(talking), [], [], max(0.0, min(left, due - monotonic())))[0]
            self._let_go(monotonic())
            for output in ready:
                worker = talking[output]
                self.found.fault(f"{worker.target} {worker.setup.get('url', '')} has ended before its time")
                return

    def _let_go(self, now: float) -> None:
        for entry in [entry for entry in self._continue if entry[0] <= now]:
            self._continue.remove(entry)
            processes.signal_to(entry[1], signal.SIGCONT)
            self.found.note("continued", entry[2])

    def _hold(self, pidfd: int, name: str, most: float) -> None:
        if processes.signal_to(pidfd, signal.SIGSTOP):
            self._continue.append((monotonic() + self._random.random() * most, pidfd, name))

    # ------------------------------------------------------------------------------------ what happens

    def _some_worker(self) -> int:
        found = processes.descendants(self._server.pid)
        return self._random.choice(sorted(found)) if found else 0
