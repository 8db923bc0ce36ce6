"""The HTTP endpoint as an OpenAPI 3.1 document. Invariant: paths and methods come from the routing table, so the
document is complete."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import msgspec

from shmserve.dtypes import ITEM_BYTES
from shmserve.gateway.auth.actions import FORMS, STREAMED, TO_MODELS
from shmserve.gateway.http.routes import KSERVE_PATHS, PATHS, Path
from shmserve.gateway.kserve.plans import CLASSES
from shmserve.gateway.openai.bodies import ChatRequest, CompletionRequest, EmbeddingRequest
from shmserve.gateway.openai.errors import KIND as OPENAI
from shmserve.gateway.openai.messages import CountRequest, MessagesRequest
from shmserve.gateway.openai.responses import InputRequest, ResponsesRequest
from shmserve.gateway.openai.scores import RerankRequest, ScoreRequest
from shmserve.gateway.openai.speech import TranscriptionRequest
from shmserve.gateway.openai.tokens import DetokenizeRequest, TokenizeRequest
from shmserve.protocol.actions import Action, ActionRow
from shmserve.protocol.messages import DIMS, NAME_LENGTH, TENSORS
from shmserve.version import version

JSON, BYTES, EVENTS = "application/json", "application/octet-stream", "text/event-stream"
FORM = "multipart/form-data"
_HEADER_LENGTH = "Inference-Header-Content-Length"
_Schema = dict[str, Any]
_ERRORS = ("Error", "OpenAiError")
"""Schemas of errors: of the KServe protocol, and of the OpenAI-compatible endpoints."""
_AND_OPENAI = ", and OpenAI-compatible endpoints"
BODIES = (
    ChatRequest,
    CompletionRequest,
    CountRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    InputRequest,
    MessagesRequest,
    RerankRequest,
    ResponsesRequest,
    ScoreRequest,
    TokenizeRequest,
    TranscriptionRequest,
)
"""The types of the bodies of the OpenAI-compatible endpoints."""
_CONTENT = {
    **dict.fromkeys(STREAMED, (JSON, EVENTS)),
    Action.INFER: (JSON, BYTES),
    Action.GENERATE_STREAM: (EVENTS,),
}
"""The content types of a response that is not only JSON: raw tensors may follow the JSON of INFER, and a stream
consists of server-sent events."""


@cache
def text(openai: bool = True) -> bytes:
    return json.dumps(document(openai)).encode()


def document(openai: bool = True) -> _Schema:
    """`openai`: include the OpenAI-compatible endpoints."""
    paths: dict[str, Any] = {}
    for path in PATHS if openai else KSERVE_PATHS:
        paths[path.template] = {
            method.lower(): _operation(path, method, action) for method, action in path.actions.items()
        }
    info = {
        "title": "shmserve",
        "version": version(),
        "description": f"The KServe protocol, version 2, with extensions{_AND_OPENAI if openai else ''}.",
    }
    responses = {name: {"description": "Error", "content": {JSON: {"schema": _ref(name)}}} for name in _ERRORS}
    return with_token(info, paths, {"schemas": {**SCHEMAS, **_bodies()}, "responses": responses})


def _bodies() -> _Schema:
    """The schemas of the types into which the OpenAI-compatible endpoints decode their bodies, by their names."""
    _, schemas = msgspec.json.schema_components(BODIES, ref_template="#/components/schemas/{name}")
    for schema in schemas.values():
        fields = schema["properties"] = {name: _without_null(field) for name, field in schema["properties"].items()}
        if "messages" in fields:
            fields["messages"]["items"] = _MESSAGE
    speech = schemas[TranscriptionRequest.__name__]
    speech["properties"]["file"] = {"type": "string", "contentMediaType": BYTES}
    speech["required"].append("file")
    return schemas


def _without_null(field: _Schema) -> _Schema:
    """The schema of a field if it is given. Null means that it is not."""
    kinds = [kind for kind in field.get("anyOf", ()) if kind != {"type": "null"}]
    if len(kinds) == 1:
        return dict(kinds[0])
    return {"anyOf": kinds} if kinds else {name: value for name, value in field.items() if value is not None}


def with_token(info: _Schema, paths: _Schema, components: _Schema) -> _Schema:
    """A document whose requests may carry a token."""
    return {
        "openapi": "3.1.0",
        "info": info,
        "paths": paths,
        "components": {**components, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"token": []}],
    }


def _ref(name: str) -> _Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _error(path: Path) -> str:
    return _ERRORS[path.kind == OPENAI]


def _operation(path: Path, method: str, action: Action) -> _Schema:
    row = action.row
    names = re.findall(r"{(\w+)}", path.template)
    described: _Schema = {
        "operationId": "_".join([method.lower(), *re.findall(r"\w+", path.template)]),
        "summary": _summary(row),
        "tags": ["openai" if path.kind == OPENAI else row.groups[0]],
        "parameters": [{"name": name, "in": "path", "required": True, "schema": _ref(_NAMES[name])} for name in names],
        "responses": {"200": _answer(action), "default": {"$ref": f"#/components/responses/{_error(path)}"}},
    }
    if action in FORMS:
        described["requestBody"] = {"content": {FORM: {"schema": _ref(row.takes)}}, "required": True}
        return described
    takes = f"{path.kind.capitalize()}Region" if row.takes == "Region" else row.takes
    if takes:
        content: _Schema = {JSON: {"schema": _ref(takes)}}
        if action is Action.INFER:
            content[BYTES] = {}
            described["parameters"].append(
                {
                    "name": _HEADER_LENGTH,
                    "in": "header",
                    "schema": {"type": "integer", "minimum": 0},
                    "description": "Length of the JSON part of the body, which tensors follow",
                }
            )
        described["requestBody"] = {"content": content, "required": action in TO_MODELS}
    return described


def _summary(row: ActionRow) -> str:
    return f"{row.summary}: 200, or 400" if row.groups == ("health",) else row.summary


def _answer(action: Action) -> _Schema:
    row = action.row
    described: _Schema = {"description": _summary(row)}
    if row.gives:
        schemas: _Schema = {JSON: {"schema": _ref(row.gives)}, EVENTS: {"schema": {"type": "string"}}, BYTES: {}}
        described["content"] = {kind: schemas[kind] for kind in _CONTENT.get(action, (JSON,))}
    if action is Action.INFER:
        described["headers"] = {_HEADER_LENGTH: {"schema": {"type": "integer"}}}
    return described


# ---------------------------------------------------------------------------------------- schemas

_NAMES = {"model": "Name", "repository": "Name", "region": "Name", "version": "Version"}


def _object(required: tuple[str, ...] = (), /, **properties: _Schema) -> _Schema:
    schema: _Schema = {"type": "object", "properties": properties}
    if required:
        schema["required"] = list(required)
    return schema


def _list(of: _Schema, max_items: int | None = None) -> _Schema:
    return {"type": "array", "items": of} | ({} if max_items is None else {"maxItems": max_items})


def _strings(*names: str) -> dict[str, _Schema]:
    return dict.fromkeys(names, _STRING)


_STRING: _Schema = {"type": "string"}
_OBJECT: _Schema = {"type": "object"}
_OBJECTS = _list(_OBJECT)
_BOOL: _Schema = {"type": "boolean"}
_COUNT: _Schema = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}
_SHAPE = _list({"type": "integer", "minimum": -1}, DIMS)
_PARAMETERS = _ref("Parameters")
_TENSOR = _object(("name", "datatype", "shape"), name=_ref("Name"), datatype=_ref("Datatype"), shape=_SHAPE)
_PLACE: dict[str, _Schema] = {
    "shared_memory_region": _ref("Name"),
    "shared_memory_offset": _COUNT,
    "shared_memory_byte_size": _COUNT,
}
_SEQUENCE: dict[str, _Schema] = {
    "sequence_id": {"type": ["integer", "string"]},
    "sequence_start": _BOOL,
    "sequence_end": _BOOL,
}
_MESSAGE = _object(("role",), role=_STRING, content={"type": ["string", "array"]})
_TOKENS_USED = _object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT)
_VALUE: _Schema = {"type": ["string", "integer", "number", "boolean"]}


def _parameters(**properties: _Schema) -> _Schema:
    return {"type": "object", "properties": properties, "additionalProperties": _VALUE}


SCHEMAS: dict[str, _Schema] = {
    "Any": {},
    "Error": _object(("error",), error=_STRING),
    "Name": {"type": "string", "minLength": 1, "maxLength": NAME_LENGTH},
    "Version": {"type": "string", "pattern": "^[1-9][0-9]{0,17}$"},
    "Datatype": {"type": "string", "enum": list(ITEM_BYTES)},
    "Parameters": _parameters(),
    "Server": _object(("name", "version", "extensions"), name=_STRING, version=_STRING, extensions=_list(_STRING)),
    "Model": _object(
        ("name", "versions", "platform", "inputs", "outputs"),
        name=_STRING,
        versions=_list(_STRING),
        platform=_STRING,
        inputs=_list(_TENSOR),
        outputs=_list(_TENSOR),
    ),
    "Statistics": _object(("model_stats",), model_stats=_OBJECTS),
    "InferRequest": _object(
        ("inputs",),
        id={"type": "string", "maxLength": NAME_LENGTH},
        parameters=_parameters(**_SEQUENCE, priority=_COUNT, timeout=_COUNT, binary_data_output=_BOOL),
        inputs=_list(_ref("Input"), TENSORS),
        outputs=_list(_ref("Output"), TENSORS),
    ),
    "Input": _object(
        ("name", "datatype", "shape"),
        name=_ref("Name"),
        datatype=_ref("Datatype"),
        shape=_list(_COUNT, DIMS),
        data={"type": "array"},
        parameters=_parameters(binary_data_size=_COUNT, **_PLACE),
    ),
    "Output": _object(
        ("name",),
        name=_ref("Name"),
        parameters=_parameters(
            binary_data=_BOOL, classification={"type": "integer", "minimum": 1, "maximum": CLASSES}, **_PLACE
        ),
    ),
    "InferResponse": _object(
        ("model_name", "model_version", "outputs"),
        **_strings("model_name", "model_version", "id"),
        parameters=_PARAMETERS,
        outputs=_list(
            _object(
                ("name", "datatype", "shape"),
                name=_STRING,
                datatype=_ref("Datatype"),
                shape=_SHAPE,
                data={"type": "array"},
                parameters=_PARAMETERS,
            )
        ),
    ),
    "Generate": _object(id=_STRING, priority=_COUNT, timeout=_COUNT, parameters=_PARAMETERS, **_SEQUENCE)
    | {"additionalProperties": {"type": ["string", "integer", "number", "boolean", "array"]}},
    "Generated": _object(("model_name", "model_version"), model_name=_STRING, model_version=_STRING, id=_STRING)
    | {"additionalProperties": True},
    "OpenAiError": _object(("error",), error=_object(("message", "type"), message=_STRING, type=_STRING)),
    "OpenAiModel": _object(
        ("id", "object", "created"), id=_STRING, object=_STRING, created=_COUNT, owned_by=_STRING, parent=_STRING
    ),
    "OpenAiModels": _object(("object", "data"), object=_STRING, data=_list(_ref("OpenAiModel"))),
    "Choices": _object(
        ("id", "object", "created", "model", "choices"),
        **_strings("id", "object", "model"),
        created=_COUNT,
        choices=_OBJECTS,
        usage=_TOKENS_USED,
    ),
    "Response": _object(
        ("id", "object", "created_at", "model", "status", "output"),
        **_strings("id", "object", "model", "status"),
        created_at=_COUNT,
        output=_OBJECTS,
        usage={"type": ["object", "null"]},
    ),
    "InputTokens": _object(("input_tokens",), input_tokens=_COUNT),
    "Message": _object(
        ("id", "type", "role", "model", "content", "stop_reason"),
        **_strings("id", "type", "role", "model"),
        content=_OBJECTS,
        stop_reason={"type": ["string", "null"]},
        usage=_OBJECT,
    ),
    "Ranking": _object(("id", "model", "results"), id=_STRING, model=_STRING, results=_OBJECTS, usage=_TOKENS_USED),
    "Scores": _object(
        ("id", "object", "model", "data"),
        **_strings("id", "object", "model"),
        created=_COUNT,
        data=_OBJECTS,
        usage=_TOKENS_USED,
    ),
    "Tokens": _object(
        ("count", "max_model_len", "tokens"),
        count=_COUNT,
        max_model_len={"type": ["integer", "null"]},
        tokens=_list(_COUNT),
        token_strs={"type": "null"},
    ),
    "Transcription": _object(("text",), text=_STRING, segments=_OBJECTS, usage=_OBJECT),
    "Prompt": _object(("prompt",), prompt=_STRING),
    "EmbeddingList": _object(
        ("object", "data", "model"), object=_STRING, data=_OBJECTS, model=_STRING, usage=_TOKENS_USED
    ),
    "Filter": _object(ready=_BOOL),
    "Index": _list(_object(("name",), name=_STRING, version=_STRING, state=_STRING, reason=_STRING)),
    "Load": _object(
        parameters={
            "type": "object",
            "properties": {"config": _STRING, "previous": _BOOL, "versions": _STRING},
            "additionalProperties": _STRING,
        }
    ),
    "Unload": _object(parameters=_object(unload_dependents=_BOOL, force=_BOOL)),
    "Settings": _OBJECT,
    "Regions": _list(_object(("name", "byte_size"), name=_STRING, byte_size=_COUNT)),
    "SystemRegion": _object(("key", "byte_size"), key=_STRING, offset=_COUNT, byte_size=_COUNT),
    "CudaRegion": _object(
        ("raw_handle", "device_id", "byte_size"),
        raw_handle=_object(("b64",), b64=_STRING),
        device_id=_COUNT,
        byte_size=_COUNT,
    ),
}
"""Schemas by the names that the table of actions and other schemas use."""
