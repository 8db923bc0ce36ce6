"""What one honest caller feels beside hostile clients, against what it feels beside processes that only burn as much.

In turn: a hostile client on each link; burners that take the processor time which those took, and which the server took
for them; nobody. The rule of the file: a burner is a process, and takes its time in slices, as what it stands for did.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from threading import Event
from time import perf_counter, process_time

from bench import models
from bench.child import Answer, Child, Handler, Team
from bench.loading import TURN, Party, busy_seconds
from bench.setting import Setting, serving

SLICE_S = 0.005
LINKS = {"lane": "lane.sock", "zmq": "broker.sock"}


def burner() -> Handler:
    """Takes that share of one core, slice by slice; what it did not get in one slice, as others ran, it takes later."""
    wait = Event().wait

    def handle(seconds: float, share: float) -> Answer:
        start, begun = perf_counter(), process_time()
        slices = 0
        while (now := perf_counter()) < start + seconds:
            due = share * (now + SLICE_S - start)
            while process_time() - begun < due and perf_counter() < start + seconds:
                pass
            wait(max(0.0, now + SLICE_S - perf_counter()))
            slices += 1
        return {"slices": slices}

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
        pids = [server.broker_pid(), *(child.pid for child in (*attacks.children, *burners.children))]

        def turn(party: Party, beside: Team | None, orders: list[dict[str, float]]) -> list[float]:
            """The processor time per second that each process took."""
            before, start = [busy_seconds(pid) for pid in pids], perf_counter()
            for child, order in zip(beside.children if beside else (), orders, strict=True):
                child.tell(seconds=seconds, **order)
            felt = caller.ask(seconds=seconds)
            found.packets += sum(child.answer().get("sent", 0) for child in (beside.children if beside else ()))
            took = perf_counter() - start
            shares = [(busy_seconds(pid) - was) / took for pid, was in zip(pids, before, strict=True)]
            party.p50_us.append(felt["median_us"])
            party.p99_us.append(felt["p99_us"])
            party.busy.append(sum(shares))
            party.calls += felt["calls"]
            party.failed += felt["failed"]
            party.first += felt["first"]
            return shares

        for _ in range(setting.rounds):
            (idle, *_) = turn(found.nothing, None, [])
            server_share, *shares = turn(found.hostile, attacks, [{"count": 1 << 40}] * len(LINKS))
            shares = [max(0.0, server_share - idle), *shares[: len(LINKS)]]
            turn(found.burning, burners, [{"share": share} for share in shares])
    return found


def _attack(link: str, path: str) -> Child:
    return Child("bench.hostile_client:attack", link=link, path=path, seed=len(link), model="identity")
