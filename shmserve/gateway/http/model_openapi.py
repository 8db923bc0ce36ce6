"""An OpenAPI 3.1 document for one model: what `generate` takes and returns, from the model's configuration and the JSON
schemas of its tensors. Generated clients then have a class for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shmserve.gateway.http.openapi import BYTES, EVENTS, FORM, JSON, SCHEMAS, with_token
from shmserve.gateway.kserve.generate import has_one_element
from shmserve.gateway.kserve.json_schemas import JsonSchemas, is_file, schemas_of
from shmserve.gateway.kserve.plans import tensor_type
from shmserve.gateway.upstream.documents import Route
from shmserve.version import version

_Schema = dict[str, Any]
_KINDS = {"BOOL": "boolean", "BYTES": "string", "FP16": "number", "BF16": "number", "FP32": "number", "FP64": "number"}
"""Data type -> JSON type; the others are integers."""
_FILE: _Schema = {"type": "string", "format": "binary", "contentMediaType": BYTES}
"""A field of a form: the bytes of the file, not base64. Generators of clients know the `format` of OpenAPI 3.0."""
_TRACE: _Schema = {
    "name": "traceparent",
    "in": "header",
    "description": "W3C trace context",
    "schema": {"type": "string"},
}


def document(route: Route, config: Mapping[str, Any]) -> _Schema:
    """`route`: of the request for the document, with the model and the version that it names."""
    schemas = schemas_of(config)
    inputs = {one["name"]: _tensor(one, schemas.inputs.get(one["name"])) for one in config.get("input", [])}
    outputs = {one["name"]: _output(one, schemas.outputs.get(one["name"])) for one in config.get("output", [])}
    required = [one["name"] for one in config.get("input", []) if not one.get("optional")]
    takes = _object(inputs, required)
    files = {one["name"]: _tensor(one, _FILE) for one in config.get("input", []) if _may_be_file(one, schemas)}
    gives = _object({"model_name": {"type": "string"}, "model_version": {"type": "string"}, **outputs}, list(outputs))
    content: _Schema = {JSON: {"schema": takes}}
    if files:
        content[FORM] = {"schema": _object({**inputs, **files}, required)}
    decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
    of_version = f"/versions/{route.version}" if route.version else ""
    base = f"/v2/models/{route.model}{of_version}"
    event = {"type": "string", "contentMediaType": JSON, "contentSchema": gives}
    answers = {
        "generate": ("The outputs of the model", {JSON: {"schema": gives}}),
        "generate_stream": ("The outputs of each response, as a server-sent event", {EVENTS: {"schema": event}}),
    }
    paths = {
        f"{base}/{name}": {"post": _operation(name, content, *answer)}
        for name, answer in answers.items()
        if not decoupled or name == "generate_stream"
    }
    info = {"title": route.model, "version": route.version or version()}
    return with_token(info, paths, {"schemas": schemas.components})


def _operation(name: str, takes: _Schema, description: str, gives: _Schema) -> _Schema:
    return {
        "operationId": name,
        "parameters": [_TRACE],
        "requestBody": {"content": takes, "required": True},
        "responses": {
            "200": {"description": description, "content": gives},
            "default": {"description": "Error", "content": {JSON: {"schema": SCHEMAS["Error"]}}},
        },
    }


def _object(properties: _Schema, required: list[str]) -> _Schema:
    return {"type": "object", "properties": properties, "required": required}


def _tensor(config: Mapping[str, Any], schema: _Schema | None) -> _Schema:
    one = schema if schema is not None else {"type": _KINDS.get(tensor_type(config), "integer")}
    return one if has_one_element(config["dims"]) else {"type": "array", "items": one}


def _may_be_file(config: Mapping[str, Any], schemas: JsonSchemas) -> bool:
    schema = schemas.inputs.get(config["name"])
    return tensor_type(config) == "BYTES" if schema is None else is_file(schema)


def _output(config: Mapping[str, Any], schema: _Schema | None) -> _Schema:
    """Numbers and texts are returned without a list if there is one of them."""
    described = _tensor(config, schema)
    if schema is not None or described["type"] != "array":
        return described
    return {"anyOf": [described["items"], described]}
