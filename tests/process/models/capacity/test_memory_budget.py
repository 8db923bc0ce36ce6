"""More models than fit into memory: all of them answer, and their processes never exceed the budget. Scenarios have
which model sleeps."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from random import Random

import numpy as np
import pytest

import shmserve
from shmserve.testing import Server
from tests.support.launch import identity
from tests.support.living import ONE, PYTHON, until
from tests.support.model_files import parameters, python_model, write_model

pytestmark = pytest.mark.process

MODELS = 16
BUDGET = 100 << 20
"""Memory for about six models."""
REQUESTS = 80
CLIENTS = 4


def memory_of(pid: int) -> int:
    """A process's memory according to the kernel: without files, and with a share of pages that several processes use.
    0: the process has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(size) << 10 for size in re.findall(r"Pss_(?:Anon|Shmem): +(\d+)", text))


class Monitor:
    """Repeatedly sums the memory of all workers until it is closed."""

    def __init__(self, client: shmserve.Client) -> None:
        self._client = client
        self._stop = threading.Event()
        self.most = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            pids = [one["pid"] for entry in self._client.models() for one in entry.get("instances", ()) if one["pid"]]
            self.most = max(self.most, sum(map(memory_of, pids)))

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def ask(server: Server, seed: int, answered: list[bool]) -> None:
    random = Random(seed)
    with server.client() as client:
        for _ in range(REQUESTS // CLIENTS):
            x = np.full((1, 3), random.random(), np.float32)
            answered.append(bool((client.infer(f"m{random.randrange(MODELS)}", {"x": x})["y"] == x).all()))


def test_models_over_the_memory_budget_take_turns(tmp_path: Path) -> None:
    for number in range(MODELS):
        identity(tmp_path, f"m{number}", memory_mb="16")
    source = python_model("return self.respond(x)", "self.weights = np.ones(60 << 20, np.uint8)")
    write_model(tmp_path, "large", PYTHON, source)
    write_model(tmp_path, "too_large", PYTHON + parameters(memory_mb="4000"), source)
    limits = ("--model-memory-budget", str(BUDGET), "--strict-readiness=false")
    with Server(tmp_path, *limits) as server, server.client() as client:
        all_answer(server, client)
        large_model_is_charged_in_full(client)
        (entry,) = (entry for entry in client.models() if entry["name"] == "too_large")
        assert entry["state"] == "UNAVAILABLE"
        assert "it needs 4.19 GB of memory, and the budget is 105 MB (--model-memory-budget)" in entry["reason"]


def all_answer(server: Server, client: shmserve.Client) -> None:
    with server.client() as other:
        monitor = Monitor(other)
        answered: list[bool] = []
        threads = [threading.Thread(target=ask, args=(server, seed, answered)) for seed in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        monitor.close()
    assert answered == [True] * REQUESTS
    assert 0 < monitor.most <= BUDGET
    index = client.models()
    assert all(entry["state"] == "READY" for entry in index if entry["name"] != "too_large")
    assert any(entry["asleep"] for entry in index)
    metrics = client.metrics()
    assert f'\nshmserve_memory_budget_bytes{{place="host"}} {BUDGET}\n' in metrics
    charged = [int(size) for size in re.findall(r'\nshmserve_model_memory_bytes\{.*place="host"\} (\d+)', metrics)]
    assert len(charged) == MODELS + 2
    assert 0 < sum(charged) <= BUDGET


def large_model_is_charged_in_full(client: shmserve.Client) -> None:
    """The large model is measured once loaded, because its size was not known. It may then sleep at once, because it is
    the least valuable one; the next request wakes it with the known size."""

    def is_charged() -> bool:
        assert (client.infer("large", {"x": ONE})["y"] == ONE).all()
        return charge(client, "large") >= 60 << 20

    until(client, is_charged)


def charge(client: shmserve.Client, name: str) -> int:
    named = f'\nshmserve_model_memory_bytes{{model="{name}",version="1",place="host"}} '
    return int(client.metrics().partition(named)[2].split(None, 1)[0])
