"""The latency of an honest caller beside hostile clients, compared with processes that only use the same processor
time.

The turns: nothing; a hostile client on each link; burners that replay the processor time used by the hostile clients,
and by the server on their behalf. There is one burner for each thread of the hostile clients, in the same session, and
one for each process of the server, in a separate session like the server's. Invariant: every turn takes the same
measurements, because these also use processor time.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

from bench.lib import models
from bench.lib.child import Child, SessionChild
from bench.lib.cpu_courses import Course, beyond, together
from bench.lib.processes import busy_seconds, descendants
from bench.lib.setting import Setting, serving
from bench.suites.loading import TURN, Party

LINKS = {"lane": "lane.sock", "zmq": "broker.sock"}
BURNERS = 8
MIN_SHARE = 0.01
"""Share of a core below which a thread is ignored."""


@dataclass
class LatencyResult:
    hostile: Party = field(default_factory=Party)
    burning: Party = field(default_factory=Party)
    nothing: Party = field(default_factory=Party)
    packets: int = 0

    def text(self) -> str:
        parties = (self.hostile, self.burning, self.nothing)
        words = [
            f"{name} {party.latency()}" for name, party in zip(("hostile", "burners", "nobody"), parties, strict=True)
        ]
        busy = [median(party.busy) for party in parties]
        return "; ".join(words) + f"; {busy[0]:.2f}, {busy[1]:.2f} and {busy[2]:.2f} CPU s/s; {self.packets:,} packets"


def run_latency(setting: Setting) -> LatencyResult:
    path, repository = setting.onnx("mlp"), setting.repository("latency")
    models.write(repository, "mlp", models.onnx_model(models.MLP_SHAPE, 64, 32), {"model.onnx": path})
    models.write(repository, "identity", models.identity(max_batch=8), {})
    result, seconds = LatencyResult(), setting.seconds * TURN
    with ExitStack() as stack:
        server = stack.enter_context(serving(repository))
        caller = stack.enter_context(
            Child("bench.suites.loading:caller", url=server.lane, model="mlp", shape=models.MLP_SHAPE, oracle=str(path))
        )
        attacks = [stack.enter_context(_attack(link, str(server.runtime_dir / name))) for link, name in LINKS.items()]
        burners = [stack.enter_context(Child("bench.lib.cpu_courses:burner")) for _ in range(BURNERS)]
        apart = [stack.enter_context(SessionChild("bench.lib.cpu_courses:burner")) for _ in range(BURNERS)]
        watcher = stack.enter_context(Child("bench.lib.cpu_courses:watcher"))
        for child in (caller, watcher, *attacks, *burners, *apart):
            child.ready()
        serving_pids = [server.broker_pid(), *descendants(server.broker_pid())]
        watched = [*serving_pids, *(child.pid for child in attacks)]

        def turn(party: Party, orders: dict[Child, dict[str, Any]]) -> dict[str, Course]:
            """Runs a turn; returns each thread's processor time over time."""
            pids = [*watched, *(child.pid for child in (*burners, *apart))]
            before, start = [busy_seconds(pid) for pid in pids], perf_counter()
            watcher.tell(seconds=seconds, pids=watched)
            for child, order in orders.items():
                child.tell(seconds=seconds, **order)
            latency = caller.ask(seconds=seconds)
            result.packets += sum(child.answer().get("sent", 0) for child in orders)
            took = perf_counter() - start
            party.busy.append(sum((busy_seconds(pid) - was) / took for pid, was in zip(pids, before, strict=True)))
            party.p50_us.append(latency["median_us"])
            party.p99_us.append(latency["p99_us"])
            party.calls += latency["calls"]
            party.failed += latency["failed"]
            party.first += latency["first"]
            courses: dict[str, Course] = watcher.answer()["courses"]
            return courses

        for _ in range(setting.rounds):
            usual = turn(result.nothing, {})
            courses = turn(result.hostile, {child: {"count": 1 << 40} for child in attacks})
            over = {thread: beyond(course, usual.get(thread, [])) for thread, course in courses.items()}
            of_server = [[over[thread] for thread in over if int(thread.split()[0]) == pid] for pid in serving_pids]
            of_attacks = [course for thread, course in over.items() if int(thread.split()[0]) not in serving_pids]
            orders = _handed_out(burners, of_attacks, seconds)
            orders |= _handed_out(apart, [together(threads) for threads in of_server if threads], seconds)
            turn(result.burning, orders)
    return result


def _handed_out(burners: list[Child], courses: list[Course], seconds: float) -> dict[Child, dict[str, Any]]:
    results = [course for course in courses if course[-1][1] > MIN_SHARE * seconds]
    assert len(results) <= len(burners), f"{len(results)} took part"
    return {child: {"course": course} for child, course in zip(burners, results, strict=False)}


def _attack(link: str, path: str) -> Child:
    return Child("bench.hostile.client:attack", link=link, path=path, seed=len(link), model="identity")
