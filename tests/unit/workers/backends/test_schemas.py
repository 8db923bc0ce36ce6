"""Limits of the schemas and grammars that callers give a language model. Those that are refused here stopped or ended
version 2026.10 of llama.cpp, or delayed the texts of others by seconds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shmserve.errors import InvalidRequest, Unsupported
from shmserve.workers.backends.language.requests import GenerationRequest
from shmserve.workers.backends.language.sampling import Defaults, sampling_in
from shmserve.workers.backends.language.schemas import check_chat, check_schema
from shmserve.workers.backends.llamacpp.parameters import engine_parameters
from shmserve.workers.backends.vllm.parameters import parameters_of
from tests.support.cases import cases


def optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(count)}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def doubled(levels: int) -> dict[str, Any]:
    """Each level refers to the next one twice."""
    both = {f"r{level}": {"anyOf": [{"$ref": f"#/$defs/r{level + 1}"}] * 2} for level in range(levels)}
    return {"$ref": "#/$defs/r0", "$defs": {**both, f"r{levels}": {"type": "string"}}}


def pattern(text: str) -> dict[str, str]:
    return {"type": "string", "pattern": text}


@cases(
    ({"type": "string", "minLength": 5, "maxLength": 2}, "'minLength' 5, which is above 'maxLength' 2"),
    ({"type": "array", "minItems": 5, "maxItems": 2}, "'minItems' 5, which is above 'maxItems' 2"),
    ({"type": "string", "minLength": -5}, "'minLength' -5; expected 0 to 1000000"),
    ({"type": "string", "maxLength": 2**62}, "expected 0 to 1000000"),
    ({"type": "array", "maxItems": 100_000}, "expected 0 to 2000"),
    ({"anyOf": [{"properties": {"a": {"maxItems": 1e300}}}]}, "expected 0 to 2000"),
    ({"properties": {"$defs": {"type": "string", "minLength": -1}}}, "'minLength' -1; expected"),
    (optional(201), "201 properties in an object; the limit is 200"),
    ({"enum": ["same"] * 2001}, "more than 2000 parts"),
    (doubled(24), "more than 2000 parts"),
    (nested(129), "more than 128 levels deep"),
    (nested(100_000), "deep"),
    (pattern("^a{5,2}$"), r"\{5,2\}, whose limits are in the wrong order"),
    (pattern("^a{99999999999999999999}$"), "the limit of repetitions is 2000"),
    (pattern("a?" * 201), "more than 200 elements"),
    (pattern("(a{1000}){1000}"), "more than 200 elements"),
    (pattern("(?:(a?){0,15}){15}"), "more than 200 elements"),
    (pattern("(" * 129), "more than 200 elements"),
)
def test_schemas_that_are_refused(schema: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        check_schema(schema, "the schema")


@cases(
    None,
    True,
    [5],
    {"type": "string", "minLength": 0, "maxLength": 100_000},
    {"properties": {"maxItems": {"type": "integer"}, "pattern": {"enum": [-5]}, "$ref": {"type": "string"}}},
    {"enum": [f"value {number}" for number in range(1000)]},
    optional(200),
    nested(100),
    doubled(8),
    {"$ref": "#"},
    {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#"}}}},
    {"$defs": {"a/b": {"type": "string"}}, "anyOf": [{"$ref": "#/$defs/a~1b"}, {"$ref": "#/nowhere/0"}]},
    pattern("^[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}$"),
    pattern(r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d{1,6})?(Z|[+-]\d{2}:\d{2})$"),
    pattern("^.{1,1000}$"),
    pattern(r"\)\(\{[({]{2,3}}"),
    pattern(")(*{{2"),
)
def test_schemas_that_are_allowed(schema: Any) -> None:
    check_schema(schema, "the schema")


def test_schemas_of_chats() -> None:
    wrong = {"type": "string", "minLength": 5, "maxLength": 2}
    for chat in (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": wrong}}},
        {"response_format": {"type": "json_object", "schema": wrong}},
        {"tools": [{"function": {"name": "f"}}, {"function": {"parameters": {"properties": {"a": wrong}}}}]},
        {"tools": [{"function": {"parameters": doubled(24)}}]},
    ):
        with pytest.raises(InvalidRequest, match=r"the schema of 'response_format'|the parameters of a tool"):
            check_chat(chat)
    check_chat({"response_format": 5, "tools": [5, {"function": 5}, {}]})
    check_chat({"response_format": {"json_schema": [wrong]}, "tools": {"function": wrong}})


def test_grammars_need_a_permission() -> None:
    sampling = sampling_in('{"structured_outputs": {"grammar": "root ::= \\"a\\"{5,2}"}}')
    with pytest.raises(Unsupported, match="the parameter 'grammars' of the model allows it"):
        engine_parameters(sampling, Defaults())
    assert engine_parameters(sampling, Defaults(grammars=True))["grammar"] == 'root ::= "a"{5,2}'


def for_vllm(wanted: dict[str, Any], chat: dict[str, Any] | None = None, grammars: bool = False) -> dict[str, Any]:
    given = {"structured_outputs": wanted} if wanted else {}
    generation = GenerationRequest(sampling_in(json.dumps(given)), 1, False, (), chat=chat)
    return parameters_of(generation, Defaults(grammars=grammars))[1]


@cases(
    ({"json": nested(129)}, "the schema of the text is nested more than 128 levels deep"),
    ({"json": json.dumps(nested(129))}, "the schema of the text is nested more than 128 levels deep"),
    ({"regex": "(a|b|ab)" * 20_000}, "the regular expression of the text has a pattern of more than 200 elements"),
    ({"regex": 5}, "the regular expression of the text is not a text"),
    ({"structural_tag": "{}"}, "'structural_tag' is not allowed"),
    ({"grammar": 'root ::= "a"'}, "'grammar' is not allowed"),
)
def test_structured_outputs_of_vllm_are_limited(wanted: dict[str, Any], words: str) -> None:
    with pytest.raises((InvalidRequest, Unsupported), match=words):
        for_vllm(wanted)


def test_schemas_of_chats_for_vllm() -> None:
    def chat(schema: Any) -> dict[str, Any]:
        return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}

    assert for_vllm({}, chat(nested(100))) == {"json": nested(100)}
    with pytest.raises(InvalidRequest, match="levels deep"):
        for_vllm({}, chat(nested(129)))
    for allowed in ({"regex": "[0-9]{4}"}, {"structural_tag": "{}"}, {"grammar": 'root ::= "a"'}):
        assert for_vllm(allowed, grammars=True) == allowed


def test_choices_are_limited() -> None:
    for count, allowed in ((1000, True), (1001, False)):
        sampling = sampling_in(json.dumps({"structured_outputs": {"choice": ["same"] * count}}))
        if allowed:
            assert engine_parameters(sampling, Defaults())["grammar"].count("same") == count
        else:
            with pytest.raises(InvalidRequest, match="has 1001 choices; the limit is 1000"):
                engine_parameters(sampling, Defaults())
