"""A hostile client on each link, an honest client beside them, and a comparison of the server's state afterwards.

Invariant: the server is examined only from outside (its responses, /proc), before and after.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from bench.hostile.client import is_alive
from bench.lib import models, processes
from bench.lib.child import Child, Team
from bench.lib.raw_client import RawLane
from bench.lib.setting import BenchServer, serving
from shmserve.core.internal_errors import INTERNAL_ERROR
from shmserve.system import procfs

SETTLE = 20.0
"""Seconds within which the server must have released everything. A limit to detect a hang, not a test of speed."""
MIB = 1 << 20


@dataclass
class Hostile:
    sent: int = 0
    answered: int = 0
    """Correct answers to the honest client during the attack."""
    harm: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def add_harm(self, text: str, times: int = 1) -> None:
        self.harm += times
        self.examples.append(text)

    def text(self) -> str:
        counts = ", ".join(f"{key} {count:,}" for key, count in self.counts.most_common())
        words = f"{self.sent:,} hostile packets ({counts}); the honest client got {self.answered:,} correct answers"
        return "; ".join([words, *self.examples[:5]])


@dataclass
class BrokerSnapshot:
    """The server's state according to /proc."""

    workers: set[int]
    descriptors: Counter[str]
    segments: set[str]
    resident: int

    @classmethod
    def of(cls, broker: int) -> BrokerSnapshot:
        return cls(
            set(processes.descendants(broker)),
            Counter(processes.descriptors(broker)),
            processes.segments(),
            procfs.usage(broker).resident_bytes,
        )

    def leftovers(self, before: BrokerSnapshot) -> list[str]:
        """Resources that did not exist before."""
        results = []
        if self.workers != before.workers:
            results.append(f"{len(self.workers ^ before.workers)} worker processes ended or started")
        if more := self.descriptors - before.descriptors:
            results.append(f"descriptors more than before: {dict(more)}")
        if more_segments := self.segments - before.segments:
            results.append(f"{len(more_segments)} segments more than before")
        return results


def write_repository(root: Path) -> None:
    models.write(root, "identity", models.identity(max_batch=8), {})
    models.write(root, "strings", models.identity("STRING", max_batch=8), {})


def compare(server: BenchServer, before: BrokerSnapshot, seconds: float = SETTLE) -> tuple[BrokerSnapshot, list[str]]:
    """Compares until nothing is worse, or until the timeout. Each comparison waits for a round trip through the
    server.
    """
    end = monotonic() + seconds
    broker = server.broker_pid()
    with RawLane(str(server.runtime_dir / "lane.sock")) as lane:
        lane.hello("memfd")
        extra = Counter({"socket": 1})  # the connection of this check
        while True:
            alive = is_alive(lane, 5.0)
            now = BrokerSnapshot.of(broker)
            now.descriptors -= extra
            worse = now.leftovers(before)
            if not alive:
                worse.append("the server does not answer")
            if not worse or monotonic() > end:
                return now, worse


def run_hostile(repository: Path, count: int, seconds: float) -> Hostile:
    write_repository(repository)
    result = Hostile()
    # Otherwise the client would soon be disconnected permanently.
    with serving(repository, "--limit", "client_errors=0") as server:
        broker = server.broker_pid()
        paths = {"lane": server.runtime_dir / "lane.sock", "zmq": server.runtime_dir / "broker.sock"}
        with Team([Child("bench.hostile.client:honest", url=server.lane, model="identity")]) as honest:
            honest.ask(seconds=0.5)
            before = BrokerSnapshot.of(broker)
            attacks = [
                Child("bench.hostile.client:attack", link=link, path=str(path), seed=seed, model="identity")
                for seed, (link, path) in enumerate(paths.items())
            ]
            with Team(attacks) as team:
                # The honest client runs for the attackers' maximum time; they stop after their count.
                honest.children[0].tell(seconds=seconds)
                answers = team.ask(count=count // len(paths), seconds=seconds)
                beside = honest.children[0].answer()
            now, worse = compare(server, before)
            if worse:
                worse += [line for line in server.log().splitlines() if " ERROR " in line][:5]
            worse += [line for line in server.log().splitlines() if INTERNAL_ERROR in line][:5]
            after = honest.ask(seconds=0.5)[0]
    for link, answer in zip(paths, answers, strict=True):
        result.sent += answer["sent"]
        result.counts.update(answer["counts"])
        for text in answer["leaks"]:
            result.add_harm(f"{link}: an error text reveals too much: {text}")
    for text in worse:
        result.add_harm(text)
    result.answered = beside["right"]
    wrong = beside["wrong"] + after["wrong"]
    if wrong:
        result.add_harm(f"honest client: {(beside['examples'] + after['examples'])[0]}", wrong)
    if now.resident > before.resident + 256 * MIB:
        result.add_harm(f"the broker grew from {before.resident // MIB} to {now.resident // MIB} MiB")
    return result
