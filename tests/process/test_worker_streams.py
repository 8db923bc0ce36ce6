"""Decoupled models at a real worker: answers from threads and coroutines, room for them, cancellation, the end.

A model waits at gates, named pipes that the test opens, so that what shall happen in between does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.messages import Done, More, Options, Ping, Pong, Row, Stop, Streamed, Tensor, Withdraw, Withdrawn
from shmserve.messages import Work as WorkMessage
from shmserve.repo.schema import ModelConfig, ModelTransactionPolicy
from tests.worker_harness import WorkerProcess, config, work
from tests.worker_models import python_model

pytestmark = pytest.mark.process

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
                sender.send(response(index))
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
    """The next one that was streamed."""
    rows = worker.expect(Streamed).rows
    assert len(rows) == 1
    return rows[0]


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
    """Nothing has been said that is not read yet, and the worker reads its orders."""
    worker.send(Ping(77))
    assert worker.expect(Pong).number == 77


@pytest.fixture
def gates(tmp_path: Path) -> Callable[..., str]:
    def make(name: str) -> str:
        path = tmp_path / name
        os.mkfifo(path)
        return str(path)

    return make


def open_gate(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY))


# ---------------------------------------------------------------------------------------------- answers


def test_answers_are_sent_at_once_and_before_the_batch_is_done(tmp_path: Path) -> None:
    with serving(tmp_path, IN_EXECUTE) as worker:
        worker.execute(asks(1, 3), asks(2, 0), asks(3, 1))
        values(worker, 1, 3)
        last(worker, 1)
        last(worker, 2)
        values(worker, 3, 1)
        last(worker, 3)
        done(worker)


def test_threads_go_on_while_further_batches_run(tmp_path: Path, gates: Callable[..., str]) -> None:
    source = IN_THREADS.replace(
        "for index in", 'gate(request) if "gate" in wishes(request) else None\n        for index in'
    )
    gate = gates("gate")
    with serving(tmp_path, source) as worker:
        worker.execute(asks(1, 2, gate=gate))
        done(worker)
        worker.execute(asks(2, 1))
        found = [worker.next()[0] for _ in range(3)]  # the thread and the end of the batch race
        assert sum(isinstance(message, Done) for message in found) == 1
        rows = [message.rows[0] for message in found if isinstance(message, Streamed)]
        assert [(one.request, one.more) for one in rows] == [(2, True), (2, False)]
        open_gate(gate)
        values(worker, 1, 2)
        last(worker, 1)


def test_large_answers_are_in_shared_memory_and_freed(tmp_path: Path) -> None:
    with serving(tmp_path, IN_THREADS) as worker:
        worker.execute(asks(1, 3, size=5000))
        seen: list[Row] = []
        while len(seen) < 4:
            message, _ = worker.next()
            if isinstance(message, Streamed):
                seen.append(message.rows[0])
        for index, found in enumerate(seen[:3]):
            assert isinstance(found.outputs[0].data, tuple)
            assert (worker.array(found.outputs[0], np.float32) == index).all()
        worker.mapped.close()


def test_what_a_response_gets_wrong_ends_its_stream(tmp_path: Path) -> None:
    source = """\
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            sender.send(response(0))
            wish = wishes(request)["wish"]
            if wish == "error":
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("said no", 3)))
            elif wish == "dtype":
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.zeros((1, 1)))]))
            elif wish == "nothing":
                sender.send(pb_utils.InferenceResponse([]))
            elif wish == "other":
                sender.send("y")
            sender.send(response(1))  # dropped: it has ended
            sender.send(flags=FINAL)
"""
    with serving(tmp_path, source) as worker:
        for number, (wish, code, text) in enumerate(
            [
                ("error", "INVALID_ARG", "said no"),
                ("dtype", "MODEL_FAILED", "wrong data type: expected FP32, found FP64"),
                ("nothing", "MODEL_FAILED", "the model did not produce output 'y'"),
                ("other", "MODEL_FAILED", "expected an InferenceResponse object for each request, found str"),
            ],
            1,
        ):
            worker.execute(asks(number, 0, wish=wish))
            values(worker, number, 1)
            last(worker, number, code, text)
            done(worker)


def test_what_models_must_not_do_with_a_sender(tmp_path: Path) -> None:
    source = """\
