"""Models that sleep: the cost of a cold start, and many models in little memory. `python -m bench.suites.sleeping`.

A cold start is the time of a request to a sleeping model, minus that of the next request, when the model is awake. The
bare engine loads the same model in a process forked from one that has imported numpy, as workers are.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median

import numpy as np

import shmserve
from bench.lib.bare_engine import session
from bench.lib.processes import memory_bytes
from bench.suites.instances import CONFIG, MODELS, SIDE
from shmserve.testing import Server

WAKES = 15
IDLE_S = 0.05
PAUSE_S = 0.02
CLIENTS = 8
PARAMETERS = 'parameters {{ key: "{}" value: {{ string_value: "{}" }} }}\n'


def write(folder: Path, kind: str, **parameters: str) -> None:
    backend, make = MODELS[kind]
    (folder / "1").mkdir(parents=True)
    text = CONFIG.format(backend=backend, count=1, side=SIDE)
    (folder / "config.pbtxt").write_text(text + "".join(PARAMETERS.format(*one) for one in parameters.items()))
    make(folder / "1")


# ------------------------------------------------------------------------------------------------ cold starts


def cold_starts(kind: str) -> tuple[float, float]:
    """Medians in ms: of a cold start, and of a load by the bare engine."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "m")
        write(folder, kind)
        x = np.zeros((1, SIDE), np.float32)
        cold, bare = [], []
        with Server(place, "--idle-unload-secs", str(IDLE_S)) as server, shmserve.Client(server.url) as client:
            for _ in range(WAKES):
                wait(lambda: asleep(client, "m"))
                began = time.perf_counter()
                client.infer("m", {"x": x})
                woken = time.perf_counter()
                client.infer("m", {"x": x})
                cold.append(2 * woken - began - time.perf_counter())
                bare.append(forked(folder / "1" / "model.onnx") if kind.startswith("onnx") else 0.0)
    return median(cold) * 1e3, median(bare) * 1e3


def asleep(client: shmserve.Client, name: str) -> bool:
    (entry,) = (entry for entry in client.models() if entry["name"] == name)
    return all(instance["state"] == "asleep" for instance in entry["instances"])


def wait(holds: Callable[[], bool]) -> None:
    while not holds():
        threading.Event().wait(PAUSE_S)


def forked(path: Path) -> float:
    """Seconds that the engine takes to load the model, without the fork."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        began = time.perf_counter()
        session(str(path))
        os.write(writer, str(time.perf_counter() - began).encode())
        os._exit(0)
    os.waitpid(child, 0)
    took = float(os.read(reader, 100))
    os.close(reader)
    os.close(writer)
    return took


# ------------------------------------------------------------------------------------------------ many models


class MemoryMonitor:
    """Repeatedly sums the memory of all workers."""

    def __init__(self, url: str) -> None:
        self._client = shmserve.Client(url)
        self._stop = threading.Event()
        self.peak = self.samples = self.processes = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(PAUSE_S):
            pids = [one["pid"] for entry in self._client.models() for one in entry.get("instances", ()) if one["pid"]]
            self.peak = max(self.peak, sum(map(memory_bytes, pids)))
            self.processes = max(self.processes, len(pids))
            self.samples += 1

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()


def many(count: int, room: int, requests: int) -> str:
    """`count` models with memory for `room` of them."""
    with tempfile.TemporaryDirectory() as place:
        for number in range(count):
            write(Path(place, f"m{number}"), "identity")
        budget = room * size_of_one(place)
        began = time.perf_counter()
        with Server(place, "--model-memory-budget", str(budget)) as server:
            ready = time.perf_counter() - began
            monitor = MemoryMonitor(server.url)
            began = time.perf_counter()
            answers: list[str] = []
            threads = [
                threading.Thread(target=ask, args=(server.url, seed, count, requests // CLIENTS, answers))
                for seed in range(CLIENTS)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            took = time.perf_counter() - began
            monitor.close()
            with shmserve.Client(server.url) as client:
                metrics = client.metrics()
    wakes = sum(int(result) for result in re.findall(r'shmserve_model_wakes_total\{.*result="done"\} (\d+)', metrics))
    wrong = [answer for answer in answers if answer]
    return (
        f"{count} models, memory for {room} ({budget / 1e6:.0f} MB): ready after {ready:.1f} s; {len(answers)} "
        f"requests in {took:.0f} s with {wakes} wakes, {len(wrong)} failed or wrong {wrong[:3]}; the workers had "
        f"at most {monitor.peak / 1e6:.0f} MB in {monitor.processes} processes ({monitor.samples} samples)"
    )


def size_of_one(place: str) -> int:
    """The memory that the server charges for one of the models after it has answered."""
    with Server(place, "--model-memory-budget", str(1 << 40)) as server, shmserve.Client(server.url) as client:
        client.infer("m0", {"x": np.zeros((1, SIDE), np.float32)})
        sizes = [int(size) for size in re.findall(r"shmserve_model_memory_bytes\{.*\} (\d+)", client.metrics())]
        return int(median(sizes))


def ask(url: str, seed: int, count: int, requests: int, answers: list[str]) -> None:
    """Appends an error text for each request, "" for a correct response."""
    random = Random(seed)
    with shmserve.Client(url) as client:
        for _ in range(requests):
            x = np.full((1, SIDE), random.random(), np.float32)
            try:
                right = (client.infer(f"m{random.randrange(count)}", {"x": x})["y"] == x).all()
                answers.append("" if right else "wrong")
            except shmserve.ServeError as error:
                answers.append(str(error))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--room", type=int, default=20)
    parser.add_argument("--requests", type=int, default=10_000)
    args = parser.parse_args()
    print("| model | cold start, ms | bare engine, ms | beyond it |")
    print("| --- | --- | --- | --- |")
    for kind in MODELS:
        cold, bare = cold_starts(kind)
        print(f"| {kind} | {cold:.0f} | {bare:.0f} | {cold - bare:.0f} |")
    print(many(args.models, args.room, args.requests))


if __name__ == "__main__":
    main()
