"""Rules for data that comes with a model: warm-up samples and file names.

Invariant: as in `fields`, a check reports and continues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shmserve.repo.config import schema
from shmserve.repo.config.complete import is_ensemble, needs_completion
from shmserve.repo.config.outline import escaped
from shmserve.repo.config.problems import ProblemFunction, meant
from shmserve.repo.config.schema import ModelConfig, ModelInput

_SOURCES = ("zero_data", "random_data", "input_data_file")


def uncached(model: str, why: str) -> str:
    """The error, in Triton's words, for a model whose responses cannot be cached."""
    return f"Response Cache does not currently support model {model} with {why}. Please disable the response cache."


def file_name(path: str, name: str, problem: ProblemFunction) -> None:
    """A file name must stay within the model's directory."""
    if name.startswith("/") or ".." in name.split("/") or not name.isprintable():
        problem(path, f'found "{escaped(name)}", expected a file in the model directory, without .. or a leading /')


def validate_warmup(config: ModelConfig, problem: ProblemFunction) -> None:
    if is_ensemble(config):
        return
    inputs = {tensor.name: tensor for tensor in config.input}
    sequence = config.sequence_batching
    controls = [control.name for control in sequence.control_input] if sequence is not None else []
    for index, sample in enumerate(config.model_warmup):
        path = f"model_warmup[{index}]"
        _batch_size(config, f"{path}.batch_size", sample.batch_size, problem)
        for key, sample_input in sample.inputs.items():
            here = f'{path}.inputs["{key}"]'
            _input(here, sample_input, problem)
            if key in inputs:
                _agrees(here, sample_input, inputs[key], problem)
            elif inputs and key not in controls:
                problem(here, f'"{escaped(key)}" is not an input; {meant(key, [*inputs, *controls])}')
        # A sample with batch_size 0 is not run.
        if sample.batch_size and not needs_completion(config):
            _all_there(path, sample.inputs, inputs, controls, problem)


def _batch_size(config: ModelConfig, path: str, size: int, problem: ProblemFunction) -> None:
    if config.max_batch_size > 0:
        if size > config.max_batch_size:
            problem(path, f"found {size}, expected at most max_batch_size ({config.max_batch_size})")
    elif size > 1 and not needs_completion(config):
        # The model may still complete max_batch_size.
        problem(path, f"found {size}, expected 1: the model does not batch, its max_batch_size is 0")


def _input(path: str, sample_input: schema.ModelWarmupInput, problem: ProblemFunction) -> None:
    """Rules for the data of any input."""
    if sample_input.data_type == "TYPE_INVALID":
        problem(f"{path}.data_type", "not given; expected that of the input")
    if not sample_input.dims:
        problem(f"{path}.dims", "not given; expected those of the data, without the batch dimension")
    for index, dim in enumerate(sample_input.dims):
        if dim < 1:
            problem(f"{path}.dims[{index}]", f"found {dim}, expected 1 or more: data needs a fixed size")
    if all(getattr(sample_input, source) is None for source in _SOURCES):
        problem(path, f"no data; expected one of {', '.join(_SOURCES)}")
    elif sample_input.input_data_file is not None:
        if not sample_input.input_data_file:
            problem(f"{path}.input_data_file", "empty; expected a file in the model's directory warmup")
        file_name(f"{path}.input_data_file", sample_input.input_data_file, problem)


def _agrees(path: str, sample_input: schema.ModelWarmupInput, tensor: ModelInput, problem: ProblemFunction) -> None:
    if sample_input.data_type not in ("TYPE_INVALID", tensor.data_type):
        problem(f"{path}.data_type", f"found {sample_input.data_type}, expected {tensor.data_type}, as for the input")
    if not sample_input.dims or not tensor.dims:
        return
    if len(sample_input.dims) != len(tensor.dims):
        text = f"found {list(sample_input.dims)}, expected {len(tensor.dims)} dim(s), as for the input"
        problem(f"{path}.dims", f"{text}: {list(tensor.dims)}")
        return
    for index, (dim, expected) in enumerate(zip(sample_input.dims, tensor.dims, strict=True)):
        if expected != -1 and dim >= 1 and dim != expected:
            problem(f"{path}.dims[{index}]", f"found {dim}, expected {expected}, as for the input")


def _all_there(
    path: str,
    present: Mapping[str, object],
    inputs: Mapping[str, ModelInput],
    controls: Sequence[str],
    problem: ProblemFunction,
) -> None:
    needed = [name for name, tensor in inputs.items() if not tensor.optional] + [name for name in controls if name]
    for name in needed:
        if name not in present:
            problem(f"{path}.inputs", f'"{name}" is missing; a sample needs every input that is not optional')
