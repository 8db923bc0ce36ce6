"""The OpenAPI documents: each route is in the table of actions, documented and handled, and what a model takes and
returns is valid against its document."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from msgspec.structs import fields

from shmserve.errors import ServeError
from shmserve.gateway.auth.actions import PAGE
from shmserve.gateway.http import openapi
from shmserve.gateway.http.model_openapi import document
from shmserve.gateway.http.routes import PATHS, resolve
from shmserve.gateway.upstream.documents import QueryArguments, Route, query_of
from shmserve.gateway.upstream.regions import Regions
from shmserve.protocol.actions import Action
from shmserve.protocol.roles import QUERIES, names
from tests.support.cases import cases

DOCUMENT = json.loads(openapi.text())
OTHER_HANDLERS = {
    "infer", "generate", "generate_stream", "completions", "chat_completions", "responses", "messages", "count_tokens",
    "count_input_tokens",
    "embeddings", "rerank", "score", "transcriptions", "tokenize", "detokenize", "openai_models", "openai_model",
    "metrics", "openapi", "model_openapi", "page_file", "page_events", "page_preflight", "page_model", "page_history",
}  # fmt: skip
"""Actions that `Requests` of the HTTP listener does not pass to `query_of`."""
VALUES = {"{model}": "m", "{version}": "3", "{region}": "r", "{repository}": "s"}


def operations() -> Iterator[tuple[str, str, Any]]:
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def test_all_routes_are_documented_and_resolved() -> None:
    routes = {(path, method.upper()) for path, method, _ in operations()}
    assert routes == {(path.template, method) for path in PATHS for method in path.actions}
    actions = set()
    for template, method in routes:
        path = re.sub(r"{\w+}", lambda match: VALUES[match[0]], template)
        route = resolve(method, path)
        assert isinstance(route, Route), path
        assert route.version == ("3" if "{version}" in template else "")
        actions.add(route.action)
    assert actions == {action for action in Action if action.row.http} - {Action.METRICS} - PAGE


def has_query(action: Action) -> bool:
    try:
        query_of(Route(action, "m", kind="system"), QueryArguments(), Regions(False), ("", ""))
    except ServeError as error:  # of this gateway, or of the handler
        return "this gateway does not support the request" not in str(error)
    return True


def test_every_action_is_handled_and_needs_the_roles_of_its_query() -> None:
    """Actions that show a part of the answer have roles of their own."""
    queried = {action for action in Action if has_query(action)}
    assert queried | set(map(Action, OTHER_HANDLERS)) == {action for action in Action if action.row.http}
    assert not queried & set(map(Action, OTHER_HANDLERS))
    shown = {Action.PAGE_EVENTS, Action.PAGE_MODEL, Action.OPENAI_MODELS, Action.OPENAI_MODEL}
    for action in set(Action) - shown:
        if action.row.query:
            assert list(action.row.roles) == names(QUERIES[action.row.query]), action


def test_operation_ids_are_unique_and_path_parameters_complete() -> None:
    names = [operation["operationId"] for _, _, operation in operations()]
    assert len(names) == len(set(names))
    for path, _, operation in operations():
        documented = [parameter["name"] for parameter in operation["parameters"] if parameter["in"] == "path"]
        assert documented == re.findall(r"{(\w+)}", path)


def references(node: Any) -> Iterator[str]:
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if key == "$ref":
            yield value
        elif isinstance(value, dict | list):
            yield from references(value)


def test_references_are_resolved_and_all_schemas_are_used() -> None:
    found = set(references(DOCUMENT))
    for reference in found:
        place: Any = DOCUMENT
        for word in reference.removeprefix("#/").split("/"):
            place = place[word]
    assert {reference.rpartition("/")[2] for reference in found} == {*DOCUMENT["components"]["schemas"], "Error"}


@pytest.mark.parametrize("body", openapi.BODIES)
def test_the_schema_of_a_body_has_the_fields_that_are_read(body: type[Any]) -> None:
    schema = DOCUMENT["components"]["schemas"][body.__name__]
    of_forms = {"file"} if body.__name__ == "TranscriptionRequest" else set()
    assert set(schema["properties"]) - of_forms == {field.encode_name for field in fields(body)}
    assert schema["additionalProperties"] is False
    assert "null" not in json.dumps(schema), "null means the same as a missing field"


SCHEMAS = {
    "inputs": {"item": {"$ref": "#/components/schemas/Item"}, "image": {"type": "string", "contentEncoding": "base64"}},
    "outputs": {"boxes": {"type": "object"}},
    "components": {"Item": {"type": "object", "required": ["name"]}},
}
CONFIG: dict[str, Any] = {
    "input": [
        {"name": "item", "data_type": "TYPE_STRING", "dims": [1]},
        {"name": "image", "data_type": "TYPE_STRING", "dims": [1], "optional": True},
        {"name": "x", "data_type": "TYPE_FP32", "dims": ["-1"], "optional": True},
    ],
    "output": [
        {"name": "boxes", "data_type": "TYPE_STRING", "dims": [-1]},
        {"name": "count", "data_type": "TYPE_INT64", "dims": [-1]},
    ],
    "parameters": {"json_schemas": {"string_value": json.dumps(SCHEMAS)}},
}
FILE = {"type": "string", "format": "binary", "contentMediaType": "application/octet-stream"}
ROUTE = Route(Action.MODEL_OPENAPI, "m")


def valid(schema: Any, value: Any) -> bool:
    components = document(ROUTE, CONFIG)["components"]
    found: bool = Draft202012Validator({**schema, "components": components}).is_valid(value)
    return found


def test_bodies_and_answers() -> None:
    operation = document(ROUTE, CONFIG)["paths"]["/v2/models/m/generate"]["post"]
    takes = operation["requestBody"]["content"]
    body = takes["application/json"]["schema"]
    assert valid(body, {"item": {"name": "a"}, "image": "AAEC", "x": [0.5]})
    assert not valid(body, {"item": {}})
    assert not valid(body, {"image": "AAEC"})
    assert not valid(body, {"item": {"name": "a"}, "x": 1})
    form = takes["multipart/form-data"]["schema"]["properties"]
    assert form["image"] == FILE
    gives = operation["responses"]["200"]["content"]["application/json"]["schema"]
    assert valid(gives, {"model_name": "m", "model_version": "1", "boxes": [{}], "count": [1, 2]})
    assert valid(gives, {"boxes": [], "count": 1}), "one number is returned without a list"
    assert not valid(gives, {"boxes": {}, "count": [1]})


@cases(
    (CONFIG, "", ["/v2/models/m/generate", "/v2/models/m/generate_stream"]),
    (CONFIG, "2", ["/v2/models/m/versions/2/generate", "/v2/models/m/versions/2/generate_stream"]),
    ({**CONFIG, "model_transaction_policy": {"decoupled": True}}, "", ["/v2/models/m/generate_stream"]),
)
def test_the_endpoints_of_a_model(config: dict[str, Any], version: str, paths: list[str]) -> None:
    assert list(document(Route(Action.MODEL_OPENAPI, "m", version), config)["paths"]) == paths


@pytest.mark.parametrize(("dtype", "fields"), [("FP32", []), ("STRING", [{"x": FILE}])])
def test_only_models_that_take_bytes_have_a_form(dtype: str, fields: list[Any]) -> None:
    config = {"input": [{"name": "x", "data_type": f"TYPE_{dtype}", "dims": [1]}]}
    takes = document(ROUTE, config)["paths"]["/v2/models/m/generate"]["post"]["requestBody"]["content"]
    forms = [content["schema"] for kind, content in takes.items() if kind == "multipart/form-data"]
    assert [form["properties"] for form in forms] == fields
