"""Limits of the JSON schemas and regular expressions of a request.

llama.cpp compiles a schema to a grammar in the thread that runs all sequences, and tries all alternatives of the
grammar at each token. It sets no limits: some schemas would stall all callers or end the process. The grammars of vLLM,
xgrammar 0.2, took 6 s to parse a schema with 500 levels, and more than 10 s to compile 20,000 alternatives.

Invariant: the cost of a schema, with each `$ref` expanded, is bounded before the engine gets it.
"""

from __future__ import annotations

import re
from typing import Any

from shmserve.errors import InvalidRequest

VALUES = 2000
"""Maximum number of nested schemas and enum values in a schema."""
DEPTH = 128
PROPERTIES = 200
"""Maximum number of properties of an object: at each token, any of them may come next."""
ITEMS = 2000
LENGTH = 1_000_000
PATTERN = 200
"""Maximum number of elements of a pattern, counting groups as often as they are repeated."""
_REPEATED = 8
"""Maximum cost of a character with a numeric repetition. A repeated group costs more."""
_BOUNDS = (
    ("minItems", "maxItems", ITEMS),
    ("minLength", "maxLength", LENGTH),
    ("minProperties", "maxProperties", ITEMS),
)
_DEFINITIONS = ("$defs", "definitions")
"""Definitions at the root of a schema, which count only where they are referenced. At deeper levels, these can be names
of properties."""
_ELEMENT = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d*)(,?)(\d*)\}|.", re.DOTALL)


def check_schema(schema: Any, where: str) -> None:
    """Raises InvalidRequest. `where`: the name of the schema in the error."""
    try:
        _Check(schema, where).schema(schema, 0)
    except RecursionError:
        raise InvalidRequest(f"{where} is nested too deeply") from None


def check_regex(regex: Any, where: str) -> None:
    """Raises InvalidRequest."""
    if not isinstance(regex, str):
        raise InvalidRequest(f"{where} is not a text")
    _Check(None, where).pattern(regex)


def check_chat(chat: dict[str, Any]) -> None:
    """Checks the schemas of a chat. Anything that differs from OpenAI's API is left to the engine, which refuses it."""
    form = chat.get("response_format")
    if isinstance(form, dict):
        named = form.get("json_schema")
        for schema in (form.get("schema"), named.get("schema") if isinstance(named, dict) else None):
            check_schema(schema, "the schema of 'response_format'")
    tools = chat.get("tools")
    if isinstance(tools, list):
        for function in [tool.get("function") for tool in tools if isinstance(tool, dict)]:
            if isinstance(function, dict):
                check_schema(function.get("parameters"), "the schema of the parameters of a tool")


class _Check:
    def __init__(self, root: Any, where: str) -> None:
        self._root = root
        self._where = where
        self._remaining = VALUES
        self._open: set[str] = set()
        """References that are being followed. A reference to one of them costs nothing more."""

    def schema(self, value: Any, depth: int) -> None:
        """Checks a schema, or a list or object of schemas."""
        if depth > DEPTH:
            raise InvalidRequest(f"{self._where} is nested more than {DEPTH} levels deep")
        if isinstance(value, list):
            self._take(len(value))
            for one in value:
                self.schema(one, depth + 1)
        elif isinstance(value, dict):
            self._take(1)
            self._bounds(value)
            for name, one in value.items():
                if depth or name not in _DEFINITIONS:
                    self.schema(one, depth + 1)
            self._reference(value.get("$ref"), depth)

    def _take(self, count: int) -> None:
        self._remaining -= count
        if self._remaining < 0:
            raise InvalidRequest(
                f"{self._where} has more than {VALUES} parts and values, counted at each '$ref' to them"
            )

    def _reference(self, name: Any, depth: int) -> None:
        if isinstance(name, str) and name.startswith("#") and name not in self._open:
            self._open.add(name)
            self.schema(_target(self._root, name), depth + 1)
            self._open.discard(name)

    def _bounds(self, schema: dict[str, Any]) -> None:
        for lower, upper, limit in _BOUNDS:
            low, high = schema.get(lower), schema.get(upper)
            for name, bound in ((lower, low), (upper, high)):
                if isinstance(bound, int | float) and not 0 <= bound <= limit:
                    raise InvalidRequest(f"{self._where} has {name!r} {bound}; expected 0 to {limit}")
            if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
                raise InvalidRequest(f"{self._where} has {lower!r} {low}, which is above {upper!r} {high}")
        properties, pattern = schema.get("properties"), schema.get("pattern")
        if isinstance(properties, dict) and len(properties) > PROPERTIES:
            raise InvalidRequest(
                f"{self._where} has {len(properties)} properties in an object; the limit is {PROPERTIES}"
            )
        if isinstance(pattern, str):
            self.pattern(pattern)

    def pattern(self, pattern: str) -> None:
        sizes, last, group = [0], 0, False
        for element in _ELEMENT.finditer(pattern):
            text = element[0]
            if text == "(":
                sizes.append(0)
                last = 0
            elif text == ")" and len(sizes) > 1:
                last, group = sizes.pop(), True
                sizes[-1] += last
            elif element[1] is not None:
                times = self._repeated(element)
                sizes[-1] += last * ((times if group else min(times, _REPEATED)) - 1)
            else:
                last, group = 1, False
                sizes[-1] += 1
            if len(sizes) > DEPTH or sizes[-1] > PATTERN:
                raise InvalidRequest(
                    f"{self._where} has a pattern of more than {PATTERN} elements, repeated ones included"
                )

    def _repeated(self, element: re.Match[str]) -> int:
        low, high = int(element[1][:9] or 0), int(element[3][:9] or 0)
        if element[3] and low > high:
            raise InvalidRequest(
                f"{self._where} has a pattern with {element[0][:40]}, whose limits are in the wrong order"
            )
        if max(low, high) > ITEMS:
            raise InvalidRequest(
                f"{self._where} has a pattern with {element[0][:40]}; the limit of repetitions is {ITEMS}"
            )
        return max(low, high, 1)


def _target(root: Any, name: str) -> Any:
    """The target of a reference such as `#/$defs/item`; None: the engine cannot find it either."""
    target = root
    for key in name[1:].split("/")[1:]:
        if isinstance(target, dict):
            target = target.get(key, target.get(key.replace("~1", "/").replace("~0", "~")))
        elif isinstance(target, list) and key.isdecimal() and int(key[:9]) < len(target):
            target = target[int(key[:9])]
        else:
            return None
    return target
