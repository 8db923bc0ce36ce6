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
from tests.support.cases import cases
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
def attempt(what):
    try:
        what()
    except pb_utils.TritonModelException as error:
        print(error, flush=True)
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))


class TritonPythonModel:
    def execute(self, requests):
        self.old = getattr(self, "kept", None)
        self.kept = requests[0]
        responses = [self.run(request) for request in requests]
        del requests
        return responses

    def run(self, request):
        scope = globals() | {"self": self, "sender": request.get_response_sender}
        exec(wishes(request)["do"], scope)
        return scope.get("returned")
"""
"""Each request has the statements that are run for it. They may set the response that is returned."""
SENT = "sender().send(response(2), FINAL)"
EXPECTED: dict[str, float | str] = {
    "returned = response(1)": 1,
    SENT: 2,
    "sender().send(response(3)); sender().send(flags=FINAL)": 3,
    f"threading.Thread(target=lambda: {SENT}).start()": 2,
    "sender().send(response(4), FINAL); returned = response(44)": 4,
    "sender().send(response(5)); attempt(lambda: sender().send(response(6))); sender().send(flags=FINAL)": 5,
    "sender()": "the model dropped the request without a response",
    "sender(); returned = response(7)": 7,
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
    rows = worker.run(*[asks(number, 0, do=statements) for number, statements in enumerate(EXPECTED, 1)])
    for row, expected in zip(rows, EXPECTED.values(), strict=True):
        if isinstance(expected, str):
            assert_failed(row, "MODEL_FAILED", expected)
        else:
            sent(row, expected)
    (late,) = worker.run(asks(20, 0, do="returned = attempt(self.old.get_response_sender)"))
    assert_failed(late, "MODEL_FAILED", "its response sender can send nothing more")
    assert worker.said().count("Non-decoupled model cannot send more than one response.") == 2


@cases(
    ("sender().send(flags=FINAL)", FINAL_FIRST),
    ("sender().send(response(8)); raise ValueError('told to')", "ValueError: told to"),
)
def test_sent_responses_are_kept_if_execute_fails(do: str, text: str, worker: WorkerProcess) -> None:
    first, second, third = worker.run(asks(1, 0, do=SENT), asks(2, 0, do=do), asks(3, 0, do=SENT))
    sent(first, 2)
    if "raise" in do:
        sent(second, 8)
    else:
        assert second.error is not None
    assert assert_failed(third, "MODEL_FAILED", text).text.startswith(LEAD)


def test_a_sender_is_closed_once_the_response_was_returned(worker: WorkerProcess) -> None:
    (row,) = worker.run(asks(1, 0, do="self.sender = sender(); returned = response(9)"))
    sent(row, 9)
    (row,) = worker.run(asks(2, 0, do="returned = attempt(lambda: self.sender.send(response(10)))"))
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
