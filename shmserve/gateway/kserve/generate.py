"""The generate extension: a JSON object whose keys are inputs and parameters, or a form with such fields, becomes a
RequestPlan, and a response becomes such an object.

Invariant: the model's configuration decides what a key means, never its value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from shmserve.dtypes import elements
from shmserve.errors import InvalidRequest
from shmserve.gateway.kserve.answers import PLACE, Buffer, Held, joined, pieces_in_slices, size_of, spliced
from shmserve.gateway.kserve.forms import Form, encoded_files
from shmserve.gateway.kserve.json_scan import check_depth, unreadable
from shmserve.gateway.kserve.json_schemas import JsonSchemas, Schema, from_element, is_file, schemas_of, to_element
from shmserve.gateway.kserve.json_strings import CutStrings
from shmserve.gateway.kserve.json_tensors import check_count, to_bytes, to_json
from shmserve.gateway.kserve.plans import InputPlan, RequestPlan, Value, options_of, tensor_type
from shmserve.gateway.limits.turns import SLICE_BYTES, SlicedWork
from shmserve.protocol.messages import Tensor
from shmserve.shm.strings import decode_bytes, encode_bytes

ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
    "of responses"
)
VALUES = 32_768
"""Maximum number of values in a large request."""
_SHOWN = 8
"""Number of keys that an error text names."""
_OWN = ("id", "parameters")
_encode = msgspec.json.Encoder().encode


class GenerateForm:
    """A request to generate whose body is a form. Files are the bytes of their inputs, texts are what JSON would have
    as the value."""

    def __init__(self, form: Form) -> None:
        self._form = form

    def plan(self, config: Mapping[str, Any]) -> SlicedWork[RequestPlan]:
        """`config`: the model's configuration."""
        inputs, schemas = _inputs_of(config), schemas_of(config)
        document: dict[str, Any] = {}
        for name, field in self._form.fields.items():
            document[name] = _field_value(name, field, inputs.get(name), schemas)
        for name, files in self._form.files.items():
            if name not in inputs:
                raise InvalidRequest(f"the file '{name[:80]}' is not an input of the model. {_form(inputs)}")
            document[name] = yield from _as_strings(name, inputs[name], files)
        return _plan_of(document, inputs, config, schemas)


class GenerateRequest:
    """A request to generate: its JSON, decoded when the model's configuration is known."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._strings: CutStrings | None = None

    def cut(self) -> SlicedWork[None]:
        """Called first for a large request."""
        self._strings = CutStrings()
        yield from self._strings.cut(self._text, VALUES, ", use infer instead")
        self._text = self._strings.around

    def plan(self, config: Mapping[str, Any]) -> SlicedWork[RequestPlan]:
        """`config`: the model's configuration."""
        inputs = _inputs_of(config)
        document = _read(self._text, inputs)
        if self._strings is not None:
            yield from self._strings.restore(document)
            yield
        return _plan_of(document, inputs, config, schemas_of(config))


class _Strings(NamedTuple):
    """The encoded elements of an input that came as files."""

    items: int
    data: bytearray


def _inputs_of(config: Mapping[str, Any]) -> dict[str, Any]:
    return {one["name"]: one for one in config.get("input", [])}


def _as_strings(name: str, config: Mapping[str, Any], files: list[memoryview]) -> SlicedWork[_Strings]:
    if tensor_type(config) != "BYTES":
        raise InvalidRequest(f"input '{name}' of {tensor_type(config)} cannot be a file: send its value as a field")
    return _Strings(len(files), (yield from encoded_files(files)))


def _field_value(name: str, field: str | list[str], config: Mapping[str, Any] | None, schemas: JsonSchemas) -> Any:
    """Texts and files are written as they are, all other values as JSON."""
    if config is None or isinstance(field, list):
        return field
    schema = schemas.inputs.get(name)
    if tensor_type(config) == "BYTES" and (schema is None or is_file(schema)):
        return field
    text = field.encode()
    check_depth(text)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the field '{name}' of the form is not JSON: {error}") from None


