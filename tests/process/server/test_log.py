"""The log of a real server: failed loads, workers that print too much or crash, and a log that cannot be written."""

from __future__ import annotations

import re
import textwrap
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import shmserve
from tests.support.launch import Launched
from tests.support.living import until

pytestmark = pytest.mark.process

CONFIG = """
backend: "python"
input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group [ { count: 2 kind: KIND_CPU } ]
"""
HEAD = """
import ctypes, json, os, threading
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
"""
ANSWERS = """
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""
FAILS = f"""{HEAD}
    def initialize(self, args):
        json.loads("{{")
{ANSWERS}"""
PRINTS = f"""{HEAD}
    def initialize(self, args):
        threading.Thread(target=self.print, daemon=True).start()

    def print(self):
        number = 0
        while True:
            number += 1
            os.write(1, b"line %d\\n" % number)
{ANSWERS}"""
CRASHES = f"""{HEAD}
    def execute(self, requests):
        ctypes.string_at(0)
"""
X = {"x": np.ones(1, np.float32)}


def model(root: Path, name: str, source: str, config: str = CONFIG) -> None:
    (root / name / "1").mkdir(parents=True, exist_ok=True)
    (root / name / "config.pbtxt").write_text(config)
    (root / name / "1" / "model.py").write_text(textwrap.dedent(source))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def records(text: str) -> list[str]:
    """Each with what follows it, indented."""
    return re.split(r"\n(?=\d{4}-)", text.strip())


def test_a_failed_load_is_one_record(root: Path, tmp_path: Path) -> None:
    """Also where both instances fail, with retries, and when it is reloaded beside what is served."""
    model(root, "m", FAILS)
    options = ("--model-control-mode", "explicit", "--load-model", "m", "--model-load-retry-count", "1")
    with (
        Launched(root, tmp_path / "run", *options) as server,
        shmserve.Client(runtime_dir=server.runtime_dir) as client,
    ):
        first = [text for text in records(server.log) if "JSONDecodeError" in text]
        until(client, lambda: server.log.count("UNAVAILABLE") == 1)
        model(root, "m", HEAD + ANSWERS)
        client.load("m")
        before = len(records(server.log))
        model(root, "m", FAILS)
        with pytest.raises(shmserve.ServeError, match="JSONDecodeError"):
            client.load("m")
        second = [text for text in records(server.log)[before:] if "JSONDecodeError" in text]
    again = "load failed for model 'm': version 1 is at UNAVAILABLE state: "
    for found, text in ((first, "model 'm' version 1 is UNAVAILABLE: "), (second, again)):
        retry, end = found
        assert " WARNING model 'm' version 1 failed to load and will be retried (--model-load-retry-count): " in retry
        assert f" ERROR {text}failed to load: JSONDecodeError" in end
        both = retry + end
        assert both.count("Traceback") == 1
        assert both.count('File "m/1/model.py", line') == 1, "as in the repository, not where a copy is kept"
        assert "/workers/" not in both


def test_a_worker_that_prints_for_ever(root: Path, tmp_path: Path) -> None:
    model(root, "m", PRINTS)
    with (
        Launched(root, tmp_path / "run", "--log-worker-lines", "5") as server,
        shmserve.Client(runtime_dir=server.runtime_dir) as client,
    ):
        until(client, lambda: client.infer("m", X) and server.log.count("[m_0_0] ") and len(notices(server.log)) > 2)
    lines = [line for line in server.log.splitlines() if "[m_0_0]" in line]
    for first, second in pairwise(notices(server.log)):
        assert second - first <= 6, lines[first : second + 1]


def notices(log: str) -> list[int]:
    """Where the lines of one instance say what was dropped."""
    lines = [line for line in log.splitlines() if "[m_0_0]" in line]
    pattern = re.compile(
        r" WARNING \[m_0_0\] [\d,]+ lines .* were dropped; the limit is 5 lines \(--log-worker-lines\)"
    )
    return [number for number, line in enumerate(lines) if pattern.search(line)]


def test_a_segfault_is_an_error(root: Path, tmp_path: Path) -> None:
    model(root, "m", CRASHES, CONFIG.replace("count: 2", "count: 1"))
    with Launched(root, tmp_path / "run") as server, shmserve.Client(runtime_dir=server.runtime_dir) as client:
        with pytest.raises(shmserve.ModelFailed):
            client.infer("m", X)
        until(client, lambda: "ended: signal SIGSEGV" in server.log)
    errors = [text.partition(" ERROR ")[2] for text in records(server.log) if " ERROR " in text]
    assert errors == [
        "[m_0_0] Fatal Python error: Segmentation fault",
        "worker of model 'm' version 1 instance 'm_0_0' ended: signal SIGSEGV",
    ]


def test_a_log_that_cannot_be_written(root: Path, tmp_path: Path) -> None:
    """A model that prints all the time is served, and the console has one line."""
    model(root, "m", PRINTS)
    with (
        Launched(root, tmp_path / "run", "--log-file", "/dev/full") as server,
        shmserve.Client(runtime_dir=server.runtime_dir) as client,
    ):
        for _ in range(100):
            client.infer("m", X)
    text = "shmserve: cannot write the log: No space left on device; records are lost until it works again\n"
    assert server.log == text
