"""What one honest caller feels beside hostile clients, against what it feels beside processes that only burn as much.

In turn: nobody; a hostile client on each link; burners that take the processor time which those took and which the
server took for them, thread by thread, at the times at which it was taken. The rule of the file: in each turn the same
is measured, as measuring is work, too.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

from bench import models
from bench.child import Child
from bench.courses import Course, beyond
from bench.loading import TURN, Party, busy_seconds
from bench.processes import descendants
from bench.setting import Setting, serving

LINKS = {"lane": "lane.sock", "zmq": "broker.sock"}
BURNERS = 8
LEAST_SHARE = 0.01
"""Of a core: threads that take less are left out."""


@dataclass
class Felt:
    hostile: Party = field(default_factory=Party)
    burning: Party = field(default_factory=Party)
    nothing: Party = field(default_factory=Party)
    packets: int = 0

    def text(self) -> str:
        parties = (self.hostile, self.burning, self.nothing)
        words = [
            f"{name} {party.felt()}" for name, party in zip(("hostile", "burners", "nobody"), parties, strict=True)
        ]
        busy = [median(party.busy) for party in parties]
        return "; ".join(words) + f"; {busy[0]:.2f}, {busy[1]:.2f} and {busy[2]:.2f} CPU s/s; {self.packets:,} packets"


def run_felt(setting: Setting) -> Felt:
    path, repository = setting.onnx("mlp"), setting.repository("felt")
    models.write(repository, "mlp", models.onnx_model(models.MLP_SHAPE, 64, 32), {"model.onnx": path})
    models.write(repository, "identity", models.identity(max_batch=8), {})
    found, seconds = Felt(), setting.seconds * TURN
    with ExitStack() as stack:
        server = stack.enter_context(serving(repository))
        caller = stack.enter_context(
            Child("bench.loading:caller", url=server.lane, model="mlp", shape=models.MLP_SHAPE, oracle=str(path))
        )
        attacks = [stack.enter_context(_attack(link, str(server.runtime_dir / name))) for link, name in LINKS.items()]
        burners = [stack.enter_context(Child("bench.courses:burner")) for _ in range(BURNERS)]
        watcher = stack.enter_context(Child("bench.courses:watcher"))
        for child in (caller, watcher, *attacks, *burners):
            child.ready()
        serving_pids = [server.broker_pid(), *descendants(server.broker_pid())]
        watched = [*serving_pids, *(child.pid for child in attacks)]

        def turn(party: Party, orders: dict[Child, dict[str, Any]]) -> dict[str, Course]:
            """How much processor time each thread has taken when."""
            pids = [*watched, *(child.pid for child in burners)]
            before, start = [busy_seconds(pid) for pid in pids], perf_counter()
            watcher.tell(seconds=seconds, pids=watched)
            for child, order in orders.items():
                child.tell(seconds=seconds, **order)
            felt = caller.ask(seconds=seconds)
            found.packets += sum(child.answer().get("sent", 0) for child in orders)
            took = perf_counter() - start
            party.busy.append(sum((busy_seconds(pid) - was) / took for pid, was in zip(pids, before, strict=True)))
            party.p50_us.append(felt["median_us"])
            party.p99_us.append(felt["p99_us"])
            party.calls += felt["calls"]
            party.failed += felt["failed"]
            party.first += felt["first"]
            courses: dict[str, Course] = watcher.answer()["courses"]
            return courses

        for _ in range(setting.rounds):
            usual = turn(found.nothing, {})
            courses = turn(found.hostile, {child: {"count": 1 << 40} for child in attacks})
            over = [beyond(course, usual.get(thread, [])) for thread, course in courses.items()]
            over.sort(key=lambda course: -course[-1][1])
            orders = [course for course in over if course[-1][1] > LEAST_SHARE * seconds]
            assert len(orders) <= BURNERS, f"{len(orders)} threads took part"
            turn(found.burning, {child: {"course": c} for child, c in zip(burners, orders, strict=False)})
    return found


def _attack(link: str, path: str) -> Child:
    return Child("bench.hostile_client:attack", link=link, path=path, seed=len(link), model="identity")
