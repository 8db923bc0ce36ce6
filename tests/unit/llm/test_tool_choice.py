"""Schemas for demanded tool calls, and the calls in the texts that match them."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.errors import InvalidRequest
from shmserve.gateway.openai.formats import ToolCalls
from shmserve.llm.tool_choice import forced_calls
from tests.support.cases import cases
from tests.support.hypothesis_profiles import examples
from tests.support.optional import optional

jsonschema = optional("jsonschema")

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TREE = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}},
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "own": {"const": 1}}}},
}


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    function = {"name": name} if parameters is None else {"name": name, "parameters": parameters}
    return {"type": "function", "function": function}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


TOOLS = [tool("weather", CITY), tool("tree", TREE), tool("now")]
ARGUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@cases(
    (None, "required", "'tools' has no function"),
    (TOOLS, named("nope"), "names the function 'nope', which is not in 'tools'"),
    (TOOLS, "weather", "'tool_choice' must be 'none', 'auto', 'required', or an object"),
    (TOOLS, {"type": "function"}, "'tool_choice' must be"),
    ([*TOOLS, tool("now")], "auto", "'tools' has the function 'now' twice"),
    ([{"type": "function"}], "auto", "'tools[0]' is not a function with a name"),
    ([tool("f", [])], "auto", r"'tools\[0\].function.parameters' is not an object"),
)
def test_refusals(tools: Any, choice: Any, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text.replace("[0]' is", r"\[0\]' is")):
        forced_calls(tools, choice, None)


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_the_model_decides(choice: Any) -> None:
    assert forced_calls(TOOLS, choice, None) is None


def test_schemas_accept_only_calls_of_the_functions() -> None:
    forced = forced_calls(TOOLS, "required", None)
    assert forced is not None
    jsonschema.Draft202012Validator.check_schema(forced.schema)
    good = [
        {"name": "weather", "parameters": {"city": "Oslo"}},
        {"name": "tree", "parameters": {"root": {"next": {"own": 1}}}},
        {"name": "now", "parameters": {}},
    ]
    jsonschema.validate(good, forced.schema)
    for bad in (
        [],
        good[0],
        [{"name": "weather", "parameters": {}}],
        [{"name": "tree", "parameters": {"root": {"next": {"own": 2}}}}],
        [{"name": "now", "parameters": {"x": 1}}],
        [{"name": "other", "parameters": {}}],
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, forced.schema)
    single = forced_calls(TOOLS, "required", False)
    assert single is not None
    jsonschema.validate(good[0], single.schema)
    assert forced_calls(TOOLS, named("weather"), None).schema == CITY  # type: ignore[union-attr]
    assert forced_calls(TOOLS[:1], "required", False).schema == CITY  # type: ignore[union-attr]


def pieces_of(reader: Any, text: str, cuts: list[int]) -> list[dict[str, Any]]:
    """What a client makes of the pieces of a text that is cut at these places."""
    calls = ToolCalls()
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    for begin, end in pairwise(places):
        calls.add(reader.feed(text[begin:end]))
    return [one["function"] for one in calls.whole()]


@settings(max_examples=examples(quick=30))
@given(
    st.lists(st.tuples(st.sampled_from(["weather", "now"]), ARGUMENTS), min_size=1, max_size=4),
    st.lists(st.integers(0, 300)),
    st.booleans(),
    st.sampled_from([None, 1]),
)
def test_calls_are_found_wherever_the_text_is_cut(
    given_calls: list[tuple[str, Any]], cuts: list[int], name_last: bool, indent: int | None
) -> None:
    wanted = [{"name": name, "parameters": arguments} for name, arguments in given_calls]
    written = [dict(reversed(call.items())) if name_last else call for call in wanted]
    forced = forced_calls(TOOLS, "required", None)
    assert forced is not None
    found = pieces_of(forced.reader(), json.dumps(written, indent=indent), cuts)
    assert [{"name": one["name"], "parameters": json.loads(one["arguments"])} for one in found] == wanted


@settings(max_examples=examples(quick=30))
@given(ARGUMENTS, st.lists(st.integers(0, 300)))
def test_the_text_for_a_named_function_has_its_arguments(arguments: Any, cuts: list[int]) -> None:
    forced = forced_calls(TOOLS, named("weather"), None)
    assert forced is not None
    (call,) = pieces_of(forced.reader(), json.dumps(arguments), cuts)
    assert (call["name"], json.loads(call["arguments"])) == ("weather", arguments)
