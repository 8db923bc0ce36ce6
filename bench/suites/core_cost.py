"""The core's cost per request: turns of 32 Infer with 1 KB inline, batches of 32, and their Done; the same in columns;
the same for callers behind a gateway; and requests of every other kind, as the simulator's clients and workers make
them.

    python -m bench.suites.core_cost [--requests 100000] [--profile] [--cold] [--only NAME]

The core is driven as by the broker, but without links: nothing is encoded, and a worker answers immediately. Only
`Core.handle` is timed, not the creation of messages. The fake worker processes the messages that it gets, so that the
core does the same work as in a server. With `--cold`, the CPU caches are filled with other data before each turn, as
other processes and tensors do in a server.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
from collections.abc import Iterable
from time import perf_counter_ns
from typing import Any

from msgspec.structs import replace

from shmserve.core import events
from shmserve.core.core import Core
from shmserve.core.effects import Effect, Send
from shmserve.core.limits import Limits
from shmserve.core.policy import BatchPolicy, InstanceSpec, ModelPolicy, SequencePolicy, StepPolicy, TensorSpec
from shmserve.protocol.messages import Columns, Hello, Infer, InferBatch, Reply, ReplyBatch, Tensor, TensorForm
from shmserve.protocol.roles import ALL_ROLES, FORWARD
from shmserve.protocol.worker_messages import Done, Execute, Row, Started
from shmserve.sim import Closed, Constant, Load, Plan, SimModel, simulate

SHAPE = (1, 256)
DATA = bytes(1024)
ROUNDS = 50
"""The best round is reported; the others were disturbed."""
SIMULATED_ROUNDS = 10
COLD_BYTES = 32 << 20
"""Bytes copied before each turn with `--cold`: source and copy together exceed the caches."""
RESULT = Tensor("y", "FP32", (1, 64), bytes(256))
FORMS, RESULT_FORMS = (TensorForm("x", "FP32", SHAPE[1:]),), (TensorForm("y", "FP32", (64,)),)
SORTS: dict[str, BatchPolicy | None] = {
    "plain": BatchPolicy(),
    "preferred": BatchPolicy(preferred=(16, 32), delay_ns=100_000),
    "priorities": BatchPolicy(levels=3, default_level=2),
    "ordered": BatchPolicy(preserve_ordering=True),
    "single": None,
    "columns": BatchPolicy(),
}
KINDS = (
    ("plain", 1, 64, 32, 0),
    ("plain", 1, 128, 64, 0),
    ("plain", 8, 64, 8, 0),
    ("plain", 1, 1, 1, 0),
    ("plain", 1, 64, 32, 1),
    ("plain", 1, 64, 32, 64),
    ("preferred", 1, 64, 32, 0),
    ("priorities", 1, 64, 32, 0),
    ("ordered", 1, 64, 32, 0),
    ("single", 1, 16, 16, 0),
    ("columns", 1, 64, 32, 0),
    ("columns", 1, 64, 32, 1),
)
"""Sort, clients, requests in flight, requests per turn, and the callers for whom a client speaks in turn."""


class Driver:
    """Clients with a number of requests in flight, and one worker. With `callers`, the clients are gateways."""

    def __init__(self, sort: str, clients: int, flight: int, turn: int, callers: int = 0, cold: bool = False) -> None:
        self.core = Core()
        self.filler = bytearray(b"x") * COLD_BYTES if cold else None
        self.copy = bytearray(COLD_BYTES) if cold else None
        self.now = 10**12
        self.spent = 0
        self.turn = turn
        self.columns = sort == "columns"
        self.callers = [f"caller-{number}" for number in range(callers)] or [""]
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
            roles = ALL_ROLES | FORWARD if callers else ALL_ROLES
            opened = events.Opened(peer, "uid:1000", "lane", roles)
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
                elif type(effect.message) is ReplyBatch:
                    count = len(effect.message.columns.requests)
                    self.answered += [effect.peer] * count
                    self.done += count
                elif type(effect.message) is Execute:
                    self.batches.append(effect.message)

    def ask(self) -> None:
        """Sends a new request for each answered one, `turn` of them per turn."""
        waiting, self.answered = self.answered, []
        for start in range(0, len(waiting), self.turn):
            turn: list[tuple[int, Any]] = []
            peers = waiting[start : start + self.turn]
            numbers = range(self.numbers + 1, self.numbers + 1 + len(peers))
            self.numbers += len(peers)
            if self.columns:
                columns = Columns(FORMS, tuple(numbers), (1,) * len(peers), ((DATA,),) * len(peers))
                turn.append((peers[0], InferBatch("mlp", 0, columns, payer=self.callers[0])))
            else:
                for peer, number in zip(peers, numbers, strict=True):
                    tensor = Tensor("x", "FP32", SHAPE, DATA)
                    caller = self.callers[number % len(self.callers)]
                    turn.append((peer, Infer(number, "mlp", 0, (tensor,), payer=caller)))
            self.handle(turn)

    def work(self) -> None:
        """Completes the worker's batches one by one, with one message per batch as a real worker would send."""
        batches, self.batches = self.batches, []
        groups: list[list[Execute]] = []
        for order in batches:
            if order.join:
                groups[-1].append(order)
            else:
                groups.append([order])
        for position, group in enumerate(groups):
            times = (self.now - 300, self.now - 200, self.now - 100, self.now)
            if self.columns:
                numbers = tuple(n for order in group if order.columns is not None for n in order.columns.requests)
                count = len(numbers)
                answers = Columns(RESULT_FORMS, numbers, (1,) * count, ((RESULT.data,),) * count)  # type: ignore[arg-type]
                message = Done(group[0].batch, (), times, columns=answers)
            else:
                rows = tuple(Row(work.request, (RESULT,)) for order in group for work in order.work_items)
                message = Done(group[0].batch, rows, times)
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


