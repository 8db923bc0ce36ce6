"""Tool calls that a caller demands: a JSON schema that the text of the model must match, and the calls in that text.

`tool_choice` names a function or is "required". A text for a named function has the arguments of one call. Otherwise it
has calls with `name` and `parameters`: a list, or a single one if `parallel_tool_calls` is false.
"""

from __future__ import annotations

import re
from typing import Any
from uuid import uuid4

import msgspec
from msgspec import Struct

from shmserve.errors import InvalidRequest, ModelFailed

MODES = ("none", "auto", "required")
NAME, ARGUMENTS = "name", "parameters"
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
_PIECES = re.compile(r'[^"\\{}\[\]]+|.')
"""A bracket, quote or backslash, or what stands between two of them."""


class ForcedCalls(Struct, frozen=True):
    """What the text must contain. `function`: the only function that may be called; "": one of several."""

    schema: dict[str, Any]
    function: str
    several: bool
    """The text is a list of calls."""

    def reader(self) -> CallReader:
        return CallReader(self.function, 1 if self.several else 0)


def forced_calls(tools: Any, tool_choice: Any, parallel: bool | None) -> ForcedCalls | None:
    """Returns what the text must contain; None if the model decides whether it calls a tool. Raises InvalidRequest."""
    functions = _functions(tools)
    if tool_choice is None or tool_choice in ("none", "auto"):
        return None
    if tool_choice == "required":
        if not functions:
            raise InvalidRequest("'tool_choice' is 'required', but 'tools' has no function")
        if len(functions) == 1 and parallel is False:
            ((name, parameters),) = functions.items()
            return ForcedCalls(parameters, name, False)
        return _several(functions, parallel is not False)
    name = _named(tool_choice)
    if name not in functions:
        raise InvalidRequest(f"'tool_choice' names the function '{name[:64]}', which is not in 'tools'")
    return ForcedCalls(functions[name], name, False)


def _named(tool_choice: Any) -> str:
    if isinstance(tool_choice, dict) and tool_choice.get("type") == "function":
        function = tool_choice.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            name: str = function["name"]
            return name
    raise InvalidRequest(
        "'tool_choice' must be 'none', 'auto', 'required', or an object such as "
        '{"type": "function", "function": {"name": "..."}}'
    )


def _functions(tools: Any) -> dict[str, dict[str, Any]]:
    """Name -> the schema of its arguments."""
    schemas: dict[str, dict[str, Any]] = {}
    for number, tool in enumerate(tools or ()):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise InvalidRequest(f"'tools[{number}]' is not a function with a name")
        if name in schemas:
            raise InvalidRequest(f"'tools' has the function '{name[:64]}' twice")
        assert isinstance(function, dict)
        parameters = function.get(ARGUMENTS)
        if parameters is not None and not isinstance(parameters, dict):
            raise InvalidRequest(f"'tools[{number}].function.parameters' is not an object")
        schemas[name] = parameters or _NOTHING
    return schemas


def _several(functions: dict[str, dict[str, Any]], several: bool) -> ForcedCalls:
    names = {f"tool{number}": name for number, name in enumerate(functions)}
    call = {
        "anyOf": [
            {
                "type": "object",
                "properties": {NAME: {"const": name}, ARGUMENTS: {"$ref": f"#/$defs/{key}"}},
                "required": [NAME, ARGUMENTS],
                "additionalProperties": False,
            }
            for key, name in names.items()
        ]
    }
    root = {"type": "array", "items": call, "minItems": 1} if several else call
    definitions = {key: _moved(functions[name], f"#/$defs/{key}") for key, name in names.items()}
    return ForcedCalls({**root, "$defs": definitions}, "", several)


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to its own parts are right at another place."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(one, place) for name, one in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved


class CallReader:
    """Finds the calls in a text that matches the schema, piece by piece. The pieces of calls are those of OpenAI's
    streams. `level`: how many brackets are open around a call."""

    def __init__(self, function: str, level: int) -> None:
        self._function = function
        self._level = level
        self._depth = 0
        """Open brackets."""
        self._quoted = self._escaped = False
        self._call: list[str] = []
        """The current call, with `null` for its arguments."""
        self._arguments: list[str] = []
        """The part of its arguments that was not returned yet."""
        self._index = 0
        self._begun = False
        """The first piece of the current call has been returned."""

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Reads a piece of the text. Returns the pieces of calls in it."""
        pieces: list[dict[str, Any]] = []
        if self._function:
            self._arguments.append(text)
            self._flush(self._function, pieces)
            return pieces
        for piece in _PIECES.findall(text):
            before = self._depth - self._level
            self._read(piece)
            after = self._depth - self._level
            if max(before, after) > 1:
                if before == 1:
                    self._call.append("null")
                self._arguments.append(piece)
            elif max(before, after) == 1:
                self._call.append(piece)
                if after == 0:
                    self._end(pieces)
        if self._arguments and (name := self._name()):
            self._flush(name, pieces)
        return pieces

    def _read(self, piece: str) -> None:
        if self._quoted:
            self._quoted = piece != '"' or self._escaped
            self._escaped = piece == "\\" and not self._escaped
        elif piece == '"':
            self._quoted = True
        elif piece in "{[":
            self._depth += 1
        elif piece in "}]":
            self._depth -= 1

    def _name(self) -> str:
        """The function of the current call; "": not known yet."""
        try:
            name = msgspec.json.decode("".join(self._call) + "}").get(NAME)
        except msgspec.DecodeError:
            return ""
        return name if isinstance(name, str) else ""

    def _end(self, pieces: list[dict[str, Any]]) -> None:
        try:
            call = msgspec.json.decode("".join(self._call))
        except msgspec.DecodeError:
            call = None
        if type(call) is not dict or type(call.get(NAME)) is not str:
            raise ModelFailed("the text of the model is not a list of calls, although tool_choice demands it")
        if not (self._begun or self._arguments):
            self._arguments.append(msgspec.json.encode(call.get(ARGUMENTS)).decode())
        self._flush(call[NAME], pieces)
        self._index += 1
        self._begun = False
        self._call.clear()

    def _flush(self, name: str, pieces: list[dict[str, Any]]) -> None:
        function: dict[str, Any] = {"arguments": "".join(self._arguments)}
        self._arguments.clear()
        if not self._begun:
            self._begun = True
            first = {"id": f"call_{uuid4().hex}", "type": "function"}
            pieces.append({"index": self._index, **first, "function": {"name": name, **function}})
        elif function["arguments"]:
            pieces.append({"index": self._index, "function": function})
