"""The generate extension: a JSON object whose keys are inputs and parameters, or a form with such fields, becomes a
RequestPlan, and a response becomes such an object.

Invariant: the model's configuration decides what a key means, never its value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import msgspec

from shmserve.dtypes import elements
from shmserve.errors import InvalidRequest
from shmserve.gateway.kserve import json_strings
from shmserve.gateway.kserve.answers import PLACE, Buffer, Held, joined, size_of, spliced
from shmserve.gateway.kserve.forms import FIELD_BYTES, Form, encoded_files
from shmserve.gateway.kserve.json_scan import check_depth, unreadable
from shmserve.gateway.kserve.json_schemas import (
    JsonSchemas,
    Schema,
    append_file,
    elements_in_slices,
    from_element,
    is_file,
    schemas_of,
)
from shmserve.gateway.kserve.json_strings import CutStrings
from shmserve.gateway.kserve.json_tensors import check_count, joined_in_slices, to_bytes, to_json, to_json_in_slices
from shmserve.gateway.kserve.plans import InputPlan, RequestPlan, options_of, tensor_type
from shmserve.gateway.limits.turns import SLICE_BYTES, SlicedWork
from shmserve.protocol.messages import Tensor, Value
from shmserve.shm.strings import decode_bytes, encode_bytes

ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
    "of responses"
)
VALUES = 32_768
"""Maximum number of values in a large request."""
_SHOWN = 8
"""Number of keys that an error text names."""
_encode = msgspec.json.Encoder().encode


class GenerateForm:
    """A request to generate whose body is a form. Files are the bytes of their inputs, texts are what JSON would have
    as the value."""

    def __init__(self, form: Form) -> None:
        self._form = form

    def plan(self, config: Mapping[str, Any], hold: Callable[[int], None]) -> SlicedWork[RequestPlan]:
        """`config`: the model's configuration. `hold` is called with the sizes of copies, and may raise to abort."""
        inputs, schemas = _inputs_of(config), schemas_of(config)
        document: dict[str, Any] = {}
        json_bytes = 0
        for name, field in self._form.fields.items():
            if _is_json(field, name, inputs, schemas):
                json_bytes += len(field)
                if json_bytes > FIELD_BYTES:
                    raise InvalidRequest(
                        f"the fields of the form have more than {FIELD_BYTES} bytes of JSON: use infer instead"
                    )
                document[name] = _json_value(name, field)
            else:
                document[name] = field
        for name, files in self._form.files.items():
            if name not in inputs:
                raise InvalidRequest(f"the file '{name[:80]}' is not an input of the model. {_expected(inputs)}")
            document[name] = yield from _as_strings(name, inputs[name], files, hold)
        yield from _decode_files(document, inputs, schemas.inputs, hold)
        return _plan_of(document, inputs, config, schemas)


class GenerateRequest:
    """A request to generate: its JSON, decoded when the model's configuration is known. `strings`: those that were cut
    out of it."""

    def __init__(self, text: bytes, strings: CutStrings | None = None) -> None:
        self._text = text
        self._strings = strings

    def plan(self, config: Mapping[str, Any], hold: Callable[[int], None]) -> SlicedWork[RequestPlan]:
        """The same as for a form."""
        inputs, schemas = _inputs_of(config), schemas_of(config)
        document = _read(self._text, inputs)
        if self._strings is not None:
            yield from self._strings.restore(document)
            yield
        yield from _decode_files(document, inputs, schemas.inputs, hold)
        return _plan_of(document, inputs, config, schemas)


def large_request(text: bytes) -> SlicedWork[GenerateRequest]:
    strings = yield from json_strings.cut(text, VALUES, ", use infer instead")
    return GenerateRequest(strings.around, strings)


class _Strings(NamedTuple):
    """The encoded elements of an input that came as files."""

    items: int
    data: bytearray


def _inputs_of(config: Mapping[str, Any]) -> dict[str, Any]:
    return {one["name"]: one for one in config.get("input", [])}


def _as_strings(
    name: str, config: Mapping[str, Any], files: list[memoryview], hold: Callable[[int], None]
) -> SlicedWork[_Strings]:
    if tensor_type(config) != "BYTES":
        raise InvalidRequest(f"input '{name}' of {tensor_type(config)} cannot be a file: send its value as a field")
    hold(sum(map(len, files)))
    return _Strings(len(files), (yield from encoded_files(files)))


