"""Compares a configuration with what an ONNX file declares: differences because of which the engine would not load it,
each with a correction.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from shmserve.dtypes import FROM_CONFIG, TO_CONFIG
from shmserve.repo.config.outline import escaped
from shmserve.repo.config.problems import nearest
from shmserve.repo.config.schema import ModelConfig, ModelInput, ModelOutput
from shmserve.repo.onnx.header import Declared, Header


class Difference(NamedTuple):
    """A difference. `path` is the configuration field, `write` the corrected text."""

    path: str
    text: str
    write: str


def differences(config: ModelConfig, header: Header) -> Iterator[Difference]:
    """The differences. `config` is completed, except for what the model itself would add."""
    provided, provided_outputs = _provided_by_server(config)
    flat = {entry.name for entry in config.input if entry.allow_ragged_batch}
    cut = {name for entry in config.batch_output for name in entry.target_name}
    yield from _batch(config, header, flat | cut)
    if config.input:
        yield from _tensors(config, "input", config.input, header.inputs, provided, flat)
        names = [tensor.name for tensor in header.inputs]
        free = [name for name in names if name not in provided and all(entry.name != name for entry in config.input)]
        configured = {
            entry.name if entry.name in names else _meant(entry.name, free) for entry in config.input
        } | provided
        for declared in header.inputs:
            if declared.name not in configured and declared.name not in header.initialized:
                text = f'the model also needs input "{escaped(declared.name)}"'
                yield Difference("input", text, _entry(declared, config.max_batch_size > 0))
    yield from _tensors(config, "output", config.output, header.outputs, provided_outputs, cut)
    for path, name, kind, known in _named_elsewhere(config, header):
        if name not in known:
            yield Difference(path, *_unknown(name, kind, known, _meant(name, known)))


def _provided_by_server(config: ModelConfig) -> tuple[set[str], set[str]]:
    """The model's inputs and outputs that the server provides, which are not in `input` and `output`."""
    inputs = {name for entry in config.batch_input for name in entry.target_name}
    sequence = config.sequence_batching
    if sequence is None:
        return inputs, set()
    inputs |= {entry.name for entry in sequence.control_input} | {entry.input_name for entry in sequence.state}
    return inputs, {entry.output_name for entry in sequence.state}


def _named_elsewhere(config: ModelConfig, header: Header) -> Iterator[tuple[str, str, str, list[str]]]:
    inputs, outputs = [tensor.name for tensor in header.inputs], [tensor.name for tensor in header.outputs]
    for index, batched in enumerate(config.batch_input):
        for at, name in enumerate(batched.target_name):
            yield f"batch_input[{index}].target_name[{at}]", name, "input", inputs
    sequence = config.sequence_batching
    if sequence is not None:
        for index, control in enumerate(sequence.control_input):
            yield f"sequence_batching.control_input[{index}].name", control.name, "input", inputs
        for index, state in enumerate(sequence.state):
            yield f"sequence_batching.state[{index}].input_name", state.input_name, "input", inputs
            yield f"sequence_batching.state[{index}].output_name", state.output_name, "output", outputs


def _batch(config: ModelConfig, header: Header, flat: Collection[str]) -> Iterator[Difference]:
    """If max_batch_size is above 0, the first dimension of every tensor must be the batch."""
    if config.max_batch_size <= 0:
        return
    inputs = [entry.name for entry in config.input] or [tensor.name for tensor in header.inputs]
    outputs = [entry.name for entry in config.output] or [tensor.name for tensor in header.outputs]
    for kind, names, tensors in (("input", inputs, header.inputs), ("output", outputs, header.outputs)):
        for tensor in tensors:
            if (
                tensor.name not in names
                or tensor.name in flat
                or tensor.dims is None
                or tensor.name in header.initialized
            ):
                continue
            if not tensor.dims or tensor.dims[0] != -1:
                first = f"is {tensor.dims[0]}" if tensor.dims else "does not exist"
                text = f'a batch needs a dynamic first dimension; that of {kind} "{escaped(tensor.name)}" {first}'
                write = f"max_batch_size: 0, and the dims of all tensors as in the model, here {_dims(tensor.dims)}"
                yield Difference("max_batch_size", text, write)
                return


