"""`shmserve trace`: a recording of a real server, as a valid timeline that agrees with the statistics."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import shmserve
from shmserve.errors import ModelFailed
from shmserve.testing import Server
from tests.support.clients.trace_events import check
from tests.support.commands import COMMAND, run
from tests.support.ensemble_models import ADD, BATCHES, ensemble, model, numbers
from tests.support.living import until

pytestmark = pytest.mark.process

PAIRS = "max_batch_size: 2 dynamic_batching { preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 60000000 }\n"
"""Requests wait for each other."""
LONE = 100
"""Number of consecutive requests of one client; the last of them are sent over a lease."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("models")
    model(repository, "lone", more=BATCHES, dims="[4]", outputs=("y:FP32:[4]",))
    model(repository, "add1", ADD, BATCHES, dims="[4]")
    model(repository, "pairs", ADD, PAIRS, dims="[4]")
    ensemble(repository, "twice", "x:FP32:[4]", "y", "add1(x:x)->(y:z)", "add1(x:z)->(y:y)", more="max_batch_size: 64")
    with Server(repository, "--exit-on-error", "true") as server:
        yield server


def counts(client: shmserve.Client) -> Counter[str]:
    found = client.statistics()["model_stats"]
    kinds = ("success", "fail")
    return Counter({one["name"]: sum(one["inference_stats"][kind]["count"] for kind in kinds) for one in found})


def is_recording(client: shmserve.Client) -> bool:
    return any("recording 1 of requests" in record["text"] for record in client.logs()["records"])


def test_a_recording_contains_requests_batches_steps_and_leases(server: Server, tmp_path: Path) -> None:
    place = tmp_path / "run.json.gz"
    words = ["trace", "--runtime-dir", str(server.runtime_dir), "--seconds", "600", "--json", "-o", str(place)]
    command = [*COMMAND, *words]
    with server.client(name="loader") as client, subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        until(client, lambda: is_recording(client), "the recording")
        before = counts(client)
        for _ in range(LONE):
            client.infer("lone", {"x": numbers(1, 4)})
        together = [client.submit("pairs", {"x": numbers(1, 4)}) for _ in range(20)]
        for future in together:
            future.result()
        with pytest.raises(ModelFailed, match="666"):
            client.infer("add1", {"x": numbers(1, 4) * 0 + 666})
        client.infer("twice", {"x": numbers(2, 4)}, request_id="whole")
        after = counts(client)
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        summary = json.loads(process.stdout.read())
    assert process.returncode == 0
    served = {entry["model"]: entry["requests"] for entry in summary["models"]}
    assert served == after - before
    assert summary["left_out"] == 0
    document = json.loads(gzip.decompress(place.read_bytes()))
    slices = check(document["traceEvents"])
    batches = [one["args"] for one in slices if one["cat"] == "batch"]
    assert any("lease" in args for args in batches)
    assert [len(args["requests"]) for args in batches].count(2) == 10
    requests = [one for one in slices if one["cat"] == "request"]
    assert len(requests) == sum(served.values())
    assert {one["args"]["client"].split()[1] for one in requests if "id" in one["args"]} == {"(loader)"}
    (failed,) = [one for one in requests if one["args"]["result"] != "OK"]
    assert failed["name"].startswith("request ")
    (whole,) = [one for one in requests if one["args"].get("id") == "whole" and "batch" not in one["args"]]
    steps = [one for one in requests if one["args"].get("made for request") == whole["args"]["request"]]
    assert [one["args"]["rows"] for one in steps] == [2, 2]
    assert all(whole["ts"] <= one["ts"] <= whole["ts"] + whole["dur"] for one in steps)


def traced(server: Server, *words: str | Path, code: int) -> str:
    ended, _, err = run("trace", "--runtime-dir", server.runtime_dir, "--seconds", "0.01", *words)
    assert ended == code, err
    return err


def test_a_recording_without_requests_is_empty(server: Server, tmp_path: Path) -> None:
    place = tmp_path / "run.json"
    assert "no request ended meanwhile" in traced(server, "-o", place, code=0)
    assert json.loads(place.read_text())["traceEvents"] == []
    assert place.stat().st_mode & 0o077 == 0, "it shows what others do"


def test_errors_suggest_the_next_step(server: Server, tmp_path: Path) -> None:
    place = tmp_path / "run.json"
    assert "did you mean 'add1'?" in traced(server, "--model", "add", "-o", place, code=1)
    missing = tmp_path / "none" / "run.json"
    assert "-o names another file" in traced(server, "-o", missing, code=1)
    with server.client() as client:
        number = client.record("start")["recording"]
        assert "another recording is running" in traced(server, "-o", place, code=1)
        client.record("stop", number)
    assert os.listdir(tmp_path) == [], "a failed recording leaves no file"
