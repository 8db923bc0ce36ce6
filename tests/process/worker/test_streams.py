"""Decoupled models at a real worker: answers from execute and from threads, the room for them, the end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.protocol.messages import Done, Execute, More, Row, Stop, Streamed, Withdraw, Withdrawn
from shmserve.repo.config.schema import ModelParameter
from tests.support.workers.stream_models import (
    COROUTINE,
    GENERATOR,
    IN_EXECUTE,
    IN_THREADS,
    asks,
    decoupled,
    done,
    gate_in,
    last,
    open_gate,
    quiet,
    row,
    serving,
    values,
)
from tests.support.workers.worker_harness import WorkerProcess

pytestmark = pytest.mark.process


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


def test_threads_go_on_while_further_batches_run(tmp_path: Path) -> None:
    source = IN_THREADS.replace(
        "for index in", 'gate(request) if "gate" in wishes(request) else None\n        for index in'
    )
    gate = gate_in(tmp_path)
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


def test_only_iterative_models_can_have_a_request_run_again(tmp_path: Path) -> None:
    source = """\
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            request.get_response_sender().send(response(1))
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
"""
    with serving(tmp_path, source) as worker:
        worker.execute(asks(1, 0))
        values(worker, 1, 1, first=1)
        error = row(worker).error
        assert error is not None
        assert error.code == "INVALID_ARG"
        assert "while the model is not configured to handle such a flag" in error.text
        done(worker)


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
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.zeros((1, 1), complex))]))
            elif wish == "other":
                sender.send("y")
            sender.send(response(1))  # dropped: it has ended
            sender.send(flags=FINAL)
"""
    with serving(tmp_path, source) as worker:
        for number, (wish, code, text) in enumerate(
            [
                ("error", "INVALID_ARG", "said no"),
                ("dtype", "MODEL_FAILED", "wrong data type: expected FP32, found complex128"),
                ("other", "MODEL_FAILED", "Expected an 'InferenceResponse' object in the execute function return list"),
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
            "Inference Response object must be provided when the response flags is set to zero.",
            "Unable to send response. Unsupported flag value. It is 5, and neither 0 nor ",
            "a response sender comes from InferenceRequest.get_response_sender()",
            "Unable to send response. Response sender has been closed.",
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
        for count, text in (
            (0, "ValueError: told to"),
            (1, "is using the decoupled mode and the execute function must return None."),
        ):
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
    gate = gate_in(tmp_path)
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


def test_room_that_is_given_before_the_model_has_the_request(tmp_path: Path) -> None:
    with serving(tmp_path, IN_EXECUTE) as worker:
        worker.send(Execute(1, 0, (asks(1, 5, window=2),), more=True), More(1, 2))
        worker.send(Execute(2, 1, (asks(2, 1),)), More(1, 1))
        values(worker, 1, 5)
        last(worker, 1)


def test_a_thread_that_sends_for_many_need_not_wait(tmp_path: Path) -> None:
    source = """\
class TritonPythonModel:
    def execute(self, requests):
        for index in range(3):
            for request in requests:
                request.get_response_sender().send(response(index))
        for request in requests:
            request.get_response_sender().send(pb_utils.InferenceResponse([]), FINAL)
"""
    given = replace(decoupled(tmp_path, source), parameters={"send_waits": ModelParameter(string_value="false")})
    with WorkerProcess(given, tmp_path) as worker:
        worker.loaded()
        worker.execute(asks(1, 0, window=1), asks(2, 0, window=9))
        assert [row(worker).request for _ in range(2)] == [1, 2]
        values(worker, 2, 2, first=1)
        last(worker, 2)
        done(worker)
        worker.send(More(1, 1))
        values(worker, 1, 1, first=1)
        worker.send(More(1, 1))
        values(worker, 1, 1, first=2)
        last(worker, 1)
        worker.execute(asks(3, 0, window=1))
        values(worker, 3, 1)
        done(worker)
        worker.send(Withdraw((3,)))
        assert worker.expect(Withdrawn).requests == ()
        last(worker, 3, "CANCELLED")


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
