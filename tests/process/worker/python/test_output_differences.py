"""Outputs of Python models that differ from the configuration, or are missing, in a worker and through a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import shmserve
from shmserve import TopK
from shmserve.protocol.messages import Handle, Options, Tensor, Wanted
from shmserve.protocol.worker_messages import Row
from shmserve.session.decode import output_of
from shmserve.session.memory import SessionMemory
from shmserve.workers.loading import LoadedModel
from tests.support.cases import cases
from tests.support.ensemble_models import config_text, ensemble
from tests.support.model_files import write_model
from tests.support.workers.in_process import inline, loaded, run, value
from tests.support.workers.models.worker_models import python_model
from tests.support.workers.worker_harness import assert_failed, config, work

MODEL = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request, json.loads(request.parameters()).get("wish")) for request in requests]

    def answer(self, request, wish):
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        made = {
            None: x,
            "FP64": x.astype(np.float64),
            "large": np.repeat(x.astype(np.float64), 3000, axis=1),
            "INT64": x.astype(np.int64),
            "BYTES": x.astype(object),
            "complex": x.astype(complex),
            "swapped": x.astype(">f4"),
            "rank": x.reshape(-1),
            "scalar": x.sum(),
            "rows": np.concatenate([x, x]),
            "deep": x.reshape((1,) * 30 + x.shape) if x.ndim < 3 else x,
            "deeper": x.reshape((1,) * 40 + x.shape),
        }
        outputs = [] if wish == "nothing" else [pb_utils.Tensor("y", np.asarray(made[wish]))]
        return pb_utils.InferenceResponse([*outputs, pb_utils.Tensor("z", x)])
"""
X, YZ = {"x": ("FP32", (-1,))}, {"y": ("FP32", (-1,)), "z": ("FP32", (-1,))}


def model_of(folder: Path, **parameters: str) -> AbstractContextManager[LoadedModel]:
    python_model(folder, MODEL)
    return loaded(config("python", X, YZ, max_batch=8, parameters=parameters), folder)


def ask(model: LoadedModel, wish: str, outputs: tuple[Wanted, ...] | None = None) -> Row:
    """Sends a request in a batch of three. The others are ordinary and must succeed."""
    x = inline("x", np.array([[1, 2]], np.float32))
    options = Options(parameters={"wish": wish})
    before, row, after = run(model, work(1, x), work(2, x, options=options, outputs=outputs), work(3, x))
    for other in (before, after):
        assert other.error is None
        assert [tensor.dtype for tensor in other.outputs] == ["FP32", "FP32"]
    return row


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    with model_of(tmp_path_factory.mktemp("differs")) as found:
        yield found


@cases(
    ("FP64", "FP64", np.array([[1, 2]], np.float64)),
    ("INT64", "INT64", np.array([[1, 2]], np.int64)),
    ("BYTES", "BYTES", np.array([[b"1.0", b"2.0"]], object)),
    ("swapped", "FP32", np.array([[1, 2]], np.float32)),
    ("rank", "FP32", np.array([1, 2], np.float32)),
    ("scalar", "FP32", np.array(3, np.float32)),
    ("rows", "FP32", np.array([[1, 2], [1, 2]], np.float32)),
    ("deep", "FP32", np.array([1, 2], np.float32).reshape((1,) * 31 + (2,))),
)
def test_arrays_that_differ_are_passed_on(wish: str, dtype: str, expected: Any, model: LoadedModel) -> None:
    row = ask(model, wish)
    assert row.error is None, row.error
    y, _ = row.outputs
    assert (y.dtype, y.shape) == (dtype, expected.shape)
    assert value(row).tolist() == expected.tolist()
    assert value(row, 1).tolist() == [[1, 2]]


Y1 = (Wanted("y", None, 1),)


@cases(
    ("complex", None, "MODEL_FAILED", "has the wrong data type: expected FP32, found complex128"),
    ("deeper", None, "MODEL_FAILED", "has the wrong shape: expected [1, -1]"),
    ("BYTES", Y1, "INVALID_ARG", "class result not available for output due to unsupported type"),
)
def test_unsupported_outputs_are_refused(
    wish: str, outputs: tuple[Wanted, ...] | None, code: str, text: str, model: LoadedModel
) -> None:
    assert_failed(ask(model, wish, outputs), code, text)


