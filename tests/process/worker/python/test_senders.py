"""Models with one response for each request, sent by a response sender or by a later run, in a worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.protocol.messages import Failure
from shmserve.protocol.worker_messages import Row, Work
from shmserve.repo.config.schema import ModelConfig, ModelSequenceBatching
from tests.support.workers.in_process import loaded, run
from tests.support.workers.models.stream_models import asks, decoupled
from tests.support.workers.worker_harness import WorkerProcess, assert_failed, running

pytestmark = pytest.mark.process
NOT_ITERATIVE = Failure(
    "INVALID_ARG",
    "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to handle "
    "such a flag.",
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

    def sent_before_final(self, request):
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


EXPECTED: dict[str, float | str] = {
    "returned": 1,
    "sent": 2,
    "sent_before_final": 3,
    "later": 2,
    "both": 4,
    "two": 5,
    "forgotten": "the model dropped the request without a response",
    "asked": 7,
}
FINAL_FIRST = "Non-decoupled model cannot send complete final before sending a response."
LEAD = "Failed to process the request(s) for model instance 'm_0_0', message: "


def ordinary(folder: Path, source: str) -> ModelConfig:
    return replace(decoupled(folder, source, max_batch=16), model_transaction_policy=None)


def sent(row: Row, value: float) -> None:
    assert row.error is None, row.error
    assert row.outputs[0].data == np.float32(value).tobytes()


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    folder = tmp_path_factory.mktemp("model")
    with running(ordinary(folder, SENDERS), folder) as found:
        yield found


def test_each_request_gets_its_first_response(worker: WorkerProcess) -> None:
    rows = worker.run(*[asks(number, 0, wish=wish) for number, wish in enumerate(EXPECTED, 1)])
    for row, expected in zip(rows, EXPECTED.values(), strict=True):
        if isinstance(expected, str):
            assert_failed(row, "MODEL_FAILED", expected)
        else:
            sent(row, expected)
    (late,) = worker.run(asks(20, 0, wish="too_late"))
    assert_failed(late, "MODEL_FAILED", "its response sender can send nothing more")
    assert worker.said().count("Non-decoupled model cannot send more than one response.") == 2


@pytest.mark.parametrize(("wish", "text"), [("ended", FINAL_FIRST), ("sent_and_raised", "ValueError: told to")])
def test_sent_responses_are_kept_if_execute_fails(worker: WorkerProcess, wish: str, text: str) -> None:
    first, second, third = worker.run(asks(1, 0, wish="sent"), asks(2, 0, wish=wish), asks(3, 0, wish="sent"))
    sent(first, 2)
    if wish == "sent_and_raised":
        sent(second, 8)
    else:
        assert second.error is not None
    assert assert_failed(third, "MODEL_FAILED", text).text.startswith(LEAD)


def test_a_sender_is_closed_once_the_response_was_returned(worker: WorkerProcess) -> None:
    (row,) = worker.run(asks(1, 0, wish="returned_and_sent"))
    sent(row, 9)
    (row,) = worker.run(asks(2, 0, wish="too_late_to_send"))
    assert assert_failed(row, "MODEL_FAILED").text == "Unable to send response. Response sender has been closed."


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_execute_may_return_none_if_all_responses_were_sent(tmp_path: Path, kind: str) -> None:
    source = f"""\
class TritonPythonModel:
    {kind} execute(self, requests):
        for request in requests:
            if wishes(request)["wish"] == "send":
                request.get_response_sender().send(response(1), FINAL)
"""
    with loaded(ordinary(tmp_path, source), tmp_path) as model:
        for row in run(model, asks(1, 0, wish="send"), asks(2, 0, wish="send")):
            sent(row, 1)
        first, second = run(model, asks(3, 0, wish="send"), asks(4, 0, wish="nothing"))
        sent(first, 1)
        assert_failed(second, "MODEL_FAILED", "Expected an 'InferenceResponse' object in the execute")


RESCHEDULING = """\
class TritonPythonModel:
    def execute(self, requests):
        return [self.one(request, wishes(request)["again"]) for request in requests]

    def one(self, request, again):
        request.set_release_flags(
            pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE if again else pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL
        )
        return None if again == 1 else response(1)
"""


@pytest.mark.parametrize("iterative", [True, False])
def test_only_iterative_models_can_reschedule_requests(tmp_path: Path, iterative: bool) -> None:
    def ask(number: int, again: int) -> Work:
        request = asks(number, 0, again=again)
        assert request.options is not None
        return replace(request, options=replace(request.options, sequence=number))

    batching = ModelSequenceBatching(iterative_sequence=True) if iterative else None
    with loaded(replace(ordinary(tmp_path, RESCHEDULING), sequence_batching=batching), tmp_path) as model:
        rows, _, again = model.runner.run([ask(1, 1), ask(2, 0), ask(3, 1)])
        if not iterative:
            assert [row.error for row in rows] == [NOT_ITERATIVE, None, NOT_ITERATIVE]
            return
        assert ([row.request for row in rows], again) == ([2], (1, 3))
        (row,) = run(model, ask(4, 2))
        assert_failed(row, "MODEL_FAILED", "Expected a None object in the execute function return list for")
