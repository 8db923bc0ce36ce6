"""Models with one answer for each request, given by senders or by a later run, at a real worker."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from tests.stream_models import (
    asks,
    decoupled,
)
from tests.worker_harness import WorkerProcess

pytestmark = pytest.mark.process


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
