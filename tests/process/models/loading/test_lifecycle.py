"""Operations under constant load: random loads, unloads, reloads, versions added and removed, and bad configurations.

The oracle is the repository itself: an answer names its generation, which must have been complete on disk, in a served
version, at some time between the request and the answer.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

import shmserve
from bench.lib.processes import resident_bytes
from shmserve.errors import ServeError
from shmserve.testing import Server
from tests.support import living

pytestmark = pytest.mark.process

OPERATIONS = int(os.environ.get("SHMSERVE_LIFECYCLE_OPERATIONS", "200"))
CLIENTS = 4
PAUSE_S = 0.05
"""Pause between the rounds of a client: its load must be constant, but must not starve the code under test."""
STEADY = "steady"
"""No operation affects it: none of its requests may fail."""
NAMES = ("red", "green", "blue")
ACTIONS = (
    *("load", "load", "reload", "reload", "add", "remove", "resize", "bad config", "bad model"),
    *("unload", "restart"),
)

MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            mark = np.full_like(x, {mark})
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.concatenate([x, mark], axis=1))]))
        return answers
"""
CONFIG = """
backend: "python" max_batch_size: 8
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ 4 ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ 8 ] }} ]
dynamic_batching {{ }}
instance_group [ {{ count: {count} kind: KIND_CPU }} ]
version_policy: {{ all {{ }} }}
"""
BAD = 'backend: "python" max_batch_sise: 8'


def write(repository: Path, name: str, version: int, mark: int) -> None:
    folder = repository / name / str(version)
    folder.mkdir(parents=True, exist_ok=True)
    living.write(folder / "model.py", MODEL.format(mark=mark))


def configure(repository: Path, name: str, text: str) -> None:
    living.write(repository / name / "config.pbtxt", text)


class Load(threading.Thread):
    """A client that sends requests continuously and checks each answer."""

    def __init__(self, server: Server, number: int) -> None:
        super().__init__(name=f"load-{number}")
        self.enough = threading.Event()
        self.wrong: list[str] = []
        self.answered: dict[str, int] = dict.fromkeys((STEADY, *NAMES), 0)
        self.refused: dict[str, int] = dict.fromkeys((STEADY, *NAMES), 0)
        self._url = server.url if number % 2 else server.zmq_url
        self._random = random.Random(number)
        self.must_serve: dict[str, int] = {}
        """Models that are served throughout, as far as operators know -> the lowest mark that is allowed."""

    def run(self) -> None:
        with shmserve.Client(self._url) as client:
            while not self.enough.wait(PAUSE_S):
                try:
                    self._some(client)
                except Exception as error:
                    self.wrong.append(f"{type(error).__name__}: {error}")
                    return

    def _some(self, client: shmserve.Client) -> None:
        asked = []
        for _ in range(8):
            name = self._random.choice((STEADY, STEADY, *NAMES))
            x = np.float32(self._random.random()) * np.ones((self._random.randint(1, 3), 4), np.float32)
            must = name in self.must_serve
            asked.append((name, must, x, client.submit(name, {"x": x})))
        for name, must, x, future in asked:
            try:
                y = future.result(60)["y"]
            except ServeError as error:
                self.refused[name] += 1
                if must and name in self.must_serve:
                    self.wrong.append(f"{name} was served all the time, and failed: {error}")
                elif error.code not in ("NOT_FOUND", "UNAVAILABLE"):
                    self.wrong.append(f"{name}: {error.code} {error}")
                continue
            self.answered[name] += 1
            if y.shape != (len(x), 8) or not np.array_equal(y[:, :4], x) or len(np.unique(y[:, 4:])) != 1:
                self.wrong.append(f"{name} answered {y.tolist()} to {x.tolist()}")


