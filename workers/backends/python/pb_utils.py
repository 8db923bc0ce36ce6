"""The module that Python models import as `triton_python_backend_utils`: tensors, requests, responses, errors, helpers.

Invariant: names, including those of parameters, and behaviour are those of Triton's module.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np

from shmserve import dtypes
from shmserve.errors import ServeError
from shmserve.shm.strings import decode_bytes, encode_bytes
from shmserve.workers.backends.python import pb_requests
from shmserve.workers.backends.python.pb_calls import is_model_ready, load_model, unload_model
from shmserve.workers.backends.python.pb_config import ModelConfig
from shmserve.workers.backends.python.pb_metrics import MetricFamily
from shmserve.workers.backends.python.pb_requests import (
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    InferenceRequest,
    InferenceResponse,
    InferenceResponseSender,
    InferenceTrace,
    TritonError,
)
from shmserve.workers.backends.python.pb_tensor import (
    TRITONSERVER_MEMORY_CPU,
    TRITONSERVER_MEMORY_GPU,
    Array,
    PreferredMemory,
    Tensor,
    TritonModelException,
    text_of,
)
from shmserve.workers.process.log import log_message

__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "InferenceTrace",
    "Logger",
    "MetricFamily",
    "ModelConfig",
    "PreferredMemory",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]


class Level(Enum):
    """Triton's log levels -> level names of the server's log."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    VERBOSE = "verbose"


class Logger:
    """Writes to the worker's stderr, which the server copies to its log."""

    LogLevel = Level
    INFO = Level.INFO
    WARNING = Level.WARNING
    ERROR = Level.ERROR
    VERBOSE = Level.VERBOSE

    @staticmethod
    def log(message: str, level: Level = Level.INFO) -> None:
        if not isinstance(level, Level):
            raise TypeError(f"level must be one of pb_utils.Logger's, such as Logger.INFO, not {level!r}")
        log_message(text_of(message, "message"), level.value)

    @staticmethod
    def log_info(message: str) -> None:
        Logger.log(message)

    @staticmethod
    def log_warn(message: str) -> None:
        Logger.log(message, Level.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        Logger.log(message, Level.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        Logger.log(message, Level.VERBOSE)


# ---------------------------------------------------------------------------------------------- helpers


def get_model_dir() -> str:
    """Returns the version directory of the model, which contains the model file."""
    return pb_requests.current().model_dir()


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    for tensor in inference_request._inputs:  # a generator would cost as much as the rest of the call
        if tensor._name == name:
            return tensor
    return None


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    return next((tensor for tensor in inference_response._tensors if tensor._name == name), None)


def get_input_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    return _by_name(model_config.get("input", ()), name)


def get_output_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    return _by_name(model_config.get("output", ()), name)


def _by_name(entries: Sequence[dict[str, Any]], name: str) -> dict[str, Any] | None:
    return next((entry for entry in entries if entry["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: dict[str, Any]) -> bool:
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """Returns the numpy type for a data type of a configuration, such as TYPE_FP32."""
    name = dtypes.FROM_CONFIG.get(triton_type_string)
    if name is None:
        raise TritonModelException(f"'{triton_type_string}' is not a data type of a configuration")
    return dtypes.to_numpy(name).type


TRITON_STRING_TO_NUMPY = {name: triton_string_to_numpy(name) for name in dtypes.FROM_CONFIG if name != "TYPE_BF16"}
"""Data type of a configuration -> numpy type, for those that numpy has. Some models read the table itself."""


def triton_to_numpy_type(data_type: int) -> Any:
    """Returns the numpy type for the number of a data type, as returned by `Tensor.triton_dtype`."""
    if data_type not in range(1, len(dtypes.BY_NUMBER)):
        raise TritonModelException(f"{data_type} is not a data type number")
    return dtypes.to_numpy(dtypes.BY_NUMBER[data_type]).type


def numpy_to_triton_type(data_type: Any) -> int:
    try:
        return dtypes.BY_NUMBER.index(dtypes.from_numpy(np.dtype(data_type)))
    except TypeError as error:
        raise TritonModelException(str(error)) from None


def serialize_byte_tensor(input_tensor: Array) -> bytes | None:
    """Encodes a tensor of strings: for each element its length, 4 bytes little-endian, and its bytes."""
    if input_tensor.size == 0:
        return None
    try:
        return encode_bytes(input_tensor, str)
    except ServeError as error:
        raise TritonModelException(str(error)) from None


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Array:
    """The inverse of serialize_byte_tensor. The shape is not encoded, so the result has one dimension."""
    data = bytes(encoded_tensor)
    count = at = 0
    while at < len(data):
        at += 4 + int.from_bytes(data[at : at + 4], "little")
        count += 1
    try:
        return decode_bytes(data, (count,))
    except ServeError as error:
        raise TritonModelException(str(error)) from None