def _decode_files(
    document: dict[str, Any], inputs: Mapping[str, Any], schemas: Mapping[str, Schema], hold: Callable[[int], None]
) -> SlicedWork[None]:
    """Replaces the values of files, which are in base64, also those in the keyword `parameters`."""
    nested = document.get("parameters")
    for values in (document, nested) if type(nested) is dict else (document,):
        for name in inputs.keys() & values.keys() & schemas.keys():
            if is_file(schemas[name]) and not isinstance(values[name], _Strings):
                texts = _several(name, inputs[name]["dims"], values[name])
                hold(sum(len(text) for text in texts if type(text) is str) * 3 // 4)
                data = bytearray()
                for text in texts:
                    yield from append_file(name, text, data)
                values[name] = _Strings(len(texts), data)


def _several(name: str, dims: Sequence[Any], value: Any) -> list[Any]:
    """The elements of an input, each of which may be a list."""
    values = [value] if has_one_element(dims) else value
    if type(values) is not list:
        raise InvalidRequest(f"input '{name}' has several values: send a list")
    return values


def _is_json(field: str | list[str], name: str, inputs: Mapping[str, Any], schemas: JsonSchemas) -> TypeGuard[str]:
    """Texts and files are written as they are, all other inputs as JSON."""
    if name not in inputs or isinstance(field, list):
        return False
    schema = schemas.inputs.get(name)
    return tensor_type(inputs[name]) != "BYTES" or (schema is not None and not is_file(schema))


def _json_value(name: str, field: str) -> Any:
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
        return _expected(inputs)
    are = "is not an input" if len(names) == 1 else "are not inputs"
    return f"{', '.join(names)} {are} of the model. {_expected(inputs)}"


def _expected(inputs: Mapping[str, Any]) -> str:
    """The object that the endpoint expects, with the data type in place of each value."""
    keys = [f'"{name[:80]}": {_expected_value(config)}' for name, config in list(inputs.items())[:_SHOWN]]
    if len(inputs) > _SHOWN:
        keys.append("...")
    return f"Expected {{{', '.join(keys)}}}; other keys are parameters"


def _expected_value(config: Mapping[str, Any]) -> str:
    dtype, several = tensor_type(config), not has_one_element(config["dims"])
    return f"{f'[{dtype}, ...]' if several else dtype}{' (optional)' if config.get('optional') else ''}"


def _scalar(name: str, value: Any, inputs: Mapping[str, Any]) -> Value:
    if type(value) not in (str, int, float, bool):
        raise InvalidRequest(
            f"parameter '{name[:80]}' has invalid type. It is not an input of the model, so it must be a string, a "
            f"number or a boolean. {_expected(inputs)}"
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
        values = _several(name, dims, value)
        value = _Strings(len(values), bytearray(encode_bytes(list(map(_encode, values)))))
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
    items: list[bytes] = decode_bytes(joined(parts), tensor.shape).ravel().tolist()
    values = [from_element(schema, item) for item in items]
    return values[0] if len(values) == 1 and _always_one(config, tensor.name) else values


def _always_one(config: Mapping[str, Any], output: str) -> bool:
    dims = next((one["dims"] for one in config.get("output", []) if one["name"] == output), [-1])
    return has_one_element(dims)


def has_one_element(dims: Sequence[Any]) -> bool:
    """`dims`: of a tensor in a model's configuration, without the batch dimension."""
    return all(int(dim) == 1 for dim in dims)


def is_large(answer: Held) -> bool:
    """Whether the response must be encoded in slices."""
    return sum([size_of(parts) for parts in answer.buffers]) > SLICE_BYTES


def generated_in_slices(
    model: str, plan: RequestPlan, config: Mapping[str, Any], answer: Held, hold: Callable[[int], None]
) -> SlicedWork[list[Buffer]]:
    """The same for a large response, in pieces. `hold` is called with their sizes, and may raise to abort."""
    document, schemas = _about(model, plan, answer), schemas_of(config).outputs
    pieces: dict[str, list[Buffer]] = {}
    for tensor, parts in zip(answer.reply.outputs, answer.buffers, strict=True):
        name, count = tensor.name, elements(tensor.shape)
        if name in schemas:
            data = yield from joined_in_slices(parts)
            values = yield from elements_in_slices(schemas[name], data, hold)
            is_value = count == 1 and _always_one(config, name)
        else:
            values = yield from to_json_in_slices(name, tensor.dtype, tensor.shape, parts, hold)
            is_value = count == 1
        pieces[name] = values if is_value else [b"[", *values, b"]"]
        document[name] = PLACE  # an output may have the name of a key that is there, and keeps its place
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
