"""PaddlePaddle: `model.json` or, of versions before 3, `model.pdmodel`, with the weights in `model.pdiparams`.

The engine copies inputs into its own tensors, and outputs out of them.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shmserve.dtypes import BY_NAME
from shmserve.errors import InvalidRequest, Unsupported
from shmserve.repo.config.complete import TensorFacts
from shmserve.repo.rules.optimization import paddle_problems
from shmserve.workers.backends.base import Backend, StackedModel
from shmserve.workers.backends.model_facts import completed, match, none_optional
from shmserve.workers.backends.parameters import Parameters
from shmserve.workers.batch.specs import Spec, model_inputs_of, model_outputs_of
from shmserve.workers.process.device import require_cpu

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.workers.batch.gather import GatherGroup
    from shmserve.workers.batch.results import Results


def _engine() -> Any:
    """Imports the engine without its log and its signal handlers, which would hide the signal of a crash from the exit
    status."""
    os.environ.setdefault("GLOG_minloglevel", "2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import paddle
        import paddle.inference
    # This call also removes the handler for SIGTERM, and those that report a crash.
    terminate = signal.getsignal(signal.SIGTERM)
    paddle.disable_signal_handler()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, terminate)
    if faulthandler.is_enabled():
        faulthandler.disable()
        faulthandler.enable()
    return paddle


paddle = _engine()
DTYPES = {name: BY_NAME[name] for name in ("bool", "uint8", "int8", "int32", "int64", "float16", "float32", "float64")}
_OF_JSON = {
    "ui8": "uint8",
    "i8": "int8",
    "i32": "int32",
    "i64": "int64",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
}
"""Type names in model.json that differ from numpy's."""
_OF_TRITON = {"use_fp16": "enable_mkldnn_bfloat16"}
"""Parameters of Triton's accelerators that have another name here."""
_Facts = tuple[list[TensorFacts], list[TensorFacts]]


class Paddle(Backend):
    def complete(self, config: ModelConfig) -> ModelConfig:
        if config.input and config.output:
            return config
        inputs, outputs = _facts(self._file(config))
        default = self.context.default_max_batch("paddle")
        return completed(config, inputs, outputs, default)

    def load(self, config: ModelConfig) -> PaddleModel:
        parameters = Parameters(config, _of_accelerators(config))
        require_cpu(config, self.context.instance, "models of PaddlePaddle")
        path = self._file(config)
        inputs, outputs = _facts(path)
        sources, targets = model_inputs_of(config), model_outputs_of(config)
        none_optional(config.name, sources, "a model of PaddlePaddle")
        input_order = _order(config.name, "input", sources, inputs)
        output_order = _order(config.name, "output", targets, outputs)
        missing = [fact.name for index, fact in enumerate(inputs) if index not in input_order]
        if missing:
            raise InvalidRequest(f"unable to load model '{config.name}': it also has the input '{missing[0]}'")
        predictor = self._create(config.name, path, parameters)
        return PaddleModel(
            predictor,
            [predictor.get_input_handle(inputs[index].name) for index in input_order],
            [predictor.get_output_handle(outputs[index].name) for index in output_order],
            parameters.flag("clear_intermediate_tensors", False),
        )

    def _file(self, config: ModelConfig) -> Path:
        return self.context.model_file(config, "model.pdmodel")

    def _create(self, model: str, path: Path, parameters: Parameters) -> Any:
        weights = path.with_suffix(".pdiparams")  # a model without weights has no such file
        inference = paddle.inference
        options = inference.Config(os.fspath(path), os.fspath(weights) if weights.exists() else "")
        options.disable_glog_info()
        options.disable_gpu()
        options.set_cpu_math_library_num_threads(parameters.whole("cpu_threads", 0) or self.context.engine_threads)
        if not parameters.flag("enable_mkldnn", True):
            options.disable_onednn()
        else:
            if parameters.whole("capacity", 0):
                options.set_onednn_cache_capacity(parameters.whole("capacity", 0))
            if parameters.flag("enable_mkldnn_bfloat16", False):
                options.enable_onednn_bfloat16()
            if parameters.flag("use_int8", False):
                options.enable_onednn_int8()
        if path.suffix == ".pdmodel" and parameters.flag("enable_memory_optim", True):
            options.enable_memory_optim(True)  # fails for model.json, whose tensors always share memory
        try:
            return inference.create_predictor(options)
        except (RuntimeError, ValueError) as error:
            raise InvalidRequest(f"unable to load model '{model}': {_reason(error)}") from error