class Operator:
    """Performs random operations; knows what is on disk and what should be served."""

    def __init__(self, repository: Path, client: shmserve.Client, loads: list[Load], seed: int) -> None:
        self.repository = repository
        self.client = client
        self.loads = loads
        self.random = random.Random(seed)
        self.marks = iter(range(1, 10**6))
        self.versions: dict[str, dict[int, int]] = {name: {} for name in NAMES}
        self.served: dict[str, dict[int, int]] = {}
        """Result of the last successful load: version -> mark."""
        self.done: dict[str, int] = {}

    def act(self) -> None:
        name = self.random.choice(NAMES)
        action = self.random.choice(ACTIONS)
        self.done[action] = self.done.get(action, 0) + 1
        getattr(self, action.replace(" ", "_"))(name)
        if name in self.served:
            self.look(name)

    def load(self, name: str) -> None:
        if not self.versions[name]:
            self.add(name)
            return
        self.client.load(name)
        self.now_served(name)

    def now_served(self, name: str) -> None:
        self.served[name] = dict(self.versions[name])
        for load in self.loads:
            load.must_serve[name] = 0

    def reload(self, name: str) -> None:
        for version in self.versions[name]:
            self.new(name, version)
        self.load(name)

    def new(self, name: str, version: int) -> None:
        mark = next(self.marks)
        write(self.repository, name, version, mark)
        self.versions[name][version] = mark

    def add(self, name: str) -> None:
        if not self.versions[name]:
            (self.repository / name).mkdir(exist_ok=True)
            configure(self.repository, name, CONFIG.format(count=1))
        self.new(name, max(self.versions[name], default=0) % 3 + 1)
        self.load(name)

    def remove(self, name: str) -> None:
        if len(self.versions[name]) < 2:
            return
        version = self.random.choice(list(self.versions[name]))
        shutil.rmtree(self.repository / name / str(version))
        del self.versions[name][version]
        self.load(name)

    def resize(self, name: str) -> None:
        if self.versions[name]:
            configure(self.repository, name, CONFIG.format(count=self.random.randint(1, 2)))
            self.load(name)

    def bad_config(self, name: str) -> None:
        """The error names the invalid field, and the served version stays."""
        if not self.versions[name]:
            return
        good = (self.repository / name / "config.pbtxt").read_text()
        configure(self.repository, name, BAD)
        with pytest.raises(ServeError, match=r'max_batch_sise.*did you mean "max_batch_size"'):
            self.client.load(name)
        configure(self.repository, name, good)

    def bad_model(self, name: str) -> None:
        """One version of the new generation cannot be loaded: the old one stays."""
        if not self.versions[name]:
            return
        version = self.random.choice(list(self.versions[name]))
        path = self.repository / name / str(version) / "model.py"
        good = path.read_text()
        write(self.repository, name, version, 0)
        path.write_text("raise ValueError('no weights')")
        with pytest.raises(ServeError, match="no weights"):
            self.client.load(name)
        path.write_text(good)
        if name not in self.served:
            self.client.unload(name)

    def unload(self, name: str) -> None:
        self.served.pop(name, None)
        for load in self.loads:
            load.must_serve.pop(name, None)
        self.client.unload(name)
        with pytest.raises(ServeError, match=r"has no available versions|is not found"):
            self.client.infer(name, {"x": np.zeros((1, 4), np.float32)})

    def restart(self, name: str) -> None:
        if name in self.served:
            self.client.restart(name)

    def look(self, name: str) -> None:
        """Requests after an operation are answered by the state that the operation has left."""
        for version, mark in self.served[name].items():
            y = self.client.infer(name, {"x": np.zeros((1, 4), np.float32)}, version=version)["y"]
            assert y[0, 4] == mark, f"version {version} of {name} answers {y[0, 4]} after a load of {mark}: {self.done}"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    repository = tmp_path / "models"
    (repository / STEADY).mkdir(parents=True)
    configure(repository, STEADY, CONFIG.format(count=1))
    write(repository, STEADY, 1, 0)
    return repository


def test_requests_are_answered_while_models_are_loaded_and_unloaded(repository: Path) -> None:
    options = ("--model-control-mode", "explicit", "--load-model", STEADY)
    with Server(repository, *options) as server:
        loads = [Load(server, number) for number in range(CLIENTS)]
        for load in loads:
            load.must_serve[STEADY] = 0
            load.start()
        try:
            with server.client() as client:
                operator = Operator(repository, client, loads, seed=int(os.environ.get("SHMSERVE_SEED", "1")))
                middle = 0
                for number in range(OPERATIONS):
                    if number == OPERATIONS // 4:
                        middle = resident_bytes(server.pid)
                    operator.act()
                    assert not any(load.wrong for load in loads), [load.wrong for load in loads]
                grown = resident_bytes(server.pid) - middle
                for load in loads:
                    load.enough.set()
                for load in loads:
                    load.join(60)
                    assert not load.is_alive()
                for name in NAMES:
                    client.unload(name)
                left = client.models()
                open_files = len(os.listdir(f"/proc/{server.pid}/fd"))
        finally:
            for load in loads:
                load.enough.set()
                load.join(60)
        assert [load.wrong for load in loads] == [[]] * CLIENTS
        assert all(load.answered[STEADY] and not load.refused[STEADY] for load in loads)
        assert all(load.answered[name] for load in loads for name in NAMES)
        assert [entry["name"] for entry in left if entry["state"] == "READY"] == [STEADY]
        assert sum(len(entry["instances"]) for entry in left if entry["state"] == "READY") == 1
        assert grown < 4 << 20, f"the broker has grown by {grown} bytes over {3 * OPERATIONS // 4} operations"
        assert open_files < 40, f"{open_files} descriptors are open in the broker"