class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        sender = request.get_response_sender()
        said = []
        for what in (lambda: sender.send(), lambda: sender.send(response(0), 5), pb_utils.InferenceResponseSender):
            try:
                what()
            except pb_utils.TritonModelException as error:
                said.append(str(error))
        sender.send(response(0), FINAL)
        try:
            sender.send(response(1))
        except pb_utils.TritonModelException as error:
            said.append(str(error))
        print(said, flush=True)
"""
    with serving(tmp_path, source) as worker:
        worker.execute(asks(1, 0))
        found = row(worker)
        assert (found.more, found.outputs[0].data) == (False, np.float32(0).tobytes())
        done(worker)
        for text in (
            "without TRITONSERVER_RESPONSE_COMPLETE_FINAL there must be a response to send",
            "flags=5 is neither 0 nor TRITONSERVER_RESPONSE_COMPLETE_FINAL",
            "a response sender comes from InferenceRequest.get_response_sender()",
            "the last response of this request has been sent",
        ):
            assert text in worker.said()


def test_a_batch_that_fails_has_answered_some(tmp_path: Path) -> None:
    source = """\
class TritonPythonModel:
    def execute(self, requests):
        self.kept = requests[2].get_response_sender()
        requests[0].get_response_sender().send(response(7), FINAL)
        requests[1].get_response_sender().send(response(0))
        if count_of(requests[0]):
            return [response(1)]
        raise ValueError("told to")
"""
    with serving(tmp_path, source) as worker:
        for count, text in ((0, "ValueError: told to"), (1, "execute must return None and send its responses")):
            worker.execute(asks(1, count), asks(2, 0), asks(3, 0))
            assert (row(worker).request, row(worker).request) == (1, 2)
            rows = worker.expect(Done).rows
            assert [one.request for one in rows] == [2, 3]
            for one in rows:
                assert one.error is not None
                assert one.error.code == "MODEL_FAILED"
                assert text in one.error.text


def test_a_sender_that_is_dropped_without_an_end(tmp_path: Path) -> None:
    source = """\
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            if wishes(request)["wish"] == "thread":
                threading.Thread(target=self.later, args=(request.get_response_sender(), request)).start()
            elif wishes(request)["wish"] == "cycle":
                circle = [request]
                circle.append(circle)
                del circle
                gc.collect()
        del request

    def later(self, sender, request):
        gate(request)
        sender.send(response(0))
