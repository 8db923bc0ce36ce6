"""The OpenAPI document of a model: what generate takes and returns is valid against it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from shmserve.gateway.http.model_openapi import document
from shmserve.gateway.upstream.documents import Route
from shmserve.protocol.actions import Action
from tests.support.cases import cases

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
