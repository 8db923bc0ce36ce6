"""The measures, by name. Each alternates its parties within one run and returns rows with their bounds.

Invariant: both sides of a ratio are taken in the same rounds, and both are reported in microseconds beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

from bench.lib import models, processes
from bench.lib.child import Child, Team
from bench.lib.clock import alternate
from bench.lib.setting import Setting, serving
from bench.lib.table import Row, micros
from bench.suites.lengths import lengths, minilm
from bench.suites.overload import overload
from bench.suites.python import python
from bench.suites.simulated import simulator
from shmserve.repo import samples

Measure = Callable[[Setting], list[Row]]
MIB = 1 << 20


def _rate(child: Child, setting: Setting) -> Callable[[], float]:
    return lambda: float(child.ask(seconds=setting.seconds)["per_s"])


def _team_rate(team: Team, setting: Setting) -> Callable[[], float]:
    return lambda: float(sum(answer["per_s"] for answer in team.ask(seconds=setting.seconds)))


def _median(child: Child, setting: Setting, **order: Any) -> Callable[[], float]:
    return lambda: float(child.ask(seconds=setting.seconds, **order)["median_us"])


def _share(name: str, rates: list[float], bare: list[float], at_least: float) -> Row:
    rate, limit = median(rates), median(bare)
    beside = f"{rate:,.0f}/s, {micros(1e6 / rate)} a row; bare {limit:,.0f}/s, {micros(1e6 / limit)} a row"
    return Row(name, rate / limit, "of bare", at_least=at_least, beside=beside)


def throughput(setting: Setting) -> list[Row]:
    """mlp as a share of the bare engine at batch 32: lane and ZeroMQ with 64 in flight, 8 processes with 8 each."""
    path = setting.onnx("mlp")
    repository = setting.repository("mlp")
    models.write(repository, "mlp", models.onnx_model(models.MLP_SHAPE, 64, 32), {"model.onnx": path})
    load = partial(Child, "bench.lib.load:stream", model="mlp", shape=models.MLP_SHAPE, oracle=str(path))
    with (
        serving(repository) as server,
        Child("bench.lib.bare_engine:engine", model=str(path), batch=32, shape=models.MLP_SHAPE) as bare,
        load(url=server.lane, flight=64) as lane,
        load(url=server.zmq, flight=64) as zmq,
        Team([load(url=server.lane, flight=8) for _ in range(8)]) as eight,
    ):
        bares, lanes, zmqs, eights = alternate(
            setting.rounds,
            _rate(bare, setting),
            _rate(lane, setting),
            _rate(zmq, setting),
            _team_rate(eight, setting),
        )
    return [
        _share("throughput, lane, 64 in flight", lanes, bares, 0.85),
        _share("throughput, ZeroMQ, 64 in flight", zmqs, bares, 0.65),
        _share("throughput, lane, 8 processes x 8", eights, bares, 0.65),
    ]


def cnn(setting: Setting) -> list[Row]:
    """A CNN with 600 KB inputs in shared memory, 2 instances, 16 in flight: share of two bare processes."""
    path = setting.onnx("cnn")
    repository = setting.repository("cnn")
    models.write(repository, "cnn", models.onnx_model(models.CNN_SHAPE, 1000, 8, 2), {"model.onnx": path})
    oracle = {"shape": models.CNN_SHAPE, "oracle": str(path), "shared": True}
    engine = partial(Child, "bench.lib.bare_engine:engine", model=str(path), batch=1, shape=models.CNN_SHAPE)
    with (
        serving(repository) as server,
        Team([engine() for _ in range(2)]) as bare,
        Child("bench.lib.load:stream", url=server.lane, model="cnn", flight=16, **oracle) as load,
    ):
        bares, rates = alternate(setting.rounds, _team_rate(bare, setting), _rate(load, setting))
    return [_share("CNN, 600 KB inputs, 2 instances, 16 in flight", rates, bares, 0.95)]


RELAYS = {
    "seqpacket": [("bench.lib.relays:seqpacket", way) for way in ("blocking", "epoll")],
    "zeromq": [("bench.lib.relays:zeromq", way) for way in ("blocking", "poll")],
}


def lone(setting: Setting) -> list[Row]:
    """One request at a time over lane and ZeroMQ: time beyond the bare run, in round trips of a raw relay."""
    path = setting.onnx("mlp")
    repository = setting.repository("lone")
    models.write(repository, "mlp", models.onnx_model(models.MLP_SHAPE, 64, 32), {"model.onnx": path})
    call = partial(Child, "bench.lib.load:lone", model="mlp", shape=models.MLP_SHAPE, oracle=str(path))
    sides = [("lane", "lane", "seqpacket", 3.0), ("ZeroMQ", "zmq", "zeromq", 1.5)]
    rows = []
    with (
        serving(repository) as server,
        Child("bench.lib.bare_engine:engine", model=str(path), batch=1, shape=models.MLP_SHAPE) as bare,
    ):
        for name, link, kind, at_most in sides:
            ways = [(target, way, size) for target, way in RELAYS[kind] for size in (60, 1024)]
            children = [Child(target, size=size, relay=way) for target, way, size in ways]
            with call(url=getattr(server, link)) as caller, Team(children) as relays:
                parties = [bare, caller, *relays.children]
                result = alternate(setting.rounds, *(_median(party, setting) for party in parties))
            alone, whole, *trips = (median(values) for values in result)
            trip = min(trips)
            named = [f"{way} {size} B {micros(t)}" for (_, way, size), t in zip(ways, trips, strict=True)]
            times = f"{micros(whole)} whole, bare {micros(alone)}, over it {micros(whole - alone)}"
            measure, beside = f"one request, {name}, over bare", f"{times}; {', '.join(named)}"
            rows.append(Row(measure, (whole - alone) / trip, "relay trips", at_most=at_most, beside=beside))
    return rows


def large_input(setting: Setting) -> list[Row]:
    """A model that returns the first element: a 64 MiB input from empty() compared with one of 4 KiB."""
    repository = setting.repository("first")
    models.write(repository, "first", models.first_element(), {"model.py": models.FIRST})
    sizes = [64 * MIB, 4096]
    with (
        serving(repository) as server,
        Child("bench.lib.load:first", url=server.lane, model="first", sizes=sizes) as load,
    ):
        times = alternate(setting.rounds, *(_median(load, setting, size=size) for size in sizes))
    large, small = (median(values) for values in times)
    beside = f"64 MiB {micros(large)}, 4 KiB {micros(small)}"
    return [Row("first element of 64 MiB, over 4 KiB", large / small, "x", at_most=1.3, beside=beside)]


def large_identity(setting: Setting) -> list[Row]:
    """Identity of 16 MiB, from empty() into empty(), compared with one warm memcpy of 16 MiB."""
    repository = setting.repository("identity")
    models.write(repository, "identity", models.identity(), {})
    with (
        serving(repository) as server,
        Child("bench.lib.bare_engine:memcpy", size=16 * MIB) as copy,
        Child("bench.lib.load:whole", url=server.lane, model="identity", size=16 * MIB) as load,
    ):
        copies, times = alternate(setting.rounds, _median(copy, setting), _median(load, setting))
    beside = f"request {micros(median(times))}, memcpy {micros(median(copies))}"
    return [
        Row("identity, 16 MiB in and out, over memcpy", median(times) / median(copies), "x", at_most=2.0, beside=beside)
    ]


def ensemble(setting: Setting) -> list[Row]:
    """Three identities of 16 MiB in a row, as an ensemble: compared with one of them, three calls, and other sizes."""
    from bench.suites.ensemble import READ, SIZES, run_ensemble

    result = run_ensemble(setting)
    small, middle, large = SIZES
    over = {size: result.ensemble[size] / result.one[size] for size in SIZES}
    times = f"ensemble {micros(result.ensemble[middle])}, one step {micros(result.one[middle])}"
    calls = result.ensemble[middle] / result.calls[middle]
    shares = ", ".join(f"{size // MIB} MiB {over[size]:.2f}" for size in SIZES)
    looks = f"64 MiB {micros(result.readers[READ[1]])}, 4 KiB {micros(result.readers[READ[0]])}"
    readers = result.readers[READ[1]] / result.readers[READ[0]]
    beside = f"three calls {micros(result.calls[middle])}, {times}"
    return [
        Row("ensemble of 3 identities, 16 MiB, over one", over[middle], "x", at_most=1.45, beside=times),
        Row("ensemble of 3 identities, over three calls", calls, "x", at_most=1.0, beside=beside),
        Row("ensemble over one, 64 MiB against 1 MiB", over[large] / over[small], "x", at_most=1.2, beside=shares),
        Row("3 steps that read 64 MiB, over 4 KiB", readers, "x", at_most=1.3, beside=looks),
    ]


def memory(setting: Setting) -> list[Row]:
    """Private memory of the broker with 10 models and 64 clients, without shared segments."""
    repository = setting.repository("memory")
    names = [f"model{number}" for number in range(10)]
    for name in names:
        models.write(repository, name, models.identity(), {})
    with serving(repository) as server:
        before = processes.private_bytes(server.broker_pid())
        sixteen = partial(Child, "bench.lib.load:many", urls=[server.lane, server.zmq], models=names, each=16)
        with Team([sixteen() for _ in range(4)]) as clients:
            clients.ask(requests=40)
            used = processes.private_bytes(server.broker_pid())
    beside = f"{before / MIB:.1f} MiB before the first client; 4 processes x 16 clients, 40 requests each"
    return [Row("broker memory, 10 models, 64 clients", used / MIB, "MiB", at_most=120.0, beside=beside)]


def startup(setting: Setting) -> list[Row]:
    """Time from serve to ready with the sample models, compared with a script that creates the same sessions."""
    examples = setting.repository("samples")
    samples.build(examples, show=lambda line: None)

    def serve() -> float:
        start = perf_counter()
        with serving(examples):
            return perf_counter() - start

    def script() -> float:
        start = perf_counter()
        with Child("bench.lib.bare_engine:create_sessions", repository=str(examples)) as child:
            child.ready()
            return perf_counter() - start

    script()  # the first run reads the files from disk
    serves, scripts = (median(values) for values in alternate(max(3, setting.rounds), serve, script))
    beside = f"serve to ready {serves:.2f} s, script {scripts:.2f} s"
    return [Row("serve to ready, beyond the script", serves - scripts, "s", at_most=1.0, beside=beside)]


def loading(setting: Setting) -> list[Row]:
    """Loading and reloading models beside one caller: failures, and its p99 compared with the same work outside the
    server.
    """
    from bench.suites.loading import run_loading

    result = run_loading(setting)
    other, own = (result.loads, result.loads_outside), (result.reloads, result.reloads_outside)
    unit = "x outside"
    return [
        Row(
            "p99 while another model loads", other[0].over(other[1]), unit, at_most=1.2, beside=result.compared(*other)
        ),
        Row("p99 while its own model reloads", own[0].over(own[1]), unit, beside=result.compared(*own)),
        Row("failed while models load and reload", result.failed, "", at_most=0, beside=result.counted()),
    ]


def soak(setting: Setting) -> list[Row]:
    """Mixed soak, 8 client processes: requests lost, answered twice or answered wrongly, and leaked resources."""
    from bench.soak.run import run_soak

    result = run_soak(setting.repository("soak"), setting.soak_seconds)
    bad = result.lost + result.twice + result.wrong
    rows = [Row("soak: lost, answered twice, wrong", bad, "", at_most=0, beside=result.text())]
    rows.append(Row("soak: left behind (processes, segments)", result.leaked, "", at_most=0))
    return rows


def hostile(setting: Setting) -> list[Row]:
    """Hostile clients, 200,000 messages or the time of the soak: wrong answers to an honest client beside them."""
    from bench.hostile.run import run_hostile

    result = run_hostile(setting.repository("hostile"), 200_000, setting.soak_seconds)
    return [Row("hostile client: harm to the honest one", result.harm, "", at_most=0, beside=result.text())]


ALL: dict[str, Measure] = {
    "throughput": throughput,
    "cnn": cnn,
    "lone": lone,
    "large-input": large_input,
    "large-identity": large_identity,
    "ensemble": ensemble,
    "memory": memory,
    "startup": startup,
    "loading": loading,
    "soak": soak,
    "hostile": hostile,
    "simulator": simulator,
    "overload": overload,
    "lengths": lengths,
    "minilm": minilm,
    "python": python,
}