def measure(
    sort: str, clients: int, flight: int, turn: int, callers: int, requests: int, profile: bool, cold: bool
) -> float:
    driver = Driver(sort, clients, flight, turn, callers, cold)
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


def _policy(name: str, width: int = 4, **more: Any) -> ModelPolicy:
    ends = (TensorSpec("x", "FP32", (width,)),), (TensorSpec("y", "FP32", (width,)),)
    return ModelPolicy(name, 1, 8, *ends, BatchPolicy(), **more)


def _served(policy: ModelPolicy, **more: Any) -> SimModel:
    return SimModel(policy, (InstanceSpec(f"{policy.name}_0"),), Constant(1_000_000), **more)


def _simulated() -> dict[str, tuple[tuple[SimModel, ...], int, Limits]]:
    """Name -> models, the last of which the clients call, requests in flight, and limits."""
    steps = StepPolicy("m", 0, (("x", "x"),), (("y", "t"),)), StepPolicy("m", 0, (("x", "t"),), (("y", "y"),))
    wide = 4096
    both = replace(_policy("both", wide, steps=steps), batching=None)
    sequences = replace(_policy("m", sequence=SequencePolicy(True, 8, 10**9)), batching=None)
    plain, no = Limits(), Limits(leases=0)
    return {
        "shared memory": ((_served(_policy("m", wide)),), 16, no),
        "steps": ((_served(_policy("m", wide)), SimModel(both)), 16, no),
        "calls": ((_served(_policy("m", wide)), _served(_policy("parent", wide), calls=("m",))), 16, no),
        "sequences": ((_served(sequences),), 16, no),
        "streams": ((_served(_policy("m", decoupled=True), responses=(4, 4)),), 16, no),
        "leases": ((_served(_policy("m")),), 1, plain),
    }


def measure_simulated(name: str, requests: int) -> float:
    models, flight, limits = _simulated()[name]
    plan = Plan(models, (Load(models[-1].policy.name, Closed(flight)),), requests=requests, limits=limits)
    spent = 0
    handle, tick = Core.handle, Core.tick

    def timed_handle(core: Core, turn: Iterable[Any], now: int) -> list[Effect]:
        nonlocal spent
        start = perf_counter_ns()
        effects = handle(core, turn, now)
        spent += perf_counter_ns() - start
        return effects

    def timed_tick(core: Core, now: int) -> list[Effect]:
        nonlocal spent
        start = perf_counter_ns()
        effects = tick(core, now)
        spent += perf_counter_ns() - start
        return effects

    Core.handle, Core.tick = timed_handle, timed_tick  # type: ignore[method-assign,assignment]
    try:
        rounds = []
        for _ in range(SIMULATED_ROUNDS):
            spent = 0
            simulate(plan)
            rounds.append(spent / requests / 1000)
        return min(rounds)
    finally:
        Core.handle, Core.tick = handle, tick  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description="microseconds of the core per request")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--profile", action="store_true", help="also where the time goes, by function")
    parser.add_argument("--cold", action="store_true", help="with cold caches; takes longer: use fewer requests")
    parser.add_argument("--only", metavar="NAME", default="", help="only this kind of request")
    args = parser.parse_args()
    print(f"{'model':>13} {'clients':>7} {'in flight':>10} {'turn':>5} {'callers':>8} {'us per request':>15}")
    for kind in KINDS:
        sort, clients, flight, turn, callers = kind
        if args.only in ("", sort):
            spent = measure(*kind, args.requests, args.profile, args.cold)
            print(f"{sort:>13} {clients:>7} {flight:>10} {turn:>5} {callers or '':>8} {spent:>15.2f}", flush=True)
    for name, (_, flight, _) in _simulated().items():
        if args.only in ("", name):
            spent = measure_simulated(name, args.requests // 50)
            print(f"{name:>13} {'':>7} {flight:>10} {'':>5} {'':>8} {spent:>15.2f}", flush=True)


if __name__ == "__main__":
    main()
