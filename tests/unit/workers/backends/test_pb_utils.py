"""The module that Python models import, as far as it needs no worker."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from shmserve.dtypes import BY_NUMBER, to_numpy
from shmserve.workers.backends.python import pb_utils
from tests.support.cases import cases


class OldStyle:
    """Exports DLPack in the form that consumers older than version 1 request."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __dlpack__(self, **_: object) -> Any:
        return self.tensor.to_dlpack()

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


class Device:
    """An array on a GPU, of a library that can copy it to the host (`get`), or cannot."""

    def __dlpack__(self, **_: object) -> None:
        raise AssertionError("must not be asked")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def test_dlpack_without_a_copy() -> None:
    array = np.arange(6, dtype=np.float32)
    tensor = pb_utils.Tensor("t", array)
    assert np.shares_memory(np.from_dlpack(tensor), array)
    assert np.shares_memory(np.from_dlpack(OldStyle(tensor)), array)
    back = pb_utils.Tensor.from_dlpack("b", tensor)
    assert back.name() == "b"
    assert np.shares_memory(back.as_numpy(), array)
    assert (pb_utils.Tensor.from_dlpack("b", tensor.to_dlpack()).as_numpy() == array).all()


def test_dlpack_of_read_only_arrays() -> None:
    """Inputs are read-only. Consumers of the old form, which could write, get a copy."""
    array = np.arange(6, dtype=np.float32)
    array.flags.writeable = False
    tensor = pb_utils.Tensor("t", array)
    copy = np.from_dlpack(OldStyle(tensor))
    assert (copy == array).all()
    assert not np.shares_memory(copy, array)


def test_dlpack_of_bfloat16() -> None:
    """numpy itself has no such type, other libraries do."""
    array = np.array([1.5, -2, 1e30], to_numpy("BF16"))
    tensor = pb_utils.Tensor("t", array)
    for given in (tensor, tensor.to_dlpack()):
        back = pb_utils.Tensor.from_dlpack("b", given)
        assert back.triton_dtype() == tensor.triton_dtype() == 14
        assert np.shares_memory(back.as_numpy(), array)
    array.flags.writeable = False
    assert (pb_utils.Tensor.from_dlpack("b", tensor.to_dlpack()).as_numpy() == array).all()


def test_dlpack_with_pytorch() -> None:
    torch = pytest.importorskip("torch")
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    there = torch.from_dlpack(pb_utils.Tensor("t", array))
    there += 1
    assert array[1, 2] == 6
    back = pb_utils.Tensor.from_dlpack("b", there)
    assert np.shares_memory(back.as_numpy(), array)
    brain = torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16)
    found = pb_utils.Tensor.from_dlpack("b", brain)
    assert (found.triton_dtype(), found.shape()) == (14, [1, 2])
    assert torch.equal(torch.from_dlpack(found), brain)


def test_dlpack_of_arrays_that_must_be_copied_or_are_refused() -> None:
    with pytest.raises(pb_utils.TritonModelException, match="tensor 't' holds strings"):
        pb_utils.Tensor("t", np.array([b"a"], object)).to_dlpack()
    with pytest.raises(pb_utils.TritonModelException, match="not contiguous"):
        pb_utils.Tensor.from_dlpack("t", np.arange(10)[::2])
    with pytest.raises(pb_utils.TritonModelException, match=r"device \(2, 0\)"):
        pb_utils.Tensor.from_dlpack("t", Device())
    copied = Device()
    copied.get = lambda: np.arange(3)  # type: ignore[attr-defined]
    assert pb_utils.Tensor.from_dlpack("t", copied).as_numpy().tolist() == [0, 1, 2]