"""
    gate = str(tmp_path / "gate")
    os.mkfifo(gate)
    text = "the model dropped the request without a last response"
    with serving(tmp_path, source) as worker:
        worker.execute(asks(1, 0, wish="nothing"))
        last(worker, 1, "MODEL_FAILED", text)
        done(worker)
        worker.execute(asks(2, 0, wish="thread", gate=gate))
        done(worker)
        open_gate(gate)
        values(worker, 2, 1)
        last(worker, 2, "MODEL_FAILED", text)


# ---------------------------------------------------------------------------------------------- room


@pytest.mark.parametrize("source", [IN_EXECUTE, IN_THREADS], ids=["execute", "threads"])
def test_no_more_answers_than_there_is_room_for(tmp_path: Path, source: str) -> None:
    with serving(tmp_path, source) as worker:
        worker.execute(asks(1, 6, window=2))
        threaded = source is IN_THREADS
        found = [worker.next()[0] for _ in range(2 + threaded)]
        assert sum(isinstance(message, Streamed) for message in found) == 2
        quiet(worker)
        worker.send(More(1, 1))
        values(worker, 1, 1, first=2)
        quiet(worker)
        worker.send(More(1, 2), More(1, 1))
        values(worker, 1, 3, first=3)
        last(worker, 1)  # without outputs it needs no room
        if not threaded:
            done(worker)
        worker.send(More(1, 5), More(99, 1))  # too late, and of nobody
        quiet(worker)


def test_many_threads_wait_for_room_of_their_own(tmp_path: Path) -> None:
    with serving(tmp_path, IN_THREADS) as worker:
        worker.execute(*[asks(number, 4, window=1) for number in range(1, 9)])
        seen: dict[int, int] = dict.fromkeys(range(1, 9), 0)
        ended = 0
        while ended < 8:
            message, _ = worker.next()
            if isinstance(message, Done):
                continue
            for found in message.rows:
                if found.more:
                    assert found.outputs[0].data == np.float32(seen[found.request]).tobytes()
                    seen[found.request] += 1
                    worker.send(More(found.request, 1))
                else:
                    ended += 1
        assert set(seen.values()) == {4}


# ---------------------------------------------------------------------------------------------- coroutines

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


@pytest.mark.parametrize("source", [COROUTINE, GENERATOR], ids=["execute", "generator"])
def test_coroutines_wait_for_room_beside_each_other(tmp_path: Path, source: str) -> None:
    with serving(tmp_path, source) as worker:
        worker.execute(asks(1, 4, window=1), asks(2, 2, window=5), asks(3, 0))
        seen: dict[int, list[Row]] = {1: [], 2: [], 3: []}
        ended = False
        while not (ended and [len(rows) for rows in seen.values()] == [1, 3, 1]):
            message, _ = worker.next()
            if isinstance(message, Done):
                ended = True
            else:
                seen[message.rows[0].request].append(message.rows[0])
        assert [found.more for found in seen[2]] == [True, True, False]
        quiet(worker)
        worker.send(More(1, 2))
        values(worker, 1, 2, first=1)
        worker.send(More(1, 1))
        values(worker, 1, 1, first=3)
        last(worker, 1)


@pytest.mark.parametrize("source", [COROUTINE, GENERATOR], ids=["execute", "generator"])
def test_coroutines_that_fail(tmp_path: Path, source: str) -> None:
    with serving(tmp_path, source) as worker:
        worker.execute(asks(1, 1, **{"raise": 1}))
        found = [worker.next()[0] for _ in range(3)]
        rows = [message.rows[0] for message in found if isinstance(message, Streamed)]
        assert [one.more for one in rows] == [True, False]
        assert rows[1].error is not None
        assert rows[1].error.text.endswith("message: ValueError: told to")
        quiet(worker)
        assert "ValueError: told to" in worker.said()


def test_a_coroutine_that_does_not_wait(tmp_path: Path) -> None:
    """Its answers are kept as they were when they were sent, up to a limit."""
    source = """\
class TritonPythonModel:
    async def execute(self, requests):
        (request,) = requests
        sender = request.get_response_sender()
        value = np.zeros((1, 1), np.float32)
        for index in range(count_of(request)):
            value[:] = index
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", value)]))
        sender.send(flags=FINAL)
        print("sent", flush=True)
"""
    with serving(tmp_path, source) as worker:
        worker.execute(asks(1, 5, window=1))
        found = [worker.next()[0] for _ in range(2)]
        assert {type(message) for message in found} == {Done, Streamed}
        worker.send(More(1, 2))
        values(worker, 1, 2, first=1)
        worker.send(More(1, 2))
        values(worker, 1, 2, first=3)
        last(worker, 1)
        worker.execute(asks(2, 2000, window=1))
        found = [worker.next()[0] for _ in range(3)]
        (failed,) = [message.rows[0] for message in found if isinstance(message, Streamed) and not message.rows[0].more]
        assert failed.error is not None
        assert (failed.error.code, failed.error.text) == (
            "UNAVAILABLE",
            "1024 answers wait for a caller that does not read; await what send() returns",
        )
        quiet(worker)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("class TritonPythonModel:\n    pass\n", "has no execute method"),
        (GENERATOR, "has a stream method and no execute: such a model needs model_transaction_policy"),
    ],
)
def test_what_is_not_loaded(tmp_path: Path, source: str, text: str) -> None:
    given = replace(decoupled(tmp_path, source), model_transaction_policy=None)
    with WorkerProcess(given, tmp_path) as worker:
        assert text in worker.failed().text
        assert worker.ended() != 0


# ---------------------------------------------------------------------------------------------- cancellation


@pytest.mark.parametrize("source", [IN_EXECUTE, IN_THREADS], ids=["execute", "threads"])
def test_who_waits_for_room_is_cancelled(tmp_path: Path, source: str) -> None:
    with serving(tmp_path, source) as worker:
        worker.execute(asks(1, 1000, window=1))
        found = [worker.next()[0] for _ in range(1 + (source is IN_THREADS))]
        assert any(isinstance(message, Streamed) for message in found)
        waiting = worker.execute(asks(2, 1), open=True) if source is IN_EXECUTE else 0
        worker.send(Withdraw((1, 2)))
        assert worker.expect(Withdrawn).requests == ((2,) if waiting else ())
        last(worker, 1, "CANCELLED", "cancelled while the model answered it")
        if waiting:
            done(worker)
        quiet(worker)


def test_a_model_in_execute_is_told_that_it_is_cancelled(tmp_path: Path, gates: Callable[..., str]) -> None:
    source = """\