def _plan_of(
    document: dict[str, Any], inputs: Mapping[str, Any], config: Mapping[str, Any], schemas: JsonSchemas
) -> RequestPlan:
    lead = (1,) if config.get("max_batch_size", 0) else ()
    known = schemas.inputs
    specs: list[InputPlan] = []
    parameters: dict[str, Value] = {}
    request_id = ""
    for name, value in document.items():
        if name in inputs:
            specs.append(_spec(name, inputs[name], lead, value, known.get(name)))
        elif name == "id":
            request_id = value if type(value) is str else str(_scalar("id", value, inputs))
        elif name == "parameters":
            nested = _split(value, inputs, parameters)
            for one in nested:
                if one in document:
                    raise InvalidRequest(f"input '{one[:80]}' already exists in request")
            specs += [_spec(one, inputs[one], lead, nested[one], known.get(one)) for one in nested]
        else:
            _add(parameters, name, value, inputs)
    return RequestPlan(tuple(specs), 0, options_of(request_id, parameters))


def _read(text: bytes, inputs: Mapping[str, Any]) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, value in pairs:
            if name in values:
                raise InvalidRequest(f"{'input' if name in inputs else 'key'} '{name[:80]}' already exists in request")
            values[name] = value
        return values

    check_depth(text)
    try:
        document = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise unreadable(error) from None
    if type(document) is not dict:
        raise unreadable("it is not an object")
    return document


def advice(plan: RequestPlan, config: Mapping[str, Any]) -> str:
    """What to change in a request that lacks required inputs; "" if it has them all."""
    inputs = _inputs_of(config)
    named = {spec.name for spec in plan.inputs}
    if not any(name not in named and not one.get("optional") for name, one in inputs.items()):
        return ""
    names = [f"'{name[:80]}'" for name in plan.options.parameters or ()]
    if len(names) > _SHOWN:
        names[_SHOWN:] = [f"{len(names) - _SHOWN} other keys"]
    if not names:
        return _form(inputs)
    are = "is not an input" if len(names) == 1 else "are not inputs"
    return f"{', '.join(names)} {are} of the model. {_form(inputs)}"


def _form(inputs: Mapping[str, Any]) -> str:
    """The object that the endpoint expects, with the data type in place of each value."""
    keys = [f'"{name[:80]}": {_value_form(config)}' for name, config in list(inputs.items())[:_SHOWN]]
    if len(inputs) > _SHOWN:
        keys.append("...")
    return f"Expected {{{', '.join(keys)}}}; other keys are parameters"


def _value_form(config: Mapping[str, Any]) -> str:
    dtype, several = tensor_type(config), not has_one_element(config["dims"])
    return f"{f'[{dtype}, ...]' if several else dtype}{' (optional)' if config.get('optional') else ''}"


def _scalar(name: str, value: Any, inputs: Mapping[str, Any]) -> Value:
    if type(value) not in (str, int, float, bool):
        raise InvalidRequest(
            f"parameter '{name[:80]}' has invalid type. It is not an input of the model, so it must be a string, a "
            f"number or a boolean. {_form(inputs)}"
        )
    scalar: Value = value
    return scalar


def _split(document: Any, inputs: Mapping[str, Any], parameters: dict[str, Value]) -> dict[str, Any]:
    """Returns those entries of the keyword `parameters` that are inputs, and adds the others to the parameters."""
    if type(document) is not dict:
        raise InvalidRequest("Expected JSON object for keyword: 'parameters'")
    for name, value in document.items():
        if name in inputs:
            continue
        try:
            _add(parameters, name, value, inputs)
        except InvalidRequest as error:
            raise InvalidRequest(f"Converting keyword: 'parameters': {error}") from None
    return {name: value for name, value in document.items() if name in inputs}


def _add(parameters: dict[str, Value], name: str, value: Any, inputs: Mapping[str, Any]) -> None:
    if name in parameters:
        raise InvalidRequest(f"parameter '{name[:80]}' is given more than once")
    parameters[name] = _scalar(name, value, inputs)