def test_arguments_of_the_wrong_kind() -> None:
    """They raise the same errors as in Triton."""
    array = np.zeros(1, np.float32)
    tensors_of: tuple[tuple[Any, Any], ...] = ((None, array), ("t", None), ("", None), (1, array), ("t", [1]))
    for arguments in tensors_of:
        with pytest.raises(TypeError):
            pb_utils.Tensor(*arguments)
    for make in (pb_utils.Tensor, pb_utils.Tensor.from_dlpack):
        with pytest.raises(pb_utils.TritonModelException, match="Tensor name cannot be an empty string"):
            make("", array)
    with pytest.raises(pb_utils.TritonModelException, match="Output tensor for inference response should not be empty"):
        pb_utils.InferenceResponse([None])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        pb_utils.InferenceResponse(None)  # type: ignore[arg-type]
    tensors = [pb_utils.Tensor("x", array)]
    good: dict[str, Any] = {"model_name": "m", "requested_output_names": ["y"], "inputs": tensors}
    with pytest.raises(pb_utils.TritonModelException, match="with id '7' and model name 'm' should not be empty"):
        pb_utils.InferenceRequest(**(good | {"request_id": "7", "inputs": [None]}))
    names = ("inputs", "model_name", "requested_output_names", "correlation_id", "request_id", "model_version", "flags")
    wrong: list[dict[str, Any]] = [{name: None} for name in names]
    wrong += [{"requested_output_names": [None]}, {"requested_output_names": "y"}, {"timeout": 1.5}]
    for bad in wrong:
        with pytest.raises(TypeError):
            pb_utils.InferenceRequest(**(good | bad))
    assert pb_utils.InferenceRequest(**(good | {"correlation_id": np.int64(5)})).correlation_id() == 5


def test_levels_of_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    logger = pb_utils.Logger
    levels: tuple[Any, ...] = (None, 1, "info")
    for level in levels:
        with pytest.raises(TypeError, match=r"level must be one of pb_utils\.Logger's"):
            logger.log("text", level)
    for log in (logger.log, logger.log_info, logger.log_warn, logger.log_error, logger.log_verbose):
        with pytest.raises(TypeError, match="message must be a string, not NoneType"):
            log(None)  # type: ignore[arg-type]
    logger.log("one")
    logger.log("two", logger.WARNING)
    assert capfd.readouterr().err.splitlines() == ["info: one", "warning: two"]


def test_requests_made_by_a_model() -> None:
    tensor = pb_utils.Tensor("x", np.zeros(1, np.float32))
    request = pb_utils.InferenceRequest("other", ["y"], [tensor], flags=1, timeout=9, parameters={"k": 1})
    request.set_flags(2)
    assert (request.model_name(), request.version(), request.flags(), request.timeout()) == ("other", -1, 2, 9)
    assert (request.inputs(), json.loads(request.parameters())) == ([tensor], {"k": 1})
    request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL)
    with pytest.raises(pb_utils.TritonModelException, match="3 is not one of the flags"):
        request.set_release_flags(3)
    assert not request.is_cancelled()
    with pytest.raises(pb_utils.TritonModelException, match="has no response sender"):
        request.get_response_sender()
    with pytest.raises(pb_utils.TritonModelException, match=r"comes from InferenceRequest\.get_response_sender"):
        pb_utils.InferenceResponseSender()


@cases(
    lambda: pb_utils.InferenceRequest("m", [], []).exec(decoupled=True),
    lambda: asyncio.run(pb_utils.InferenceRequest("m", [], []).async_exec()),
    lambda: pb_utils.MetricFamily("n", "d", pb_utils.MetricFamily.GAUGE).Metric(),
    lambda: pb_utils.load_model(model_name="m"),
    lambda: pb_utils.unload_model("m"),
    lambda: pb_utils.is_model_ready("m"),
)
def test_calls_that_need_a_server_are_refused_without_one(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "shmserve.workers.backends.python.pb_requests._Current.host", None
    )  # another test may have loaded a model in this process
    with pytest.raises(pb_utils.TritonModelException, match="no model is loaded in this process"):
        call()


def test_responses() -> None:
    tensor = pb_utils.Tensor("y", np.zeros(1))
    response = pb_utils.InferenceResponse([tensor], parameters={"a": 1})
    assert (response.has_error(), response.error(), json.loads(response.parameters())) == (False, None, {"a": 1})
    assert pb_utils.get_output_tensor_by_name(response, "y") is tensor
    assert pb_utils.get_output_tensor_by_name(response, "z") is None
    failed = pb_utils.InferenceResponse(error=pb_utils.TritonError("no", pb_utils.TritonError.UNAVAILABLE))
    error = failed.error()
    assert error is not None
    assert (failed.has_error(), error.message(), error.code()) == (True, "no", 4)
    assert pb_utils.TritonError("no").code() == pb_utils.TritonError.INTERNAL
    with pytest.raises(TypeError, match=r"must be pb_utils\.Tensor objects, not ndarray"):
        pb_utils.InferenceResponse([np.zeros(1)])  # type: ignore[list-item]