class PaddleModel(StackedModel):
    fresh = True

    def __init__(self, predictor: Any, sources: list[Any], targets: list[Any], clears: bool) -> None:
        self._predictor = predictor
        self._sources = sources
        self._targets = targets
        self._clears = clears

    def execute(self, inputs: GatherGroup, outputs: Results) -> None:
        for index, handle in enumerate(self._sources):
            array = inputs.array(index)
            assert array is not None
            handle.copy_from_cpu(np.ascontiguousarray(array))
        inputs.computing()
        self._predictor.run()
        for index, handle in enumerate(self._targets):
            if outputs.needed(index):
                outputs.put(index, handle.copy_to_cpu())
        if self._clears:
            self._predictor.clear_intermediate_tensor()


def _of_accelerators(config: ModelConfig) -> dict[str, str]:
    """Returns the parameters that Triton reads from optimization.execution_accelerators."""
    if problem := next(paddle_problems(config), None):
        raise InvalidRequest(f"model '{config.name}': {problem.path}: {problem.text}")
    optimization = config.optimization
    accelerators = optimization.execution_accelerators if optimization is not None else None
    options: dict[str, str] = {}
    for entry in accelerators.cpu_execution_accelerator if accelerators is not None else ():
        options |= {_OF_TRITON.get(key, key): value for key, value in entry.parameters.items()}
    return options


def _facts(path: Path) -> _Facts:
    try:
        return _of_program(path.read_bytes()) if path.suffix == ".pdmodel" else _of_json(path.read_bytes())
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
        raise InvalidRequest(f"'{path.name}' is not a model of PaddlePaddle: {_reason(error)}") from error


def _of_json(content: bytes) -> _Facts:
    """Reads the format of PaddlePaddle 3, in which each input and output is an operation."""
    inputs: list[TensorFacts] = []
    outputs: list[TensorFacts] = []
    for operation in json.loads(content)["program"]["regions"][0]["blocks"][0]["ops"]:
        kind = operation["#"].rpartition(".")[2]
        if kind not in ("data", "fetch"):
            continue
        (name,) = (entry["AT"]["D"] for entry in operation["A"] if entry["N"] == "name")
        (element, dims, *_) = operation["O"][0]["TT"]["D"]
        dtype = element["#"].rpartition(".t_")[2]
        facts = inputs if kind == "data" else outputs
        facts.append(TensorFacts(name, _dtype(name, _OF_JSON.get(dtype, dtype)), tuple(dims)))
    return inputs, outputs


def _of_program(content: bytes) -> _Facts:
    """Reads the format used before PaddlePaddle 3."""
    program = paddle.base.core.ProgramDesc(content)  # keep a reference: the block is part of its memory
    block = program.block(0)
    inputs: dict[int, TensorFacts] = {}
    outputs: dict[int, TensorFacts] = {}
    for index in range(block.op_size()):
        operation = block.op(index)
        if operation.type() not in ("feed", "fetch"):
            continue
        is_input = operation.type() == "feed"
        (name,) = operation.output("Out") if is_input else operation.input("X")
        variable = block.find_var(name.encode())
        dtype = str(variable.dtype()).rpartition(".")[2]
        facts = inputs if is_input else outputs
        facts[operation.attr("col")] = TensorFacts(name, _dtype(name, dtype), tuple(variable.shape()))
    return [inputs[column] for column in sorted(inputs)], [outputs[column] for column in sorted(outputs)]


def _dtype(name: str, dtype: str) -> str:
    if dtype not in DTYPES:
        raise Unsupported(f"tensor '{name}' of the model is of type {dtype}, which is not supported")
    return DTYPES[dtype]


def _order(model: str, kind: str, specs: Sequence[Spec], facts: Sequence[TensorFacts]) -> list[int]:
    """Returns the position in the model of each tensor of the configuration: by name, by a name that ends with the
    position (OUTPUT__0), or, if no name is known to the model, in the order of the configuration."""
    names = [fact.name for fact in facts]
    order = []
    for place, spec in enumerate(specs):
        number = spec.name.rpartition("__")[2]
        if spec.name in names:
            order.append(names.index(spec.name))
        elif "__" in spec.name and number.isascii() and number.isdecimal() and int(number) < len(names):
            order.append(int(number))
        elif len(specs) == len(names) and not any(spec.name in names for spec in specs):
            order.append(place)
        else:
            configured = ", ".join(f"'{each.name}'" for each in specs)
            raise InvalidRequest(
                f"unable to load model '{model}': unexpected inference {kind} '{spec.name}' of {configured}, allowed "
                f"{kind}s are: {', '.join(names)}"
            )
    match(model, kind, specs, [facts[at]._replace(name=spec.name) for at, spec in zip(order, specs, strict=True)])
    return order


def _reason(error: Exception) -> str:
    """The engine's message without stack traces and source locations."""
    lines = [line.strip() for line in str(error).splitlines() if "Error: " in line or line.startswith("(")]
    return (lines or [str(error)])[-1].partition(" (at /")[0]
