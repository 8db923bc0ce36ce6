"""Decoupled models, and the requests and expectations of the tests of their workers.

A model waits at a gate, a named pipe that the test opens, so that the test decides what happens before the model
continues.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.protocol.messages import Options, Ping, Pong, Tensor
from shmserve.protocol.worker_messages import Done, Row, Streamed, Withdraw, Withdrawn
from shmserve.protocol.worker_messages import Work as WorkMessage
from shmserve.repo.config.schema import ModelConfig, ModelTransactionPolicy
from tests.support.workers.models.worker_models import python_model
from tests.support.workers.worker_harness import WorkerProcess, config, work

HEAD = """\
import asyncio
import gc
import json
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def response(value, size=1):
    return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.full((1, size), value, np.float32))])


def wishes(request):
    return json.loads(request.parameters())


def count_of(request):
    return int(request.inputs()[0].as_numpy()[0, 0])


def gate(request, name="gate"):
    with open(wishes(request)[name]) as file:
        return file.read()


"""
IN_EXECUTE = """\
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            assert sender is request.get_response_sender()
            for index in range(count_of(request)):
                sender.send(response(index, wishes(request).get("size", 1)))
            sender.send(flags=FINAL)
"""
IN_THREADS = """\
class TritonPythonModel:
    def initialize(self, args):
        self.threads = []

    def execute(self, requests):
        for request in requests:
            self.threads.append(threading.Thread(target=self.answer, args=(request,)))
            self.threads[-1].start()

    def answer(self, request):
        sender = request.get_response_sender()
        for index in range(count_of(request)):
            sender.send(response(index, wishes(request).get("size", 1)))
            if sender.is_cancelled():
                break
        sender.send(flags=FINAL)

    def finalize(self):
        for thread in self.threads:
            thread.join()
        print("finalized", flush=True)
"""

COROUTINE = """\
class TritonPythonModel:
    async def execute(self, requests):
        await asyncio.gather(*[self.answer(request) for request in requests])

    async def answer(self, request):
        sender = request.get_response_sender()
        for index in range(count_of(request)):
            await sender.send(response(index))
        if wishes(request).get("raise"):
            raise ValueError("told to")
        sender.send(flags=FINAL)
"""
GENERATOR = """\
class TritonPythonModel:
    async def stream(self, request):
        try:
            for index in range(count_of(request)):
                yield response(index)
            if wishes(request).get("raise"):
                raise ValueError("told to")
        finally:
            print("closed", wishes(request).get("name"), request.is_cancelled(), flush=True)
"""
SOURCES = {"execute": IN_EXECUTE, "threads": IN_THREADS, "coroutine": COROUTINE, "generator": GENERATOR}
"""Each sends as many responses as requested; they differ in where they send from."""


def senders(*names: str) -> pytest.MarkDecorator:
    """Runs a test with these models of `SOURCES`. The fixture `worker` starts each once for all tests of a file."""
    return pytest.mark.parametrize("sender", names or tuple(SOURCES), scope="module")


def decoupled(folder: Path, source: str, max_batch: int = 8) -> ModelConfig:
    python_model(folder, HEAD + source)
    made = config("python", {"x": ("FP32", (1,))}, {"y": ("FP32", (-1,))}, max_batch=max_batch)
    return replace(made, model_transaction_policy=ModelTransactionPolicy(decoupled=True))


@contextmanager
def serving(folder: Path, source: str) -> Iterator[WorkerProcess]:
    with WorkerProcess(decoupled(folder, source), folder) as worker:
        worker.loaded()
        yield worker


def asks(number: int, count: int, window: int = 100, **wishes: object) -> WorkMessage:
    x = Tensor("x", "FP32", (1, 1), np.float32(count).tobytes())
    return work(number, x, options=Options(window=window, parameters=dict(wishes)))  # type: ignore[arg-type]


def row(worker: WorkerProcess) -> Row:
    rows = worker.expect(Streamed).rows
    assert len(rows) == 1
    return rows[0]


def rows_and_done(worker: WorkerProcess, count: int) -> list[Row]:
    """The next streamed rows, and the end of their batch, which may arrive before, between or after them."""
    messages = [worker.next()[0] for _ in range(count + 1)]
    assert [message.rows for message in messages if isinstance(message, Done)] == [()]
    rows = [message.rows for message in messages if isinstance(message, Streamed)]
    assert [len(one) for one in rows] == [1] * count
    return [one for (one,) in rows]


def withdraw(worker: WorkerProcess, request: int) -> None:
    """Cancels a request that runs: it is not taken out of its batch, and ends as cancelled."""
    worker.send(Withdraw((request,)))
    assert worker.expect(Withdrawn).requests == ()
    last(worker, request, "CANCELLED", "cancelled while the model answered it")


def values(worker: WorkerProcess, request: int, count: int, first: int = 0) -> None:
    for index in range(first, first + count):
        found = row(worker)
        assert (found.request, found.more, found.error) == (request, True, None)
        assert found.outputs[0].data == np.float32(index).tobytes()


def last(worker: WorkerProcess, request: int, code: str | None = None, text: str = "") -> None:
    found = row(worker)
    assert (found.request, found.more, found.outputs) == (request, False, ())
    assert (found.error.code if found.error is not None else None) == code
    assert found.error is None or text in found.error.text


def done(worker: WorkerProcess) -> None:
    assert worker.expect(Done).rows == ()


def quiet(worker: WorkerProcess) -> None:
    """Asserts that no report is unread and that the worker reads its orders."""
    worker.send(Ping(77))
    assert worker.expect(Pong).number == 77


def gate_in(folder: Path) -> str:
    path = folder / "gate"
    os.mkfifo(path)
    return str(path)


def open_gate(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY))
