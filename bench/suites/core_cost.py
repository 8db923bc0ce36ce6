"""The core's cost per request: turns of 32 Infer with 1 KB inline, batches of 32, and their Done.

    python -m bench.suites.core_cost [--requests 100000] [--profile] [--cold]

The core is driven as by the broker, but without links: nothing is encoded, and a worker answers immediately. Only
`Core.handle` is timed, not the creation of messages. The fake worker processes the messages that it gets, so that the
core does the same work as in a server. With `--cold`, the CPU caches are filled with other data before each turn, as
other processes and tensors do in a server.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
from time import perf_counter_ns
from typing import Any

from shmserve.core import events
from shmserve.core.core import Core
from shmserve.core.effects import Send
from shmserve.core.policy import BatchPolicy, InstanceSpec, ModelPolicy, TensorSpec
from shmserve.protocol.messages import Hello, Infer, Reply, Tensor
from shmserve.protocol.roles import ALL_ROLES
from shmserve.protocol.worker_messages import Done, Execute, Row, Started

SHAPE = (1, 256)
DATA = bytes(1024)
ROUNDS = 50
"""The best round is reported; the others were disturbed."""
COLD_BYTES = 32 << 20
"""Bytes copied before each turn with `--cold`: source and copy together exceed the caches."""
RESULT = Tensor("y", "FP32", (1, 64), bytes(256))
SORTS: dict[str, BatchPolicy | None] = {
    "plain": BatchPolicy(),
    "preferred": BatchPolicy(preferred=(16, 32), delay_ns=100_000),
    "priorities": BatchPolicy(levels=3, default_level=2),
    "ordered": BatchPolicy(preserve_ordering=True),
    "single": None,
}


class Driver:
    """Clients with a number of requests in flight, and one worker."""

    def __init__(self, sort: str, clients: int, flight: int, turn: int, cold: bool = False) -> None:
        self.core = Core()
        self.filler = bytearray(b"x") * COLD_BYTES if cold else None
        self.copy = bytearray(COLD_BYTES) if cold else None
        self.now = 10**12
        self.spent = 0
        self.turn = turn
        self.numbers = 0
        self.done = 0
        self.batches: list[Execute] = []
        self.answered: list[int] = []
        dims = (-1,) if sort == "preferred" else SHAPE[1:]
        inputs, outputs = (TensorSpec("x", "FP32", dims),), (TensorSpec("y", "FP32", (64,)),)
        policy = ModelPolicy("mlp", 1, 32, inputs, outputs, SORTS[sort])
        self.handle([(0, events.Deploy("mlp", (events.Target(1, 0, (InstanceSpec("mlp_0"),)),)))])
        self.worker = next(iter(self.core.state.instances))
        self.handle([(self.worker, events.Compiled(policy))])
        for peer in range(1, clients + 1):
            opened = events.Opened(peer, "uid:1000", "lane", ALL_ROLES)
            self.handle([(0, opened), (peer, Hello(1, 1, "bench", "memfd"))])
        self.answered = [peer for _ in range(flight // clients) for peer in range(1, clients + 1)]

    def handle(self, turn: list[tuple[int, Any]]) -> None:
        self.now += 100_000
        if self.filler is not None and self.copy is not None:
            memoryview(self.copy)[:] = self.filler
        start = perf_counter_ns()
        effects = self.core.handle(turn, self.now)
        self.core.deadline()
        self.spent += perf_counter_ns() - start
        for effect in effects:
            if type(effect) is Send:
                if type(effect.message) is Reply:
                    self.answered.append(effect.peer)
                    self.done += 1
                elif type(effect.message) is Execute:
                    self.batches.append(effect.message)

    def ask(self) -> None:
        """Send a new request for each answered one, `turn` of them per turn."""
        waiting, self.answered = self.answered, []
        for start in range(0, len(waiting), self.turn):
            turn = []
            for peer in waiting[start : start + self.turn]:
                self.numbers += 1
                turn.append((peer, Infer(self.numbers, "mlp", 0, (Tensor("x", "FP32", SHAPE, DATA),))))
            self.handle(turn)

    def work(self) -> None:
        """Complete the worker's batches one by one, with one message per batch as a real worker would send."""
        batches, self.batches = self.batches, []
        groups: list[list[Execute]] = []
        for order in batches:
            if order.join:
                groups[-1].append(order)
            else:
                groups.append([order])
        for position, group in enumerate(groups):
            rows = tuple(Row(work.request, (RESULT,)) for order in group for work in order.works)
            message = Done(group[0].batch, rows, (self.now - 300, self.now - 200, self.now - 100, self.now))
            turn: list[tuple[int, Any]] = [(self.worker, message)]
            if position + 1 < len(groups):
                following = groups[position + 1]
                message.next, message.through = following[0].batch, following[-1].batch
            self.handle(turn)
        if self.batches and self.core.state.instances[self.worker][1].running is None:
            first = self.batches[0]
            joined = [order.batch for order in self.batches if order.join == first.batch]
            self.handle([(self.worker, Started(first.batch, max([first.batch, *joined])))])
        if not groups:
            self.now += 1_000_000
            for effect in self.core.tick(self.now):
                if type(effect) is Send and type(effect.message) is Execute:
                    self.batches.append(effect.message)


def measure(sort: str, clients: int, flight: int, turn: int, requests: int, profile: bool, cold: bool) -> float:
    driver = Driver(sort, clients, flight, turn, cold)
    profiler = cProfile.Profile() if profile else None
    while driver.done < requests // 10:  # warm up
        driver.ask()
        driver.work()
    rounds = []
    if profiler:
        profiler.enable()
    for _ in range(ROUNDS):
        driver.spent = driver.done = 0
        while driver.done < requests // ROUNDS:
            driver.ask()
            driver.work()
        rounds.append(driver.spent / driver.done / 1000)
    if profiler:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats("shmserve|built-in|method", 25)
    return min(rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description="microseconds of the core per request")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--profile", action="store_true", help="also where the time goes, by function")
    parser.add_argument("--cold", action="store_true", help="with cold caches; takes longer: use fewer requests")
    given = parser.parse_args()
    print(f"{'model':>12} {'clients':>8} {'in flight':>10} {'turn':>5} {'us per request':>15}")
    for sort, clients, flight, turn in (
        ("plain", 1, 64, 32),
        ("plain", 1, 128, 64),
        ("plain", 8, 64, 8),
        ("plain", 1, 1, 1),
        ("preferred", 1, 64, 32),
        ("priorities", 1, 64, 32),
        ("ordered", 1, 64, 32),
        ("single", 1, 16, 16),
    ):
        spent = measure(sort, clients, flight, turn, given.requests, given.profile, given.cold)
        print(f"{sort:>12} {clients:>8} {flight:>10} {turn:>5} {spent:>15.2f}", flush=True)


if __name__ == "__main__":
    main()
