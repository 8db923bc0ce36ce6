"""Model parameters for padding, which lets requests of different lengths share a batch. Triton does not have them.

    padding: "input_ids attention_mask=0 boxes[1]=-1"     inputs to pad, with axis and value
    padding_outputs: "tokens[0]"                          outputs to cut back to each request's own length

An axis is an index into the tensor's `dims`; the default is the first dim of -1. The default value is 0 or the empty
string. Without `padding_outputs`, each output with one dim of -1 is cut back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from msgspec import Struct

from shmserve.repo.config.outline import escaped
from shmserve.repo.config.problems import ProblemFunction, meant
from shmserve.repo.config.schema import ModelConfig, ModelInput, ModelOutput
from shmserve.repo.parameters import PADDING, PADDING_BATCH_COST, PADDING_LOOKAHEAD, PADDING_MULTIPLE, PADDING_OUTPUTS

_ROWS = (PADDING, PADDING_OUTPUTS, PADDING_LOOKAHEAD, PADDING_MULTIPLE, PADDING_BATCH_COST)
_ITEM = re.compile(r"(?P<name>[^\s=]+?)(?:\[(?P<axis>[0-9]{1,3})\])?(?:=(?P<value>\S*))?")


class Padded(Struct, frozen=True):
    """A tensor that is padded or cut back along `axes` of its `dims`. `value` is the text of the padding value."""

    name: str
    axes: tuple[int, ...]
    value: str = ""


class Padding(Struct, frozen=True):
    """The padding parameters of a model."""

    inputs: tuple[Padded, ...]
    outputs: tuple[Padded, ...]
    lookahead: int
    multiple: int
    batch_cost: int


def padding_of(config: ModelConfig) -> Padding | None:
    """The padding of a completed and valid configuration; None if nothing is padded."""
    if not PADDING.is_set(config):
        return None
    inputs = _tensors(PADDING.read(config), config.input, _ignore)
    if PADDING_OUTPUTS.is_set(config):
        outputs = _tensors(PADDING_OUTPUTS.read(config), config.output, _ignore)
    else:
        outputs = [Padded(entry.name, (entry.dims.index(-1),)) for entry in config.output if -1 in entry.dims]
    return Padding(
        tuple(inputs),
        tuple(outputs),
        PADDING_LOOKAHEAD.read(config),
        PADDING_MULTIPLE.read(config),
        PADDING_BATCH_COST.read(config),
    )


def number_of(text: str, data_type: str) -> float | int | None:
    """A padding value as a number of this type; None if invalid."""
    if not text:
        return 0
    try:
        if data_type in ("TYPE_FP16", "TYPE_FP32", "TYPE_FP64", "TYPE_BF16"):
            return float(text)
        if data_type == "TYPE_BOOL":
            return {"0": 0, "1": 1, "false": 0, "true": 1}.get(text.lower())
        value, bits = int(text), int(data_type.lstrip("TYPE_UIN"))
    except ValueError:
        return None
    low, high = (0, 1 << bits) if "UINT" in data_type else (-(1 << (bits - 1)), 1 << (bits - 1))
    return value if low <= value < high else None


def validate_padding(config: ModelConfig, unknown: bool, problem: ProblemFunction) -> None:
    """Reports what does not fit the rest of the configuration. `unknown`: the model may still add tensors and
    max_batch_size.
    """
    rows = [row for row in _ROWS if row.is_set(config)]
    if not rows:
        return
    if PADDING not in rows:
        problem(rows[0].path, f'has no effect without the parameter "{PADDING.name}", which names the inputs to pad')
        return
    path = PADDING.path
    if config.dynamic_batching is None and not unknown:
        problem(path, "needs dynamic_batching: only requests that share a batch are padded")
    elif config.max_batch_size <= 0 and not unknown:
        problem(path, f"needs max_batch_size > 0, found {config.max_batch_size}")
    if config.batch_input or config.batch_output:
        problem(path, "cannot be combined with batch_input or batch_output, which are for ragged batches")
    if not PADDING.read(config).split():
        problem(path, 'is empty, expected the inputs to pad, such as "input_ids attention_mask"')
    _check(path, "input", PADDING.read(config), config.input, problem)
    if PADDING_OUTPUTS in rows:
        _check(PADDING_OUTPUTS.path, "output", PADDING_OUTPUTS.read(config), config.output, problem)
        return
    for index, entry in enumerate(config.output):
        if entry.dims.count(-1) > 1:
            text = f'"{entry.name}" has several dims of -1; name the one to cut in the parameter'
            problem(f"output[{index}].dims", f'{text} "{PADDING_OUTPUTS.name}"')
        elif -1 in entry.dims and entry.reshape is not None:
            problem(f"output[{index}].reshape", f'"{entry.name}" is cut, and cannot have a reshape')


def _check(
    path: str, kind: str, text: str, tensors: Sequence[ModelInput | ModelOutput], problem: ProblemFunction
) -> None:
    by_name = {entry.name: entry for entry in tensors}
    entries = _tensors(text, tensors, lambda what: problem(path, what))
    for padded in entries if tensors else ():
        entry = by_name.get(padded.name)
        if entry is None:
            problem(path, f'"{escaped(padded.name)}" is not an {kind}; {meant(padded.name, by_name)}')
            continue
        if entry.reshape is not None:
            problem(path, f'{kind} "{entry.name}" has a reshape, and cannot be padded or cut')
        if isinstance(entry, ModelInput) and entry.allow_ragged_batch:
            problem(path, f'{kind} "{entry.name}" has allow_ragged_batch: it is concatenated, not padded')
        wrong = [axis for axis in padded.axes if axis >= len(entry.dims) or entry.dims[axis] != -1]
        if wrong or not padded.axes:
            where = f"axis {wrong[0]}" if wrong else "no axis"
            text = f'{where} of {kind} "{entry.name}" can differ in length: expected a dim of -1 there, found dims'
            problem(path, f"{text} {list(entry.dims)}")
        if kind == "output" and padded.value:
            problem(path, f'output "{entry.name}" has a value, "{escaped(padded.value)}"; only inputs have one')
        elif entry.data_type != "TYPE_STRING" and number_of(padded.value, entry.data_type) is None:
            problem(
                path, f'"{escaped(padded.value)}" is not a value of input "{entry.name}", which is {entry.data_type}'
            )


def _tensors(text: str, tensors: Sequence[ModelInput | ModelOutput], problem: Callable[[str], None]) -> list[Padded]:
    """Parses a parameter, in the order of its items. Items for the same tensor are merged into one."""
    dims = {entry.name: tuple(entry.dims) for entry in tensors}
    padded: dict[str, Padded] = {}
    for item in text.split():
        match = _ITEM.fullmatch(item)
        if match is None:
            problem(f'found "{escaped(item)}", expected NAME, NAME=VALUE, NAME[AXIS] or NAME[AXIS]=VALUE')
            continue
        name, value = match["name"], match["value"] or ""
        own = dims.get(name, ())
        axis = int(match["axis"]) if match["axis"] else own.index(-1) if -1 in own else None
        axes = () if axis is None else (axis,)
        earlier = padded.get(name)
        if earlier is not None:
            if axis in earlier.axes or (value and earlier.value and value != earlier.value):
                problem(f'"{escaped(name)}" is named twice')
            axes, value = tuple(sorted({*earlier.axes, *axes})), value or earlier.value
        padded[name] = Padded(name, axes, value)
    return list(padded.values())


def _ignore(text: str) -> None:
    """Ignores problems, because validation has already reported them."""