class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        gate(request)
        while not request.is_cancelled():
            pass
        sender = request.get_response_sender()
        assert sender.is_cancelled()
        sender.send(response(1))
        sender.send(response(2), FINAL)
"""
    gate = gates("gate")
    with serving(tmp_path, source) as worker:
        worker.execute(asks(1, 1, gate=gate))
        worker.send(Ping(1))
        open_gate(gate)
        assert worker.expect(Pong).number == 1  # it reads what comes while it asks
        worker.send(Withdraw((1,)))
        assert worker.expect(Withdrawn).requests == ()
        last(worker, 1, "CANCELLED")
        done(worker)


@pytest.mark.parametrize("source", [COROUTINE, GENERATOR], ids=["execute", "generator"])
def test_coroutines_are_cancelled(tmp_path: Path, source: str) -> None:
    with serving(tmp_path, source) as worker:
        worker.execute(asks(1, 1000, window=1, name="one"))
        worker.execute(asks(2, 1000, window=1, name="two"))
        found = [worker.next()[0] for _ in range(4)]
        assert sum(isinstance(message, Streamed) for message in found) == 2
        worker.send(Withdraw((1,)))
        assert worker.expect(Withdrawn).requests == ()
        last(worker, 1, "CANCELLED")
        worker.send(More(2, 1))
        values(worker, 2, 1, first=1)
        worker.send(Withdraw((2,)))
        assert worker.expect(Withdrawn).requests == ()
        last(worker, 2, "CANCELLED")
        if source is GENERATOR:
            assert "closed one True" in worker.said()


def test_part_of_a_batch_of_a_coroutine_is_cancelled(tmp_path: Path) -> None:
    with serving(tmp_path, COROUTINE) as worker:
        worker.execute(asks(1, 3, window=1), asks(2, 3, window=1))
        found = [worker.next()[0] for _ in range(3)]
        assert sum(isinstance(message, Streamed) for message in found) == 2
        worker.send(Withdraw((1,)))
        assert worker.expect(Withdrawn).requests == ()
        last(worker, 1, "CANCELLED")
        worker.send(More(2, 2))
        values(worker, 2, 2, first=1)
        last(worker, 2)


def test_ordinary_models_are_told_too(tmp_path: Path, gates: Callable[..., str]) -> None:
    source = """\
class TritonPythonModel:
    def execute(self, requests):
        gate(requests[0])
        if wishes(requests[0]).get("thread"):
            thread = threading.Thread(target=self.wait, args=(requests,))
            thread.start()
            thread.join()
        else:
            self.wait(requests)
        return [response(request.is_cancelled()) for request in requests]

    def wait(self, requests):
        while not requests[1].is_cancelled():
            pass
