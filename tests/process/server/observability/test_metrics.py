"""Metrics, statistics and the log of a real server, checked against /proc."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.errors import ModelFailed
from shmserve.system import procfs
from shmserve.testing import Server
from tests.process.server.processes.test_supervision import write
from tests.support.broker.metrics import Seen
from tests.support.ensemble_models import config_text
from tests.support.launch import Launched
from tests.support.living import until
from tests.support.model_files import python_model, write_model

pytestmark = pytest.mark.process

ONE = np.ones((1, 1), np.float32)
DEADLY = np.full((1, 1), 13, np.float32)
LAST_WORDS = "thirteen is more than I can bear"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("models")
    write(repository, "m")
    write(repository, "frail")
    with Server(repository, "--exit-on-error", "true", "--log-format", "json") as server:
        yield server


def records(server: Server) -> list[dict[str, Any]]:
    """The log's records; every line must be a JSON object."""
    found = [json.loads(line) for line in server.log.splitlines()]
    assert all({"time", "level", "message"} <= set(record) for record in found)
    return found


def instance_of(client: shmserve.Client, name: str) -> dict[str, Any]:
    (entry,) = (entry for entry in client.models() if entry["name"] == name)
    found: dict[str, Any] = entry["instances"][0]
    return found


def test_metrics_of_processes(server: Server, client: shmserve.Client) -> None:
    client.infer("m", {"x": ONE})
    instance = instance_of(client, "m")
    seen = Seen(client.metrics())
    (found,) = client.statistics("m")["model_stats"]
    stats = found["inference_stats"]["success"]
    assert seen("nv_inference_request_success", model="m", version="1") == stats["count"] > 0
    assert seen("nv_inference_request_duration_us", model="m", version="1") == stats["ns"] // 1000
    resident = procfs.usage(instance["pid"]).resident_bytes
    (memory,) = found["memory_usage"]
    assert 0 < memory.pop("byte_size") <= 1.02 * resident
    assert memory == {"type": "CPU", "id": 0}
    named = {"model": "m", "version": "1", "model_instance": instance["name"]}
    assert 0 < seen("shmserve_instance_memory_bytes", **named) <= 1.02 * resident
    assert seen("process_open_fds") == pytest.approx(len(os.listdir(f"/proc/{server.pid}/fd")), abs=3)


def test_the_last_output_of_a_crashed_worker_is_logged_and_reported(server: Server, client: shmserve.Client) -> None:
    """It is in the log and in `models`, but not in the error of the request."""
    with pytest.raises(ModelFailed) as caught:
        client.infer("frail", {"x": DEADLY})
    assert LAST_WORDS not in str(caught.value)
    assert client.infer("frail", {"x": ONE})["y"] == 2  # by a new process
    instance = instance_of(client, "frail")
    assert LAST_WORDS in instance["last_words"]
    record, again = (record for record in records(server) if record.get("last_words"))
    assert record["last_words"] == again["last_words"], "the request is retried once"
    about = {"model": "frail", "version": 1, "instance": instance["name"]}
    assert record.items() > ({"level": "error"} | about).items()
    assert record["last_words"].splitlines() == instance["last_words"]
    assert "signal SIGSEGV" in record["message"]
    line, _ = (record for record in records(server) if record["message"] == f"[{instance['name']}] {LAST_WORDS}")
    assert line.items() > ({"level": "info"} | about).items()
    assert instance["restarts"] == 2
    client.restart("frail")
    assert instance_of(client, "frail")["restarts"] == 2, "a restart of the model resets no counter"


FAILING_CONFIG = config_text("python", "x:FP32:[1]", "y:FP32:[1]", "instance_group { count: 2 kind: KIND_CPU }")
RAISES = python_model("json.loads('{')")
FAILS = python_model("return self.respond(x)", "json.loads('{')")
X = {"x": np.ones(1, np.float32)}


def records_of(text: str) -> list[str]:
    """Each record with its indented continuation lines."""
    return re.split(r"\n(?=\d{4}-)", text.strip())


def test_a_failed_load_is_logged_once_with_a_traceback(tmp_path: Path) -> None:
    """Even if both instances fail, with retries, and if a reload fails."""
    root = tmp_path / "models"
    write_model(root, "m", FAILING_CONFIG, FAILS)
    options = ("--model-control-mode", "explicit", "--load-model", "m", "--model-load-retry-count", "1")
    with (
        Launched(root, tmp_path / "run", *options) as server,
        shmserve.Client(runtime_dir=server.runtime_dir) as client,
    ):
        first = [text for text in records_of(server.log) if "JSONDecodeError" in text]
        until(client, lambda: server.log.count("UNAVAILABLE") == 1)
        (root / "m" / "1" / "model.py").write_text(RAISES)
        client.load("m")
        with pytest.raises(shmserve.ModelFailed):
            client.infer("m", X)
        until(client, lambda: f'  File "{root}/m/1/model.py", line ' in server.log)
        before = len(records_of(server.log))
        (root / "m" / "1" / "model.py").write_text(FAILS)
        with pytest.raises(shmserve.ServeError, match="JSONDecodeError"):
            client.load("m")
        until(client, lambda: "load failed for model 'm'" in server.log)
        second = [text for text in records_of(server.log)[before:] if "JSONDecodeError" in text]
    again = "load failed for model 'm': version 1 is at UNAVAILABLE state: "
    for found, text in ((first, "model 'm' version 1 is UNAVAILABLE: "), (second, again)):
        retry, end = found
        assert " WARNING model 'm' version 1 failed to load and will be retried (--model-load-retry-count): " in retry
        assert f" ERROR {text}failed to load: JSONDecodeError" in end
        both = retry + end
        assert both.count("Traceback") == 1
        assert both.count('File "m/1/model.py", line') == 1, "as in the repository, not where a copy is kept"
        assert "/workers/" not in both
