"""Python models in a worker: the requests that they get, the responses that they may return, and errors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve.protocol.messages import Options, Ping, Pong, Tensor, Wanted
from shmserve.protocol.worker_messages import Probe, Probed, Row
from shmserve.repo.config.schema import as_triton_json
from tests.support.cases import cases
from tests.support.workers.models.worker_models import python_model
from tests.support.workers.worker_harness import WorkerProcess, assert_failed, config, running, work

pytestmark = pytest.mark.process

X, Y = {"x": ("FP32", (-1,))}, {"y": ("FP32", (-1,))}


def tensor(*values: float) -> Tensor:
    return Tensor("x", "FP32", (1, len(values)), np.array(values, np.float32).tobytes())


SCRIPTED = """\
import json
import os
import sys

import numpy as np
import triton_python_backend_utils as pb_utils
import c_python_backend_utils

from . import helper as relative
from .parts.deep import DEEP
from helper import DOUBLE

assert (__name__, __package__, relative.__name__, DEEP) == ("1.model", "1", "1.helper", 2)
assert c_python_backend_utils.Tensor is pb_utils.Tensor


class Unreadable(Exception):
    def __str__(self):
        return 5


def answer(array=np.zeros((1, 1), np.float32), **how):
    return pb_utils.InferenceResponse([pb_utils.Tensor("y", array)], **how)


def failed(*what):
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(*what))


def throw(error):
    raise error


def caught(what):
    try:
        return what()
    except pb_utils.TritonModelException as error:
        return failed(str(error), pb_utils.TritonError.NOT_FOUND)


class TritonPythonModel:
    def initialize(self, args):
        self.args = args
        self.model_config = json.loads(args["model_config"])
        output = pb_utils.get_output_config_by_name(self.model_config, "y")
        assert pb_utils.triton_string_to_numpy(output["data_type"]) is np.float32
        assert not pb_utils.using_decoupled_model_transaction_policy(self.model_config)

    def execute(self, requests):
        wish = json.loads(requests[0].parameters()).get("batch", "[self.one(request) for request in requests]")
        return eval(wish, globals() | {"self": self, "requests": requests})

    def one(self, request):
        wish = json.loads(request.parameters()).get("wish", "self.double(request)")
        return eval(wish, globals() | {"self": self, "request": request})

    def double(self, request):
        return answer(pb_utils.get_input_tensor_by_name(request, "x").as_numpy() * DOUBLE)

    def finalize(self):
        print("finalize was called")
