"""Rules that a backend applies when it loads a model, about execution accelerators, graphs and chat templates.
`shmserve check` applies them without loading. Another file than `fields`, because a server leaves them to the backend:
what is wrong for an instance on a GPU does not matter on a machine without one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from shmserve.errors import InvalidRequest
from shmserve.repo.config.complete import needs_completion
from shmserve.repo.config.schema import (
    ModelConfig,
    ModelOptimizationPolicyCudaGraphSpec,
    ModelOptimizationPolicyExecutionAccelerators,
    ModelOptimizationPolicyExecutionAcceleratorsAccelerator,
)
from shmserve.repo.parameters import CHAT_TEMPLATE
from shmserve.repo.rules.onnx_options import ONNX_ON_CPU, ONNX_ON_GPU, option_problems, parameter_problems, typos
from shmserve.repo.rules.values import LARGEST, Check, flag, whole

_PATH = "optimization.execution_accelerators"
"""The field with the execution accelerators."""
_COUNT = whole(LARGEST)
_PADDLE_OPTIONS: dict[str, Check] = {"capacity": _COUNT, "cpu_threads": _COUNT, "use_fp16": flag, "use_int8": flag}
"""The options of its accelerator mkldnn."""
_PADDLE_PARAMETERS: dict[str, Check] = {
    "capacity": _COUNT,
    "clear_intermediate_tensors": flag,
    "cpu_threads": _COUNT,
    "enable_memory_optim": flag,
    "enable_mkldnn": flag,
    "enable_mkldnn_bfloat16": flag,
    "use_int8": flag,
}
_PADDLE_ON_CPU = {"mkldnn": "", "ort": "packages of PaddlePaddle are built without ONNX Runtime"}
"""Triton's accelerators for PaddlePaddle, and why one cannot be used."""
_PADDLE_ON_GPU = "PaddlePaddle runs on the CPU only here"
_TENSORFLOW_ON_GPU = "releases of TensorFlow since 2.18 have no TensorRT, and this backend does not set the others"
_CAPTURING = ("pytorch", "tensorrt")
"""Backends that use CUDA graphs."""
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""A tag of training programs, which llama.cpp ignores."""


class SettingProblem(NamedTuple):
    """`path` is a field of the configuration. `fails`: the model cannot be loaded."""

    path: str
    text: str
    fails: bool = True


def setting_problems(config: ModelConfig) -> Iterator[SettingProblem]:
    """All problems of a completed configuration."""
    if config.backend == "onnxruntime":
        yield from _onnx_problems(config)
    elif config.backend == "tensorflow":
        for index, accelerator in enumerate(_accelerators(config).gpu_execution_accelerator if _on_gpu(config) else ()):
            text = _unsupported(accelerator.name, _TENSORFLOW_ON_GPU)
            yield SettingProblem(f"{_PATH}.gpu_execution_accelerator[{index}].name", text)
    elif config.backend == "paddle":
        yield from paddle_problems(config)
    elif config.backend in _CAPTURING and _on_gpu(config):
        yield from _graph_problems(config)
    if CHAT_TEMPLATE.is_set(config) and (text := template_problem(CHAT_TEMPLATE.read(config), config.backend)):
        yield SettingProblem(CHAT_TEMPLATE.path, text)


def _on_gpu(config: ModelConfig) -> bool:
    return any(group.kind == "KIND_GPU" for group in config.instance_group)


def _accelerators(config: ModelConfig) -> ModelOptimizationPolicyExecutionAccelerators:
    listed = config.optimization.execution_accelerators if config.optimization is not None else None
    return listed if listed is not None else ModelOptimizationPolicyExecutionAccelerators()


def _onnx_problems(config: ModelConfig) -> Iterator[SettingProblem]:
    listed = _accelerators(config)
    if _on_gpu(config):
        yield from _wrong(f"{_PATH}.gpu_execution_accelerator", listed.gpu_execution_accelerator, ONNX_ON_GPU)
    if any(group.kind == "KIND_CPU" for group in config.instance_group):
        yield from _wrong(f"{_PATH}.cpu_execution_accelerator", listed.cpu_execution_accelerator, ONNX_ON_CPU)
    values = {key: entry.string_value for key, entry in config.parameters.items()}
    for key, text in parameter_problems(values):
        yield SettingProblem(f'parameters["{key}"]', text)
    for key, text in typos(values):
        yield SettingProblem(f'parameters["{key}"]', text, fails=False)
    graph = config.optimization.graph if config.optimization is not None else None
    if graph is not None and (text := onnx_level_problem(graph.level)):
        yield SettingProblem("optimization.graph.level", text)


def _graph_problems(config: ModelConfig) -> Iterator[SettingProblem]:
    cuda = config.optimization.cuda if config.optimization is not None else None
    names = None if needs_completion(config) else [tensor.name for tensor in config.input]
    for index, spec in enumerate(cuda.graph_spec if cuda is not None and cuda.graphs else ()):
        field, text = graph_spec_problem(spec, config.max_batch_size, names)
        if text:
            yield SettingProblem(f"optimization.cuda.graph_spec[{index}].{field}", text)


def accelerator_problem(name: str, known: Collection[str], earlier: Collection[str]) -> str:
    """Why an accelerator cannot be requested; "" if it can. `earlier`: those requested before it."""
    if name.lower() not in known:
        return f"unknown Execution Accelerator '{name}' is requested; known here are {', '.join(known)}"
    return f"Execution Accelerator '{name.lower()}' is requested twice" if name.lower() in earlier else ""


def _wrong(
    path: str, accelerators: Sequence[ModelOptimizationPolicyExecutionAcceleratorsAccelerator], known: Collection[str]
) -> Iterator[SettingProblem]:
    earlier: list[str] = []
    for index, accelerator in enumerate(accelerators):
        if text := accelerator_problem(accelerator.name, known, earlier):
            yield SettingProblem(f"{path}[{index}].name", text)
        else:
            for key, text in option_problems(accelerator.name.lower(), accelerator.parameters):
                yield SettingProblem(f'{path}[{index}].parameters["{key}"]', text)
        earlier.append(accelerator.name.lower())


def paddle_problems(config: ModelConfig) -> Iterator[SettingProblem]:
    """The parameters and accelerators of a model of PaddlePaddle that cannot be used."""
    for key, entry in config.parameters.items():
        if text := _wrong_value(_PADDLE_PARAMETERS, key, entry.string_value):
            yield SettingProblem(f'parameters["{key}"]', text)
    listed = _accelerators(config)
    path = (_PATH + ".{}_execution_accelerator[{}].{}").format
    for index, accelerator in enumerate(listed.gpu_execution_accelerator):
        yield SettingProblem(path("gpu", index, "name"), _unsupported(accelerator.name, _PADDLE_ON_GPU))
    for index, accelerator in enumerate(listed.cpu_execution_accelerator):
        name = accelerator.name
        if name not in _PADDLE_ON_CPU:
            choices = f"Available choices are [{', '.join(_PADDLE_ON_CPU)}]"
            text = f"unknown cpu_execution_accelerator name '{name}' is provided. {choices}"
            yield SettingProblem(path("cpu", index, "name"), text)
        elif reason := _PADDLE_ON_CPU[name]:
            yield SettingProblem(path("cpu", index, "name"), _unsupported(name, reason))
        else:
            for key, value in accelerator.parameters.items():
                text = f"'{name}' has no parameter '{key}'; it has {', '.join(_PADDLE_OPTIONS)}"
                if key not in _PADDLE_OPTIONS or (text := _wrong_value(_PADDLE_OPTIONS, key, value)):
                    yield SettingProblem(path("cpu", index, f'parameters["{key}"]'), text)


def _wrong_value(table: Mapping[str, Check], key: str, value: str) -> str:
    """Why the value of a parameter cannot be used; "" if it can, or is not in the table."""
    try:
        if key in table and value:
            table[key]("the value", value)
    except InvalidRequest as error:
        return error.message
    return ""


def _unsupported(name: str, reason: str) -> str:
    return f"'{name}' is not supported: {reason}; leave it out"


def onnx_level_problem(level: int) -> str:
    return "" if -1 <= level <= 2 else f"{level} is not one of -1 (basic), 0 (all), 1 (extended), 2 (off)"


def graph_spec_problem(
    spec: ModelOptimizationPolicyCudaGraphSpec, max_batch: int, inputs: Collection[str] | None
) -> tuple[str, str]:
    """The field and what is wrong with it; "" if nothing is. `max_batch`: max_batch_size. `inputs`: the names of the
    model's inputs; None: the model may still complete them, and max_batch_size if that is 0."""
    rows = spec.batch_size
    if not (1 <= rows <= max_batch if max_batch else rows == 0 or inputs is None):
        allowed = f"1 to {max_batch}" if max_batch else "0, as the model has no batch dimension"
        return "batch_size", f"batch_size is {rows}, expected {allowed}"
    if inputs is not None and (unknown := set(spec.input).difference(inputs)):
        return "input", f"the model has no input {', '.join(sorted(unknown))}"
    bound = spec.graph_lower_bound
    if bound is None:
        return "", ""
    for name, dims in bound.input.items():
        shape = spec.input.get(name)
        if shape is None or shape.dim != dims.dim:
            return "graph_lower_bound.input", (
                f"graph_lower_bound may have a smaller batch, but the dims of input '{name}' must be those of the "
                "graph, as rows of other dims lie elsewhere in memory"
            )
    if not 1 <= bound.batch_size <= rows:
        text = f"batch_size of graph_lower_bound is {bound.batch_size}, expected 1 to {rows}"
        return "graph_lower_bound.batch_size", text
    return "", ""


def template_problem(text: str, backend: str) -> str:
    """What is wrong with a chat template; "" if nothing is, or jinja2 is not installed. The template is not run."""
    try:
        from jinja2 import Environment, TemplateSyntaxError
    except ImportError:
        return ""
    if backend == "llamacpp":
        text = _GENERATION.sub("", text)
    # Without the optimizer, which would compute constant expressions.
    environment = Environment(extensions=["jinja2.ext.loopcontrols"], optimized=False, autoescape=False)
    try:
        environment.compile(environment.parse(text))
    except TemplateSyntaxError as error:
        return f"not a Jinja template: line {error.lineno}: {error.message}"
    except SyntaxError as error:  # of the Python code that Jinja makes of it
        return f"not a template that Jinja can run: {error.msg}"
    except RecursionError:
        return "not a Jinja template: nested too deeply"
    return ""