def test_missing_outputs_are_left_out(model: LoadedModel) -> None:
    for outputs, found in ((None, ["z"]), ((Wanted("z"),), ["z"]), ((Wanted("y"), Wanted("z")), ["z"]), (Y1, [])):
        row = ask(model, "nothing", outputs)
        assert row.error is None
        assert [tensor.name for tensor in row.outputs] == found


@pytest.mark.parametrize(("wish", "found"), [("FP64", b"2.000000:1"), ("INT64", b"2:1"), ("rank", b"2.000000:0")])
def test_classes_are_computed_from_the_returned_array(model: LoadedModel, wish: str, found: bytes) -> None:
    assert found in value(ask(model, wish, Y1)).ravel().tolist()


def test_one_warning_for_each_output(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with model_of(tmp_path) as model:
        for wish in ("FP64", "FP64", "rank"):
            ask(model, wish)
    said = capfd.readouterr().err
    text = "output 'y' of model 'm' is FP64 [1, 2] and is passed on as it is; the configuration says FP32 [1, -1]"
    assert text in said
    assert said.count("passed on as it is") == 1


def test_strict_outputs(tmp_path: Path) -> None:
    with model_of(tmp_path, strict_outputs="true") as model:
        for wish, text in (
            ("FP64", "output 'y' of model 'm' has the wrong data type: expected FP32, found FP64"),
            ("rank", "output 'y' of model 'm' has the wrong shape: expected [1, -1], found [2]"),
            ("rows", "has the wrong shape: expected [1, -1], found [2, 2]"),
            ("nothing", "did not produce output 'y': expected 2 output(s), found 1"),
        ):
            assert_failed(ask(model, wish), "MODEL_FAILED", text)


def write_models(root: Path) -> None:
    batches = "max_batch_size: 8"
    write_model(root, "differs", config_text("python", "x", "y z", f"{batches} dynamic_batching {{ }}"), MODEL)
    write_model(root, "plain", config_text("identity", "x", "y", batches))
    ensemble(root, "chain", "x", "y", "differs(x:x)->(y:m)", "plain(x:m)->(y:y)", more=batches)


ONE = np.array([[1, 2]], np.float32)


def wish(text: str) -> dict[str, Any]:
    return {"parameters": {"wish": text}}


@pytest.mark.process
def test_clients_receive_the_data_type_of_the_model(client: shmserve.Client) -> None:
    futures = [client.submit("differs", {"x": ONE}, **wish("FP64")) for _ in range(20)]
    for future in futures:
        assert future.result()["y"].dtype == np.float64
    large = client.infer("differs", {"x": ONE}, **wish("large"))["y"]
    assert large.dtype == np.float64
    assert large.shape == (1, 6000)
    assert set(client.infer("differs", {"x": ONE}, **wish("nothing"))) == {"z"}
    assert len(client.infer("differs", {"x": ONE}, outputs={"y": TopK(1)}, **wish("FP64"))["y"]) == 1
    assert client.infer("differs", {"x": ONE}, outputs=["y"], **wish("nothing")) == {}
    place = client.empty((1, 2), "float64")
    client.infer("differs", {"x": ONE}, outputs={"y": place}, **wish("FP64"))
    assert place.tolist() == [[1, 2]]


class OwnMemory:
    def is_own(self, handle: Handle) -> bool:
        return True


def test_an_output_array_of_another_data_type_is_refused() -> None:
    """The worker, which only knows the size of the place, has written the output there."""
    memory = cast(SessionMemory, OwnMemory())
    tensor = Tensor("y", "FP64", (1, 2), (Handle(1, 0, 16),))
    good = np.zeros((1, 2))
    assert output_of(tensor, (), good, memory) is good
    with pytest.raises(
        shmserve.InvalidRequest, match=r"output 'y' is FP64 \[1, 2\], but the array given for it is float32"
    ):
        output_of(tensor, (), np.zeros((1, 4), np.float32), memory)


@pytest.mark.process
def test_ensembles_check_tensors_between_steps(client: shmserve.Client) -> None:
    assert client.infer("chain", {"x": ONE})["y"].tolist() == [[1, 2]]
    expected = "in ensemble 'chain', step 1: inference input 'x' data-type is 'FP64', but model 'plain' expects 'FP32'"
    with pytest.raises(shmserve.InvalidRequest, match=expected):
        client.infer("chain", {"x": ONE}, **wish("FP64"))
    with pytest.raises(shmserve.InvalidRequest, match="in ensemble 'chain', step 1: unexpected shape for input 'x'"):
        client.infer("chain", {"x": ONE}, **wish("deep"))