"""
"""The parameters `wish` of a request and `batch` of the first one are the expressions that make its response, and the
result of `execute`."""


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    folder = tmp_path_factory.mktemp("scripted")
    python_model(folder, SCRIPTED)
    (folder / "1" / "helper.py").write_text("DOUBLE = 2\n")
    (folder / "1" / "parts").mkdir()
    (folder / "1" / "parts" / "deep.py").write_text("from ..helper import DOUBLE as DEEP\n")
    with running(config("python", X, Y, max_batch=8), folder, instance="scripted_0_1") as worker:
        yield worker
        assert worker.stop() == 0
        assert "finalize was called" in worker.said()


def ask(worker: WorkerProcess, wish: str, **how: Any) -> Row:
    """Sends a request with a wish between two ordinary ones, which must succeed unless the batch fails."""
    options = Options(parameters={"wish": wish}, **how)
    rows = worker.run(work(1, tensor(1, 2)), work(2, tensor(3, 4), options=options), work(3, tensor(5)))
    if rows[0].error is None:
        assert worker.array(rows[0].outputs[0], np.float32).tolist() == [[2, 4]]
        assert worker.array(rows[2].outputs[0], np.float32).tolist() == [[10]]
    return rows[1]


FACTS: dict[str, object] = {
    "request.request_id()": "abc",
    "request.correlation_id()": 7,
    "request.flags()": 3,
    "request.timeout()": 5,
    "request.is_cancelled()": False,
    "str(request.requested_output_names())": "['y']",
    "pb_utils.get_input_tensor_by_name(request, 'absent') is None": True,
    "request.inputs()[0].name()": "x",
    "str(request.inputs()[0].shape())": "[1, 2]",
    "request.inputs()[0].triton_dtype()": 11,
    "request.inputs()[0].is_cpu()": True,
    "str(request.inputs()[0].as_numpy().dtype)": "float32",
    "request.inputs()[0].as_numpy().flags.writeable": False,
    "str(sys.argv)": "['']",
}
ARGS = "json.dumps(self.args)"


def test_request_attributes_are_visible_to_the_model(scripted: WorkerProcess) -> None:
    wish = f"answer(parameters={{{', '.join(f'{fact!r}: {fact}' for fact in (ARGS, *FACTS))}}})"
    options = Options(
        id="abc",
        sequence=7,
        sequence_start=True,
        sequence_end=True,
        queue_timeout_us=5,
        parameters={"wish": wish, "other": 1.5},
    )
    (row,) = scripted.run(work(1, tensor(1, 2), options=options, outputs=[Wanted("y")]))
    assert row.parameters is not None
    facts = dict(row.parameters)
    args = json.loads(str(facts.pop(ARGS)))
    assert facts == FACTS
    assert json.loads(args.pop("model_config")) == as_triton_json(config("python", X, Y, max_batch=8))
    assert Path(args.pop("model_repository"), "1", "model.py").is_file()
    assert args == {
        "model_instance_kind": "CPU",
        "model_instance_name": "scripted_0_1",
        "model_instance_device_id": "0",
        "model_version": "1",
        "model_name": "m",
    }


@cases(
    ("failed('said no', pb_utils.TritonError.NOT_FOUND)", "NOT_FOUND", "said no"),
    ("failed('said no')", "MODEL_FAILED", "said no"),
    (r"failed('said \udcff')", "MODEL_FAILED", "said ?"),
    ("failed(f'see {__file__}:12')", "MODEL_FAILED", "see <model>/1/model.py:12"),
    ("None", "MODEL_FAILED", "object in the execute function return list, found type '<class 'NoneT"),
    (
        "pb_utils.InferenceResponse([pb_utils.Tensor('z', np.zeros((1, 2), np.float32))])",
        "MODEL_FAILED",
        "unexpected output 'z': the outputs of model 'm' are y",
    ),
    ("pb_utils.InferenceResponse(answer().output_tensors() * 2)", "MODEL_FAILED", "output 'y' was given twice"),
    ("answer(parameters={'list': [1]})", "INVALID_ARG", "values to have type bool/int/str, found type <class 'list'>"),
    ("answer(parameters={'good': 1, 'null': None})", "INVALID_ARG", "bool/int/str, found type <class 'NoneType'>"),
    ("answer(parameters={1: 'a'})", "INVALID_ARG", "parameters keys to have type str, found type <class 'int'>"),
    ("answer(parameters=[])", "INVALID_ARG", "Expect dict, got <class 'list'>"),
    ("caught(lambda: answer(parameters=[]))", "NOT_FOUND", "Expect dict, got <class 'list'>"),
    ("answer(parameters={'text': 'x' * 20000})", "INVALID_ARG", "have 20004 characters, more than 16384"),
    ("request.get_response_sender() and None", "MODEL_FAILED", "the model dropped the request without a response"),
)
def test_an_error_of_one_response_fails_one_request(wish: str, code: str, text: str, scripted: WorkerProcess) -> None:
    assert_failed(ask(scripted, wish), code, text)


@cases(
    ("request.inputs()[0].as_numpy().fill(5)", "read-only"),
    (
        "pb_utils.MetricFamily('nv_mine', 'description', pb_utils.MetricFamily.COUNTER)",
        "TritonModelException: metric family 'nv_mine': names that begin with",
    ),
    (r"throw(ValueError('half: \ud800'))", "ValueError: half: ?"),
    ("throw(Unreadable())", "Unreadable: <Unreadable without a readable text>"),
    ("self.no_such_wish()", "AttributeError: 'TritonPythonModel' object has no attribute 'no_such_wish'"),
)
def test_exceptions_in_execute_fail_the_batch(wish: str, text: str, scripted: WorkerProcess) -> None:
    error = assert_failed(ask(scripted, wish), "MODEL_FAILED", text)
    assert error.text.startswith("Failed to process the request(s) for model instance 'scripted_0_1', message: ")


@cases(
    ("None", "Expected an 'InferenceResponse' object in the execute function return list"),
    ("5", "Expected a list in the execute return, found type '<class 'int'>'."),
    ("[]", "InferenceResponse objects returned (0) from execute must match the number of requests (2)"),
    ("tuple(map(self.one, requests))", ""),
)
def test_execute_must_return_a_response_for_each_request(batch: str, text: str, scripted: WorkerProcess) -> None:
    for row in scripted.run(work(1, tensor(1), options=Options(parameters={"batch": batch})), work(2, tensor(1))):
        if text:
            assert_failed(row, "MODEL_FAILED", text)
        else:
            assert row.error is None, "a tuple is as good as a list"


LOGS = r"""(
    pb_utils.Logger.log("first\nsecond", pb_utils.Logger.WARNING),
    pb_utils.Logger.log_error("third"),
    self.double(request),
)[-1]"""


def test_odd_parameters_strided_arrays_and_lines_of_the_log(scripted: WorkerProcess) -> None:
    assert ask(scripted, r"answer(parameters={'a\udcff': '\udcff'})").parameters == {"a?": "?"}
    row = ask(scripted, "answer(np.arange(12, dtype=np.float32).reshape(2, 6)[:1, ::3])")
    assert scripted.array(row.outputs[0], np.float32).tolist() == [[0, 3]]
    assert ask(scripted, LOGS).error is None
    assert "warning: first\\nsecond\n" in scripted.said()
    assert "error: third\n" in scripted.said()


def test_probes_during_is_ready_are_answered_when_it_returns(tmp_path: Path) -> None:
    gate, calls = tmp_path / "gate", tmp_path / "calls"
    os.mkfifo(gate)
    os.mkfifo(calls)
    source = f"""\
class TritonPythonModel:
    def execute(self, requests):
        return []

    def is_ready(self):
        open({str(calls)!r}, "w").close()
        open({str(gate)!r}).close()
        return True
"""
    python_model(tmp_path, source)
    given = config("python", {"x": ("FP32", (1,))}, {"y": ("FP32", (1,))})
    with WorkerProcess(given, tmp_path) as worker:
        assert worker.expect(Probed) == Probed(0, True), "the model has is_ready"
        worker.loaded()
        for number in (1, 2, 3):
            worker.send(Probe(number))
        calls.read_bytes()  # is_ready runs
        worker.send(Ping(1))
        worker.expect(Pong)  # and all three have been read
        gate.write_bytes(b"")
        assert [worker.expect(Probed) for _ in range(3)] == [Probed(number, True) for number in (1, 2, 3)]