def _spec(name: str, config: Mapping[str, Any], lead: tuple[int, ...], value: Any, schema: Schema | None) -> InputPlan:
    """`value`: one element, or a list of all elements in order."""
    dims = [int(dim) for dim in config["dims"]]
    if schema is not None and not isinstance(value, _Strings):
        values = [value] if has_one_element(dims) else value  # an element may be a list
        if type(values) is not list:
            raise InvalidRequest(f"input '{name}' has several values: send a list")
        value = _Strings(len(values), bytearray(encode_bytes([to_element(name, schema, one) for one in values])))
    count = value.items if isinstance(value, _Strings) else len(value) if type(value) is list else 1
    variable = [index for index, dim in enumerate(dims) if dim < 0]
    if len(variable) > 1:
        dims = [1] * (len(dims) - 1) + [count]
    elif variable:
        others = elements(tuple(dim for dim in dims if dim >= 0))
        dims[variable[0]] = count // others if others else 0
    shape = (*lead, *dims)
    dtype = tensor_type(config)
    if isinstance(value, _Strings):
        check_count(name, shape, count)
        return InputPlan(name, dtype, shape, len(value.data), value.data)
    data = to_bytes(name, dtype, shape, value)
    return InputPlan(name, dtype, shape, len(data), data)


def generated(model: str, plan: RequestPlan, config: Mapping[str, Any], answer: Held) -> bytes:
    """One response as an object: outputs of one element as values, others as flat lists."""
    document, schemas = _about(model, plan, answer), schemas_of(config).outputs
    for tensor, parts in zip(answer.reply.outputs, answer.buffers, strict=True):
        if tensor.name in schemas:
            document[tensor.name] = _json_values(config, schemas[tensor.name], tensor, parts)
            continue
        text = to_json(tensor.name, tensor.dtype, tensor.shape, joined(parts))
        if elements(tensor.shape) == 1:
            text = msgspec.Raw(bytes(text)[1:-1])
        document[tensor.name] = text
    return _encode(document)


def _json_values(config: Mapping[str, Any], schema: Schema, tensor: Tensor, parts: list[Buffer]) -> Any:
    """A list, unless the model always returns one element."""
    elements: list[bytes] = decode_bytes(joined(parts), tensor.shape).ravel().tolist()
    values = [from_element(schema, element) for element in elements]
    dims = next((one["dims"] for one in config.get("output", []) if one["name"] == tensor.name), [-1])
    return values[0] if len(values) == 1 and has_one_element(dims) else values


def has_one_element(dims: Sequence[Any]) -> bool:
    """`dims`: of a tensor in a model's configuration, without the batch dimension."""
    return all(int(dim) == 1 for dim in dims)


def is_large(answer: Held) -> bool:
    """Whether the response must be encoded in slices."""
    return sum([size_of(parts) for parts in answer.buffers]) > SLICE_BYTES


def generated_in_slices(
    model: str, plan: RequestPlan, config: Mapping[str, Any], answer: Held, hold: Callable[[int], None]
) -> SlicedWork[list[Buffer]]:
    """The same for a large response, in pieces. `hold`: see `pieces_in_slices`."""
    document, schemas = _about(model, plan, answer), schemas_of(config).outputs
    outputs = []
    for tensor, parts in zip(answer.reply.outputs, answer.buffers, strict=True):
        if tensor.name in schemas:
            hold(2 * size_of(parts))
            document[tensor.name] = _json_values(config, schemas[tensor.name], tensor, parts)
            yield
        else:
            outputs.append((tensor, parts))
    pieces = yield from pieces_in_slices(outputs, hold)
    for tensor, _ in outputs:
        document[tensor.name] = PLACE  # it may replace a key from above, in its place
        if elements(tensor.shape) != 1:
            pieces[tensor.name] = [b"[", *pieces[tensor.name], b"]"]
    return spliced(_encode(document), [pieces[name] for name, value in document.items() if value is PLACE])


def _about(model: str, plan: RequestPlan, answer: Held) -> dict[str, Any]:
    document: dict[str, Any] = {"model_name": model, "model_version": str(answer.reply.version)}
    if plan.options.id:
        document["id"] = plan.options.id
    return document


def event(text: bytes) -> bytes:
    """Frames `text` as a server-sent event."""
    return b"data: %b\n\n" % text


def named_event(name: str, text: bytes) -> bytes:
    """The same for an event with a name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), text)