def test_triton_and_numpy_types_are_converted() -> None:
    assert pb_utils.triton_string_to_numpy("TYPE_FP32") is np.float32
    assert pb_utils.TRITON_STRING_TO_NUMPY["TYPE_UINT8"] is np.uint8
    assert len(pb_utils.TRITON_STRING_TO_NUMPY) == 13
    assert pb_utils.triton_string_to_numpy("TYPE_STRING") is np.object_
    assert pb_utils.triton_string_to_numpy("TYPE_BOOL") is np.bool_
    for number, name in enumerate(BY_NUMBER[1:], 1):
        assert pb_utils.triton_to_numpy_type(number) is to_numpy(name).type
        assert pb_utils.numpy_to_triton_type(to_numpy(name).type) == number
    with pytest.raises(pb_utils.TritonModelException, match="TYPE_NONE"):
        pb_utils.triton_string_to_numpy("TYPE_NONE")
    with pytest.raises(pb_utils.TritonModelException, match="99"):
        pb_utils.triton_to_numpy_type(99)
    with pytest.raises(pb_utils.TritonModelException, match="complex64"):
        pb_utils.numpy_to_triton_type(np.complex64)


def test_strings_to_bytes_and_back() -> None:
    data = pb_utils.serialize_byte_tensor(np.array([[b"a", b""], ["é", b"\xff"]], object))
    assert data == b"\x01\0\0\0a\0\0\0\0\x02\0\0\0\xc3\xa9\x01\0\0\0\xff"
    assert pb_utils.deserialize_bytes_tensor(data).tolist() == [b"a", b"", "é".encode(), b"\xff"]
    assert pb_utils.deserialize_bytes_tensor(b"").tolist() == []
    assert pb_utils.serialize_byte_tensor(np.empty(0, object)) is None
    for bad in (b"\x05\0\0\0a", b"\x01\0\0"):
        with pytest.raises(pb_utils.TritonModelException, match="incomplete"):
            pb_utils.deserialize_bytes_tensor(bad)
    assert pb_utils.serialize_byte_tensor(np.array([5, None], object)) == b"\x01\0\0\x005\x04\0\0\0None"


def plain(**more: Any) -> dict[str, Any]:
    return {"name": "m", "max_batch_size": 0, "input": [], "output": []} | more


def test_completing_a_configuration() -> None:
    given = pb_utils.ModelConfig(plain())
    given.set_max_batch_size(4)
    x = {"name": "x", "data_type": "TYPE_FP32", "dims": (1, -1)}
    given.add_input({**x, "optional": True})
    given.add_output(x)
    given.add_output(x)  # the same again
    given.set_dynamic_batching()
    given.set_model_transaction_policy({"decoupled": True})
    assert given.as_dict() == plain(
        max_batch_size=4,
        input=[{"name": "x", "data_type": "TYPE_FP32", "dims": [1, -1], "optional": True}],
        output=[{"name": "x", "data_type": "TYPE_FP32", "dims": [1, -1]}],
        dynamic_batching={},
        model_transaction_policy={"decoupled": True},
    )


@cases(
    (plain(max_batch_size=8), lambda c: c.set_max_batch_size(4), "specified max_batch_size 8"),
    (plain(sequence_batching={}), lambda c: c.set_dynamic_batching(), "sequence_batching"),
    (plain(), lambda c: c.add_input({"name": "x", "data_type": "TYPE_FP32"}), "lacks 'dims'"),
    (plain(), lambda c: c.add_output({"name": "x", "optional": True}), r"unknown keys \['optional'\]"),
    (
        plain(input=[{"name": "x", "data_type": "TYPE_FP32", "dims": [1]}]),
        lambda c: c.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [2]}),
        r"has dims \[1\], auto_complete_config gives \[2\]",
    ),
    (plain(), lambda c: c.set_model_transaction_policy({"other": 1}), r"unknown keys \['other'\]"),
    (
        plain(model_transaction_policy={"decoupled": True}),
        lambda c: c.set_model_transaction_policy({"decoupled": False}),
        "decoupled as true",
    ),
)
def test_contradicting_a_configuration(before: dict[str, Any], call: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call(pb_utils.ModelConfig(before))