def _tensors(
    config: ModelConfig,
    kind: str,
    entries: Sequence[ModelInput | ModelOutput],
    tensors: Sequence[Declared],
    provided: Collection[str],
    flat: Collection[str],
) -> Iterator[Difference]:
    known = {tensor.name: tensor for tensor in tensors}
    configured = {entry.name for entry in entries}
    free = [name for name in known if name not in configured and name not in provided]
    for index, entry in enumerate(entries):
        path = f"{kind}[{index}]"
        tensor = known.get(entry.name)
        if tensor is None:
            meant = _meant(entry.name, free)
            yield Difference(f"{path}.name", *_unknown(entry.name, kind, known, meant))
            if not meant:
                continue
            tensor = known[meant]
        data_type = TO_CONFIG.get(tensor.dtype, "")
        if data_type and tensor.dtype != FROM_CONFIG.get(entry.data_type):
            text = f'{entry.data_type}, but {kind} "{escaped(tensor.name)}" of the model is {data_type}'
            yield Difference(f"{path}.data_type", text, f"data_type: {data_type}")
        if tensor.dims is not None and entry.name not in flat:
            yield from _shape(config, path, f'{kind} "{escaped(tensor.name)}"', entry, tensor.dims)


def _shape(
    config: ModelConfig, path: str, what: str, entry: ModelInput | ModelOutput, dims: tuple[int, ...]
) -> Iterator[Difference]:
    if config.max_batch_size > 0:
        if not dims or dims[0] != -1:  # reported by _batch
            return
        dims = dims[1:]
    expected = entry.dims if entry.reshape is None else entry.reshape.shape
    if len(expected) == len(dims) and all(
        -1 in pair or pair[0] == pair[1] for pair in zip(expected, dims, strict=True)
    ):
        return
    if not dims and entry.reshape is None and set(entry.dims) == {1}:  # dims of 1 represent a scalar
        return
    batch = " after the batch dimension" if config.max_batch_size > 0 else ""
    text = f"{_dims(expected)}, but {what} of the model has {_dims(dims)}{batch}"
    if entry.reshape is not None:
        yield Difference(f"{path}.reshape", text, f"reshape: {{ shape: {_dims(dims)} }}")
    elif dims:
        yield Difference(f"{path}.dims", text, f"dims: {_dims(dims)}")
    else:
        yield Difference(f"{path}.dims", text, "dims: [ 1 ] reshape: { shape: [ ] }")


def _meant(name: str, free: Sequence[str]) -> str:
    """The tensor that was probably meant, or "". `free`: names not used by other entries."""
    return free[0] if len(free) == 1 else nearest(name, free) or ""


def _unknown(name: str, kind: str, known: Collection[str], meant: str) -> tuple[str, str]:
    """Error text and correction for an unknown name."""
    names = ", ".join(f'"{escaped(one)}"' for one in [*known][:10]) + (", ..." if len(known) > 10 else "")
    text = f'the model has no {kind} "{escaped(name)}"; it has {names or "none"}'
    return text, f'name: "{escaped(meant)}"' if meant else ""


def _entry(tensor: Declared, batched: bool) -> str:
    data_type = TO_CONFIG.get(tensor.dtype, "...")
    dims = _dims(tensor.dims[int(batched) :]) if tensor.dims is not None else "[ ... ]"
    return f'{{ name: "{escaped(tensor.name)}" data_type: {data_type} dims: {dims} }}'


def _dims(dims: Sequence[int]) -> str:
    return f"[ {', '.join(map(str, dims))} ]" if dims else "[ ]"
