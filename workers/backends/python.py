"""Models that are a `model.py` with a class TritonPythonModel.

The rule: the model sees requests one by one, as its author was promised, and its arrays are views of the callers' own
memory. What it raises or gets wrong fails requests, never the worker.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shmserve.errors import InvalidRequest, ModelFailed, NotFound
from shmserve.messages import PARAMETERS, Failure
from shmserve.repo.schema import as_triton_json, from_triton_json
from shmserve.workers import pb_utils
from shmserve.workers.backends import Answer, Context, Request, SeparateBackend
from shmserve.workers.say import public

if TYPE_CHECKING:
    from shmserve.messages import Value
    from shmserve.repo.schema import ModelConfig

_CODES = (
    "UNKNOWN",
    "MODEL_FAILED",
    "NOT_FOUND",
    "INVALID_ARG",
    "UNAVAILABLE",
    "UNSUPPORTED",
    "ALREADY_EXISTS",
    "CANCELLED",
)
"""The wire codes of TritonError's, by number. INTERNAL would say that it is our fault; it is the model's."""
_PARAMETER_BYTES = 16 * 1024


class Python(SeparateBackend):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._module: ModuleType | None = None
        self._model: Any = None

    def complete(self, config: ModelConfig) -> ModelConfig:
        function = getattr(self._class(config), "auto_complete_config", None)
        if function is None:
            return config
        given = pb_utils.ModelConfig(as_triton_json(config))
        found = function(given)
        if not isinstance(found, pb_utils.ModelConfig):
            raise InvalidRequest(
                f"auto_complete_config of model '{config.name}' must return the model configuration object that it "
                f"was given, not {type(found).__name__}"
            )
        return from_triton_json(found.as_dict())

    def load(self, config: ModelConfig) -> None:
        kind = self._class(config)
        if not callable(getattr(kind, "execute", None)):
            raise InvalidRequest(f"class TritonPythonModel of model '{config.name}' has no execute method")
        self._inputs = [entry.name for entry in config.input]
        self._outputs = [entry.name for entry in config.output]
        self._instance = self.context.instance
        model = kind()
        if callable(getattr(model, "initialize", None)):
            model.initialize(self._arguments(config))
        self._model = model

    def close(self) -> None:
        model, self._model = self._model, None
        if model is not None and callable(getattr(model, "finalize", None)):
            model.finalize()

    def execute(self, requests: list[Request]) -> list[Answer | None]:
        make, names, outputs = pb_utils.request_from, self._inputs, self._outputs
        model, version = self.context.model, self.context.version
        given = [make(request.work, request.arrays, names, outputs, model, version) for request in requests]
        responses = self._model.execute(given)
        if type(responses) is not list and not isinstance(responses, (list, tuple)):
            if inspect.iscoroutine(responses):
                responses.close()
            raise ModelFailed(f"expected a list from execute, it returned {type(responses).__name__}")
        if len(responses) != len(requests):
            raise ModelFailed(
                f"number of InferenceResponse objects returned ({len(responses)}) from execute must match the number "
                f"of requests ({len(requests)})"
            )
        return [self._answer(response) for response in responses]

    def _answer(self, response: Any) -> Answer:
        if not isinstance(response, pb_utils.InferenceResponse):
            return self._failure(
                f"expected an InferenceResponse object for each request, found {type(response).__name__}"
            )
        error = response._error
        if error is not None:
            code = _CODES[error._code] if error._code in range(len(_CODES)) else "UNKNOWN"
            text = public(error._message, str(self.context.folder))
            return Answer(error=Failure(code, text))
        parameters = response._parameters
        if parameters:
            wrong = _wrong_parameters(parameters)
            if wrong:
                return self._failure(wrong)
        wanted: dict[str, Value] | None = parameters or None
        return Answer([(tensor._name, tensor._array) for tensor in response._tensors], None, wanted)

    def _failure(self, what: str) -> Answer:
        text = f"Failed to process the request(s) for model instance '{self._instance}', message: {what}"
        return Answer(error=Failure(ModelFailed.code, text))

    # ------------------------------------------------------------------------------------ the model's file

    def _class(self, config: ModelConfig) -> Any:
        if self._module is None:
            self._module = self._import(config)
        kind = getattr(self._module, "TritonPythonModel", None)
        if kind is None:
            raise InvalidRequest(f"'{self._file(config)}' of model '{config.name}' has no class TritonPythonModel")
        return kind

    def _file(self, config: ModelConfig) -> str:
        return config.default_model_filename or "model.py"

    def _import(self, config: ModelConfig) -> ModuleType:
        """Under a name of its own: a model may be called like any module. Its helpers are found beside it.

        What is compiled is not kept: it would be written into the user's repository, also by what the model imports
        when it runs."""
        sys.dont_write_bytecode = True
        folder = self.context.version_folder
        path = folder / self._file(config)
        if not path.is_file():
            raise NotFound(
                f"version {self.context.version} of model '{config.name}' has no file '{self._file(config)}'"
            )
        for name in ("triton_python_backend_utils", "c_python_backend_utils"):
            sys.modules[name] = pb_utils
        for place in (str(self.context.folder), str(folder)):
            if place not in sys.path:
                sys.path.insert(0, place)
        spec = importlib.util.spec_from_file_location(f"shmserve_model_{self.context.version}", path)
        if spec is None or spec.loader is None:
            raise InvalidRequest(f"'{self._file(config)}' of model '{config.name}' is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    def _arguments(self, config: ModelConfig) -> dict[str, str]:
        kind, device = _device(config, self.context.instance)
        return {
            "model_config": json.dumps(as_triton_json(config)),
            "model_instance_kind": kind,
            "model_instance_name": self.context.instance,
            "model_instance_device_id": str(device),
            "model_repository": str(self.context.folder),
            "model_version": str(self.context.version),
            "model_name": self.context.model,
        }


def _device(config: ModelConfig, instance: str) -> tuple[str, int]:
    """The kind of an instance and the number of its device. Instances are numbered through the groups of one name,
    in each group through its devices."""
    name, _, number = instance.rpartition("_")
    devices = [
        (group.kind.removeprefix("KIND_"), device)
        for group in config.instance_group
        if group.name == name
        for device in (group.gpus if group.kind == "KIND_GPU" else (0,))
        for _ in range(group.count)
    ]
    place = int(number) if number.isdecimal() else len(devices)
    return devices[place] if place < len(devices) else ("CPU", 0)


def _wrong_parameters(parameters: Any) -> str:
    """Why the parameters of a response cannot travel; "" where they can."""
    if not isinstance(parameters, dict) or len(parameters) > PARAMETERS:
        return f"the parameters of a response must be a dict of up to {PARAMETERS} entries"
    size = 0
    for key, value in parameters.items():
        if not isinstance(key, str) or not isinstance(value, (str, int, float, bool)):
            return f"response parameter '{key}' must be a string, int, float or bool, not {type(value).__name__}"
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            return f"response parameter '{key}' does not fit into 64 bits"
        size += len(key) + (len(value) if isinstance(value, str) else 8)
    if size > _PARAMETER_BYTES:
        return f"the parameters of a response have {size} characters, more than {_PARAMETER_BYTES}"
    return ""
