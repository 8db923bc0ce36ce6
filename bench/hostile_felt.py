"""What one honest caller feels beside hostile clients, against what it feels beside processes that only burn as much.

In turn: a hostile client on each link; burners that take the processor time which those took, at the times at which
they took it, and what the server took for them, evenly; nobody. The rule of the file: a burner is a process, as what it
stands for was.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from threading import Event
from time import perf_counter, process_time
from typing import Any

from bench import models
from bench.child import Answer, Child, Handler, Team
from bench.loading import TURN, Party, busy_seconds
from bench.processes import descendants
from bench.setting import Setting, serving

SLICE_S = 0.005
LINKS = {"lane": "lane.sock", "zmq": "broker.sock"}


def burner() -> Handler:
    """Has taken so much processor time at each time of the profile; what others took from it, it takes later."""
    wait = Event().wait

    def handle(seconds: float, profile: list[tuple[float, float]]) -> Answer:
        start, begun = perf_counter(), process_time()
        for at, due in profile:
            while process_time() - begun < due and perf_counter() < start + seconds:
                pass
            wait(max(0.0, start + min(at, seconds) - perf_counter()))
        return {}

    return handle


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
    with (
        serving(repository) as server,
        Child("bench.loading:caller", url=server.lane, model="mlp", shape=models.MLP_SHAPE, oracle=str(path)) as caller,
        Team([_attack(link, str(server.runtime_dir / name)) for link, name in LINKS.items()]) as attacks,
        Team([Child("bench.hostile_felt:burner") for _ in range(len(LINKS) + 1)]) as burners,
    ):
        caller.ready()
        serving_pids = [server.broker_pid(), *descendants(server.broker_pid())]
        pids = [*serving_pids, *(child.pid for child in (*attacks.children, *burners.children))]

        def turn(party: Party, beside: Team | None, orders: list[dict[str, Any]]) -> tuple[float, list[Any]]:
            """The processor time per second that the server took, and what the others answered."""
            before, start = [busy_seconds(pid) for pid in pids], perf_counter()
            for child, order in zip(beside.children if beside else (), orders, strict=True):
                child.tell(seconds=seconds, **order)
            felt = caller.ask(seconds=seconds)
            answers = [child.answer() for child in (beside.children if beside else ())]
            found.packets += sum(answer.get("sent", 0) for answer in answers)
            took = perf_counter() - start
            shares = [(busy_seconds(pid) - was) / took for pid, was in zip(pids, before, strict=True)]
            party.p50_us.append(felt["median_us"])
            party.p99_us.append(felt["p99_us"])
            party.busy.append(sum(shares))
            party.calls += felt["calls"]
            party.failed += felt["failed"]
            party.first += felt["first"]
            return sum(shares[: len(serving_pids)]), answers

        for _ in range(setting.rounds):
            idle, _ = turn(found.nothing, None, [])
            busy, answers = turn(found.hostile, attacks, [{"count": 1 << 40}] * len(LINKS))
            share = max(0.0, busy - idle)
            evenly = [(n * SLICE_S, (n + 1) * SLICE_S * share) for n in range(int(seconds / SLICE_S) + 1)]
            profiles = [evenly, *(answer["profile"] for answer in answers)]
            turn(found.burning, burners, [{"profile": profile} for profile in profiles])
    return found


def _attack(link: str, path: str) -> Child:
    return Child("bench.hostile_client:attack", link=link, path=path, seed=len(link), model="identity")