"""
    gate = gates("gate")
    ordinary = replace(decoupled(tmp_path, source), model_transaction_policy=None)
    with WorkerProcess(ordinary, tmp_path) as worker:
        worker.loaded()
        for first, thread in ((1, False), (4, True)):
            worker.execute(*[asks(first + index, 0, gate=gate, thread=thread) for index in range(3)])
            open_gate(gate)
            worker.send(Withdraw((first + 1,)))
            assert worker.expect(Withdrawn).requests == ()
            rows, _ = worker.done()
            assert [np.frombuffer(found.outputs[0].data, np.float32)[0] for found in rows] == [0, 1, 0]  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------- the end


@pytest.mark.parametrize("source", [IN_THREADS, COROUTINE, GENERATOR], ids=["threads", "execute", "generator"])
def test_a_stop_ends_what_is_open(tmp_path: Path, source: str) -> None:
    with serving(tmp_path, source) as worker:
        worker.execute(asks(1, 1000, window=1), asks(2, 1000, window=2))
        found = [worker.next()[0] for _ in range(4)]
        assert sum(isinstance(message, Streamed) for message in found) == 3
        worker.send(Stop())
        for number in (1, 2):
            last(worker, number, "UNAVAILABLE", "the model is being unloaded")
        assert worker.ended() == 0
        if source is IN_THREADS:
            assert "finalized" in worker.said()


@pytest.mark.parametrize("source", [IN_EXECUTE, IN_THREADS, GENERATOR], ids=["execute", "threads", "generator"])
def test_the_broker_goes_while_answers_wait(tmp_path: Path, source: str) -> None:
    with WorkerProcess(decoupled(tmp_path, source), tmp_path) as worker:
        worker.loaded()
        worker.execute(asks(1, 1000, window=1))
        while not isinstance(worker.next()[0], Streamed):
            pass
        worker.sock.close()
        assert worker.process.wait(60) != 0


# ---------------------------------------------------------------------------------------------- one answer each

SENDERS = """\
class TritonPythonModel:
    def execute(self, requests):
        self.old = getattr(self, "kept", None)
        self.kept = requests[0]
        responses = [getattr(self, wishes(request)["wish"])(request) for request in requests]
        del requests
        return responses

    def returned(self, request):
        return response(1)

    def sent(self, request):
        sender = request.get_response_sender()
        sender.send(response(2), FINAL)

    def sent_before_its_end(self, request):
        sender = request.get_response_sender()
        sender.send(response(3))
        sender.send(flags=FINAL)

    def later(self, request):
        threading.Thread(target=self.sent, args=(request,)).start()

    def both(self, request):
        request.get_response_sender().send(response(4), FINAL)
        return response(4)

    def two(self, request):
        sender = request.get_response_sender()
        sender.send(response(5))
        try:
            sender.send(response(6))
        except pb_utils.TritonModelException as error:
            print(error, flush=True)
        sender.send(flags=FINAL)

    def ended(self, request):
        request.get_response_sender().send(flags=FINAL)

    def forgotten(self, request):
        request.get_response_sender()

    def too_late(self, request):
        try:
            self.old.get_response_sender()
        except pb_utils.TritonModelException as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))

    def asked(self, request):
        request.get_response_sender()
        return response(7)
"""


def test_senders_of_models_with_one_response(tmp_path: Path) -> None:
    ordinary = replace(decoupled(tmp_path, SENDERS, max_batch=16), model_transaction_policy=None)
    expected: dict[str, float | str] = {
        "returned": 1,
        "sent": 2,
        "sent_before_its_end": 3,
        "later": 2,
        "both": "a response was both sent and returned for the same request",
        "two": 5,
        "ended": "the last response was sent without a response before it",
        "forgotten": "the model dropped the request without a response",
        "asked": 7,
    }
    with WorkerProcess(ordinary, tmp_path) as worker:
        worker.loaded()
        rows = worker.run(*[asks(number, 0, wish=wish) for number, wish in enumerate(expected, 1)])
        for found, wanted in zip(rows, expected.values(), strict=True):
            if isinstance(wanted, str):
                assert found.error is not None
                assert wanted in found.error.text
            else:
                assert found.error is None, found.error
                assert found.outputs[0].data == np.float32(wanted).tobytes()
        (late,) = worker.run(asks(20, 0, wish="too_late"))
        assert late.error is not None
        assert "its response sender is of no use" in late.error.text
        assert "a request has one response" in worker.said()


def test_requests_that_want_to_be_run_again(tmp_path: Path) -> None:
    source = """\
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            again = wishes(request)["again"]
            request.set_release_flags(
                pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE if again else pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL
            )
            responses.append(None if again else response(1))
        return responses
"""
    ordinary = replace(decoupled(tmp_path, source), model_transaction_policy=None)
    with WorkerProcess(ordinary, tmp_path) as worker:
        worker.loaded()
        worker.execute(asks(1, 0, again=1), asks(2, 0, again=0), asks(3, 0, again=1))
        rows, ended = worker.done()
        assert ([found.request for found in rows], ended.again) == ([2], (1, 3))
