"""shmserve on Ray: `python -m bench.fleet.on_ray [calls] [arrays] [node] [offline]`, in an environment with Ray.

calls: latency of a small request over each path, compared with the same server without Ray. arrays: latency of a large
request, also expressed in copies of the array. node: throughput of three nodes, one of which is killed. offline: rows
per second of processor time in map_batches, compared with the same model in a plain actor.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.lib import models
from bench.lib.bare_engine import session
from bench.lib.processes import busy_seconds
from shmserve.testing import Server
from tests.ray.cluster import Place, processes_of, started
from tests.ray.load import over_handle, over_http, write_times
from tests.support.gateway.rpc import Rpcs, infer_request

CALLS = 400
BIG = 16 << 20
BIG_CALLS = 15
SETTLE_S = 10.0
WATCH_S = 60.0
SLOT_S = 1.0
BUSY_LOAD = 3.0
"""A load average above this suggests that other programs disturb the measurement."""


def table(title: str, rows: list[tuple[str, str]]) -> None:
    print(f"\n{title}")
    for name, text in rows:
        print(f"  {name:34} {text}", flush=True)


def times(call: Callable[[], object], count: int) -> list[float]:
    """Milliseconds of each call, after some warm-up calls."""
    for _ in range(max(3, count // 10)):
        call()
    results = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        results.append((time.perf_counter() - began) * 1e3)
    return sorted(results)


def shown(durations: list[float]) -> str:
    return f"median {median(durations):7.3f} ms, 90 % within {durations[len(durations) * 9 // 10]:7.3f} ms"


# ------------------------------------------------------------------------------------------------ calls and arrays


def http_call(port: int) -> Callable[[], object]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    document = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 16], "data": [0.5] * 16}]}
    body = json.dumps(document)

    def call() -> object:
        connection.request("POST", "/v2/models/same/infer", body)
        answer = connection.getresponse()
        assert answer.status == 200
        return answer.read()

    return call


def grpc_call(port: int) -> Callable[[], object]:
    x = np.full((1, 16), 0.5, np.float32)
    request = infer_request("same", {"x": ("FP32", x, x.tobytes())})
    rpcs = Rpcs(port)
    return lambda: rpcs.ModelInfer(request, timeout=60)


def repository(root: Path) -> Path:
    models.write(root, "same", models.identity(max_batch=8), {})
    return root


def calls(place: Place, root: Path) -> None:
    from shmserve.ray import Handle

    x = np.full((1, 16), 0.5, np.float32)
    rows = []
    with Server(root, gateway=True) as server, server.client() as client:
        ports = {name: int(where.rpartition(":")[2]) for name, where in server.endpoints.items()}
        rows.append(("Client", shown(times(lambda: client.infer("same", {"x": x}), CALLS))))
        rows.append(("HTTP of the server", shown(times(http_call(ports["http"]), CALLS))))
        rows.append(("gRPC of the server", shown(times(grpc_call(ports["grpc"]), CALLS))))
    handle = Handle()
    rows.append(("Handle", shown(times(lambda: handle.infer("same", {"x": x}), CALLS))))
    rows.append(("HTTP through Serve", shown(times(http_call(place.http), CALLS))))
    rows.append(("gRPC through Serve", shown(times(grpc_call(place.grpc), CALLS))))
    table("A request with 64 bytes, one caller", rows)


def arrays(place: Place, root: Path) -> None:
    import ray

    from shmserve.ray import Handle

    x = np.ones((1, BIG // 4), np.float32)
    to = np.empty_like(x)
    copy = median(times(lambda: np.copyto(to, x), BIG_CALLS))
    rows = [("a copy of it (numpy)", f"{copy:.2f} ms")]

    def add(name: str, call: Callable[[], object], less: float) -> None:
        result = median(times(call, BIG_CALLS))
        rows.append((name, f"{result:.2f} ms, less that of a small one: {(result - less) / copy:.1f} copies"))

    with Server(root) as server, server.client() as client:
        small = median(times(lambda: client.infer("same", {"x": x[:, :16]}), CALLS))
        add("Client", lambda: client.infer("same", {"x": x}), small)
    handle, stored = Handle(), ray.put(x)
    small = median(times(lambda: handle.infer("same", {"x": x[:, :16]}), CALLS))
    put = median(times(lambda: ray.get(ray.put(x)), BIG_CALLS))
    rows.append(("ray.put and ray.get", f"{put:.2f} ms, {put / copy:.1f} copies"))
    add("Handle, array", lambda: handle.infer("same", {"x": x}), small)
    add("Handle, reference", lambda: handle.infer("same", {"x": stored}), small)
    table(f"A request with {BIG >> 20} MiB, in and out", rows)


# ------------------------------------------------------------------------------------------------ a node is killed


class CallRate:
    """Responses per time slot, to three threads over handles and three over HTTP."""

    def __init__(self, place: Place) -> None:
        self.slots: Counter[int] = Counter()
        self.pids: dict[int, set[int]] = {}
        self.failed: list[str] = []
        self._place = place
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._send, args=(way,)) for way in (over_handle, over_http) for _ in range(3)
        ]

    def _send(self, way: Any) -> None:
        with way(self._place) as send:
            for value in itertools.cycle(map(float, range(1, 100))):
                if self._over.is_set():
                    return
                try:
                    answer, pid = send("twice", value)
                except Exception as error:
                    with self._lock:
                        self.failed.append(str(error))
                    continue
                assert answer == 2 * value
                slot = int(time.monotonic() / SLOT_S)
                with self._lock:
                    self.slots[slot] += 1
                    self.pids.setdefault(slot, set()).add(pid)

    def __enter__(self) -> CallRate:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def node(place: Place, root: Path) -> None:
    pause = threading.Event()
    with CallRate(place) as rate:
        pause.wait(SETTLE_S)
        victim = place.worker_node()
        lost = processes_of(victim)
        killed = time.monotonic()
        place.kill(victim)
        removed = time.monotonic()
        place.add_node()
        added = time.monotonic()
        pause.wait(WATCH_S)
    before = [rate.slots[slot] for slot in range(int((killed - SETTLE_S) / SLOT_S) + 2, int(killed / SLOT_S))]
    full = median(before)
    after = range(int(killed / SLOT_S) + 1, int((killed + WATCH_S) / SLOT_S) - 1)
    whole = [slot for slot in after if len(rate.pids.get(slot, set()) - lost) == 3]
    back = [slot for slot in after if rate.slots[slot] >= 0.9 * full]
    table(
        "Three nodes, six callers, one node killed with SIGKILL and replaced",
        [
            ("rate before", f"{full / SLOT_S:.0f} requests/s"),
            ("lowest rate in a second after", f"{min(rate.slots[slot] for slot in after)}"),
            ("rate of 90 % again after", f"{back[0] * SLOT_S + SLOT_S - killed:.0f} s" if back else "never"),
            ("a replacement joined the cluster after", f"{added - killed:.0f} s ({added - removed:.0f} s to start it)"),
            ("three servers answer again after", f"{whole[0] * SLOT_S + SLOT_S - killed:.0f} s" if whole else "never"),
            ("answers, wrong, failed", f"{sum(rate.slots.values())}, 0, {len(rate.failed)}"),
        ],
    )
    print("  per second:", *(rate.slots[slot] for slot in range(after[0] - 6, after[-1])))


# ------------------------------------------------------------------------------------------------ offline


class Bare:
    """The model in an actor, with the same engine settings as in the server."""

    def __init__(self, model: str) -> None:
        self._run = session(model).run

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        began, own = time.perf_counter(), time.process_time()
        (y,) = self._run(None, {"x": batch["x"]})
        return spent(y, time.process_time() - own, time.perf_counter() - began)


class ServedBatches:
    """`Predictor`, with the processor time of its server, which is idle between two batches of its only actor."""

    def __init__(self, models: str) -> None:
        from shmserve.ray import Predictor

        self._predictor = Predictor("m", models, keep=False)
        self._host = self._predictor.server.host
        self._before = busy_seconds(self._host)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        began, own = time.perf_counter(), time.process_time()
        y = self._predictor({"x": batch["x"]})["y"]
        own, wall = time.process_time() - own, time.perf_counter() - began
        before, self._before = self._before, busy_seconds(self._host)
        return spent(y, own + self._before - before, wall)


def spent(y: Any, cpu: float, wall: float) -> dict[str, Any]:
    count = len(y)
    return {"first": y[:, 0], "cpu": np.full(count, cpu / count), "wall": np.full(count, wall / count)}


def offline(place: Place, root: Path) -> None:
    """Both take turns, twice. The first quarter of the rows is not counted."""
    import ray

    kinds: dict[str, tuple[Callable[[Path], None], list[int], int, int, int]] = {
        "mlp": (models.make_mlp, models.MLP_SHAPE, 64, 64_000, 1024),
        "cnn": (models.make_cnn, models.CNN_SHAPE, 1000, 160, 4),
    }
    for kind, (make, shape, classes, count, share) in kinds.items():
        file, folder = root.with_name(f"{kind}.onnx"), root.with_name(kind)
        make(file)
        models.write(folder, "m", models.onnx_model(shape, classes, share), {"model.onnx": file})
        data = ray.data.range(count, override_num_blocks=16).map_batches(partial(random_rows, shape)).materialize()
        rates: dict[str, list[float]] = {"bare": [], "served": []}
        rows = []
        for name, actor, argument in (("bare", Bare, file), ("served", ServedBatches, folder)) * 2:
            result = data.map_batches(
                actor,
                fn_constructor_args=(str(argument),),
                batch_size=share,
                compute=ray.data.ActorPoolStrategy(size=1),
                num_cpus=1,
            ).to_pandas()
            assert len(result) == count
            half = result[count // 4 :]
            rates[name].append(1 / half["cpu"].mean())
            rows.append((name, f"{rates[name][-1]:.0f} rows per core and second, {1 / half['wall'].mean():.0f} rows/s"))
        rows.append(("served / bare, per core", f"{sum(rates['served']) / sum(rates['bare']):.2f}"))
        table(f"map_batches, {kind}, batches and requests of {share} rows", rows)


def random_rows(shape: list[int], batch: dict[str, Any]) -> dict[str, Any]:
    return {"x": np.random.default_rng(1).standard_normal((len(batch["id"]), *shape)).astype(np.float32)}


EXPERIMENTS = {"calls": (calls, 1), "arrays": (arrays, 1), "node": (node, 3), "offline": (offline, 1)}
"""Name -> experiment and the number of nodes that it needs."""


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in EXPERIMENTS]
    if unknown:
        print(f"'{unknown[0]}' is not an experiment; known are: {', '.join(EXPERIMENTS)}", file=sys.stderr)
        return 2
    from ray import serve

    from shmserve.ray import app

    chosen = names or list(EXPERIMENTS)
    for count in sorted({EXPERIMENTS[name][1] for name in chosen}):
        with tempfile.TemporaryDirectory() as folder, started(count) as place:
            root = repository(Path(folder, "models"))
            write_times(root, "twice")
            serve.run(app({"models": str(root), "replicas": count, "cpus": 0.1}))
            for name in chosen:
                run, nodes = EXPERIMENTS[name]
                if nodes == count:
                    run(place, root)
    load = os.getloadavg()[0]
    if load > BUSY_LOAD:
        print(f"\nthe load average was {load:.1f}: other programs may have used the machine")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
