"""Streams of decoupled models through a real server, with both clients over every link."""

from __future__ import annotations

import io
import json
import os
import re
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.clients.cli.commands.status import stats_text
from shmserve.protocol.worker_messages import BUFFER_BYTES
from shmserve.terminal.console import Screen
from shmserve.testing import Server
from shmserve.workers.model_calls.stream import ROW_BYTES
from tests.support.clients.client_faces import connect
from tests.support.commands import run
from tests.support.ensemble_models import config_text
from tests.support.model_files import write_model
from tests.support.patience import PATIENCE_S
from tests.support.workers.models.stream_models import HEAD, IN_EXECUTE

pytestmark = pytest.mark.process

MORE = "max_batch_size: 8 dynamic_batching { } model_transaction_policy { decoupled: true }"
CONFIG = config_text("python", "x:FP32:[1]", "y", MORE)
REPORT = """\
def report(request, word):
    with open(wishes(request)["report"], "w") as file:
        file.write(word)


"""
REPEAT = """\
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request,)).start()

    def answer(self, request):
        sender = request.get_response_sender()
        sent = 0
        while sent < request.inputs()[0].as_numpy()[0, 0] and not sender.is_cancelled():
            sender.send(response(sent, wishes(request).get("size", 1)))
            sent += 1
        if sender.is_cancelled():
            report(request, f"cancelled after {sent}")
        sender.send(flags=FINAL)
"""
TOKENS = """\
import asyncio


class TritonPythonModel:
    async def stream(self, request):
        try:
            for index in range(int(request.inputs()[0].as_numpy()[0, 0])):
                await asyncio.sleep(0)
                yield response(index, wishes(request).get("size", 1))
        finally:
            if request.is_cancelled():
                report(request, f"cancelled after {index + 1}")
"""
FAILS = """\
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            request.get_response_sender().send(response(0))
        raise ValueError("no more than one")
"""
WAYS = ["sync lane", "sync frames", "uvloop ipc"]
"""tests/conformance/test_client_streams.py has all clients and links."""
LARGE = 3000


def write_models(repository: Path) -> None:
    sources = {"repeat": REPEAT, "tokens": TOKENS, "fails": FAILS, "counted": REPEAT, "inside": IN_EXECUTE}
    for name, source in sources.items():
        write_model(repository, name, CONFIG, HEAD + REPORT + source)


@pytest.fixture(scope="module")
def server(server: Server) -> Server:
    """Named segments stay while their workers live: creates all that the tests need before the leak check starts."""
    with shmserve.Client(server.zmq_url) as client:
        for name in ("repeat", "tokens"):
            streams = [ask(client, name, 20, size=LARGE) for _ in range(8)]
            kept = [part for stream in streams for part in stream]
            del kept, streams
    return server


@pytest.fixture(params=WAYS)
def client(request: pytest.FixtureRequest, server: Server) -> Iterator[Any]:
    with connect(server, request.param) as made:
        yield made


@pytest.fixture
def report(tmp_path: Path) -> Iterator[Any]:
    """A named pipe, and a function that waits for what a model writes to it."""
    path = tmp_path / "report"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def read() -> str:
        assert select.select([reader], [], [], PATIENCE_S)[0], "the model has written nothing"
        return os.read(reader, 100).decode()

    yield path, read
    os.close(reader)


def ask(client: Any, model: str, count: int, *, window: int = 16, **wishes: Any) -> Any:
    x = np.array([[count]], np.float32)
    return client.stream(model, {"x": x}, window=window, parameters=wishes)


def test_times_of_responses_are_shown(server: Server) -> None:
    with shmserve.Client(server.url) as client:
        for count in (2, 1):
            assert len(list(ask(client, "counted", count))) == count
        statistics = client.statistics("counted")
    (found,) = statistics["model_stats"]
    assert {index: each["success"]["count"] for index, each in found["response_stats"].items()} == {
        "0": 2,
        "1": 1,
        "2": 0,
    }
    times = found["stream_stats"]
    assert {name: each["count"] for name, each in times.items()} == {"first_response": 2, "between_responses": 1}
    assert all(0 < each["p50_ns"] <= each["p99_ns"] for each in times.values())
    shown = stats_text(statistics, Screen(False, io.StringIO()))
    assert re.search(r"counted version 1: first response after \S+ \w+ \(mean\), .* between responses \S+ ", shown)


def test_an_unread_stream_delays_no_other(client: Any) -> None:
    """The model answers in execute and has one instance."""
    held = ask(client, "inside", 500, window=1)
    assert next(held)["y"].item() == 0
    assert [part["y"].item() for part in ask(client, "inside", 3)] == [0, 1, 2]
    assert [part["y"].item() for part in held] == list(range(1, 500))


def test_an_unread_stream_ends_when_its_queue_is_full_and_others_wait(client: Any) -> None:
    """The model computes all responses, also those that are dropped: twice as many as the queue can hold."""
    held = ask(client, "inside", 2 * BUFFER_BYTES // ROW_BYTES, window=1)
    assert next(held)["y"].item() == 0
    assert [part["y"].item() for part in ask(client, "inside", 3)] == [0, 1, 2]
    with pytest.raises(shmserve.Unavailable, match=r"for 50 ms: .* had accepted \d+ responses?, and 1 MiB"):
        for _ in held:
            pass


@pytest.mark.parametrize("model", ["repeat", "tokens"])
def test_a_slow_reader_slows_the_model_down_and_cancels_it(client: Any, model: str, report: Any) -> None:
    path, read = report
    stream = ask(client, model, 1_000_000, window=4, report=str(path))
    assert [next(stream)["y"].item() for _ in range(10)] == list(range(10))
    stream.close()
    word = read()
    assert word.startswith("cancelled after ")
    # Ten were received, and four more are in the window. A coroutine waits with the next one, and may be computing
    # another one when its event loop gets the cancellation. A thread goes on until 1 MiB is queued.
    most = 10 + 4 + (2 if model == "tokens" else BUFFER_BYTES // ROW_BYTES)
    assert int(word.rpartition(" ")[2]) <= most, word
    assert [part["y"].item() for part in ask(client, model, 3)] == [0, 1, 2]


def test_infer_stream_prints_each_response(server: Server, tmp_path: Path) -> None:
    words = ["infer", "tokens", "--input", "x=3", "--stream", "--url", server.url]
    code, out, err = run(*words)
    assert code == 0, err
    lines = [line.split() for line in out.splitlines()]
    assert [line[:2] for line in lines if line[:1] == ["part"]] == [["part", "1"], ["part", "2"], ["part", "3"]]
    assert [line for line in lines if line[:1] == ["y"]] == [["y", "FP32", "[1,", "1]", value] for value in "012"]
    assert lines[-1][:4] == ["tokens,", "3", "parts", "in"]
    _, out, _ = run(*words, "--json", "--out", tmp_path / "out")
    documents = [json.loads(line) for line in out.splitlines()]
    assert [document["part"] for document in documents] == [1, 2, 3]
    for index, document in enumerate(documents):
        assert document["outputs"]["y"]["file"] == str(tmp_path / "out" / str(index + 1) / "y.npy")
        assert np.load(document["outputs"]["y"]["file"]) == index


def test_infer_reports_the_error_of_a_stream(server: Server) -> None:
    code, out, err = run("infer", "fails", "--input", "x=3", "--stream", "--url", server.url)
    assert code == 1
    assert "part 1 after" in out
    assert "ValueError: no more than one" in err
    assert run("infer", "tokens", "--random", "--stream", "--repeat", "2", "--url", server.url)[0] == 2
