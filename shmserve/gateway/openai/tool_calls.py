"""Tool calls, from the JSON of the model: complete calls, or pieces of them with the `index` of the call."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from shmserve.errors import ModelFailed


class ToolCalls:
    """The tool calls of one choice."""

    def __init__(self) -> None:
        self._calls: dict[int, dict[str, Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, given: list[Any]) -> list[dict[str, Any]]:
        """Adds complete calls or pieces. Returns them with an index, and the first piece of a call also with an id and
        a type, as streaming clients expect."""
        deltas = []
        for one in given:
            if type(one) is not dict or type(one.get("function")) is not dict:
                raise ModelFailed("the output 'tool_calls' of the model is not a list of tool calls")
            index = one.get("index")
            if type(index) is not int:
                index = len(self._calls)
            delta = {**one, "index": index}
            call = self._calls.get(index)
            if call is None:
                delta.setdefault("id", f"call_{uuid4().hex}")
                delta.setdefault("type", "function")
                self._calls[index] = {name: value for name, value in delta.items() if name != "index"}
                self._calls[index]["function"] = {"arguments": "", **one["function"]}
            else:
                _extend(call["function"], one["function"])
            deltas.append(delta)
        return deltas

    def whole(self) -> list[dict[str, Any]]:
        return [call for _, call in sorted(self._calls.items())]


def _extend(call: dict[str, Any], piece: dict[str, Any]) -> None:
    more = piece.get("arguments") or ""
    if type(more) is not str or type(call["arguments"]) is not str:
        raise ModelFailed("the 'arguments' of a tool call of the model are not a string")
    call["arguments"] += more
    if piece.get("name"):
        call["name"] = piece["name"]
