"""Models with one answer for each request, given by senders or by a later run, at a real worker."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.protocol.messages import Failure
from shmserve.repo.config.schema import ModelSequenceBatching
from tests.support.workers.stream_models import asks, decoupled
from tests.support.workers.worker_harness import WorkerProcess

pytestmark = pytest.mark.process
NOT_ITERATIVE = (
    "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to handle "
    "such a flag."
)

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
        return response(44)

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

    def sent_and_raised(self, request):
        request.get_response_sender().send(response(8))
        raise ValueError("told to")

    def returned_and_sent(self, request):
        self.sender = request.get_response_sender()
        return response(9)

    def too_late_to_send(self, request):
        try:
            self.sender.send(response(10))
        except pb_utils.TritonModelException as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))

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
        "both": 4,
        "two": 5,
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
        assert worker.said().count("Non-decoupled model cannot send more than one response.") == 2


ENDED = "Non-decoupled model cannot send complete final before sending a response."
LEAD = "Failed to process the request(s) for model instance 'm_0_0', message: "


def test_what_was_sent_before_execute_fails_is_the_answer(tmp_path: Path) -> None:
    ordinary = replace(decoupled(tmp_path, SENDERS, max_batch=16), model_transaction_policy=None)
    with WorkerProcess(ordinary, tmp_path) as worker:
        worker.loaded()
        for wish, text in (("ended", ENDED), ("sent_and_raised", "ValueError: told to")):
            first, second, third = worker.run(asks(1, 0, wish="sent"), asks(2, 0, wish=wish), asks(3, 0, wish="sent"))
            assert first.outputs[0].data == np.float32(2).tobytes()
            if wish == "sent_and_raised":
                assert second.outputs[0].data == np.float32(8).tobytes()
            else:
                assert second.error is not None
            assert third.error is not None
            assert third.error.code == "MODEL_FAILED"
            assert third.error.text.startswith(LEAD)
            assert text in third.error.text


def test_a_sender_is_closed_once_the_response_was_returned(tmp_path: Path) -> None:
    ordinary = replace(decoupled(tmp_path, SENDERS, max_batch=16), model_transaction_policy=None)
    with WorkerProcess(ordinary, tmp_path) as worker:
        worker.loaded()
        (row,) = worker.run(asks(1, 0, wish="returned_and_sent"))
        assert row.outputs[0].data == np.float32(9).tobytes()
        (row,) = worker.run(asks(2, 0, wish="too_late_to_send"))
        assert row.error is not None
        assert row.error.text == "Unable to send response. Response sender has been closed."


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_execute_may_return_nothing_if_all_was_sent(tmp_path: Path, kind: str) -> None:
    source = f"""\
class TritonPythonModel:
    {kind} execute(self, requests):
        for request in requests:
            if wishes(request)["wish"] == "send":
                request.get_response_sender().send(response(1), FINAL)
"""
    ordinary = replace(decoupled(tmp_path, source, max_batch=16), model_transaction_policy=None)
    with WorkerProcess(ordinary, tmp_path) as worker:
        worker.loaded()
        for row in worker.run(asks(1, 0, wish="send"), asks(2, 0, wish="send")):
            assert row.error is None, row.error
        sent, neither = worker.run(asks(3, 0, wish="send"), asks(4, 0, wish="nothing"))
        assert sent.error is None
        assert neither.error is not None
        assert "Expected an 'InferenceResponse' object in the execute function return list" in neither.error.text


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
            responses.append(None if again == 1 else response(1))
        return responses
"""
    ordinary = replace(decoupled(tmp_path, source), model_transaction_policy=None)
    iterative = replace(ordinary, sequence_batching=ModelSequenceBatching(iterative_sequence=True))
    with WorkerProcess(iterative, tmp_path) as worker:
        worker.loaded()
        worker.execute(asks(1, 0, again=1), asks(2, 0, again=0), asks(3, 0, again=1))
        rows, ended = worker.done()
        assert ([found.request for found in rows], ended.again) == ([2], (1, 3))
        for row in worker.run(asks(4, 0, again=2)):
            assert row.error is not None
            assert "Expected a None object in the execute function return list for reschduled request" in row.error.text
    with WorkerProcess(ordinary, tmp_path) as worker:
        worker.loaded()
        refused, answered = worker.run(asks(1, 0, again=1), asks(2, 0, again=0))
        assert answered.error is None
        assert refused.error == Failure("INVALID_ARG", NOT_ITERATIVE)
