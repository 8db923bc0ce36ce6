"""OpenAI's Responses, without state: a request becomes a chat, and its answer becomes the items of a response.

Invariant: `sequence_number` counts the events of a stream; each item and each part of it is added, filled and done.
"""

from __future__ import annotations

from typing import Annotated, Any
from uuid import uuid4

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.kserve.generate import named_event
from shmserve.gateway.openai import bodies
from shmserve.gateway.openai.bodies import ChatRequest
from shmserve.gateway.openai.errors import BadParameter
from shmserve.gateway.openai.formats import ChatFormat, Choice, ResponseOptions
from shmserve.gateway.openai.reading import TextReading
from shmserve.gateway.openai.texts import Delta, TokenUsage

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXTS = ("input_text", "output_text", "text")
_PASSED = (
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "chat_template_kwargs",
)
"""Fields that the chat gets unchanged."""
_REASONING = "reasoning_text"
_ENCRYPTED = "reasoning.encrypted_content"
"""What clients request so that they can continue without a state on the server. It has no effect, as the reasoning is
returned as text."""
_encode = msgspec.json.Encoder().encode


class ReasoningOptions(Struct, forbid_unknown_fields=True):
    effort: str | None = None
    summary: str | None = None
    """Has no effect: the whole reasoning is returned."""


class TextOptions(Struct, forbid_unknown_fields=True):
    format: dict[str, Any] | None = None
    verbosity: Any = None


class InputRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that determine the tokens of the input."""

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    truncation: str | None = None


class ResponsesRequest(InputRequest, kw_only=True, forbid_unknown_fields=True):
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: bodies.TopK | None = None
    min_p: bodies.MinP | None = None
    presence_penalty: bodies.Penalty | None = None
    frequency_penalty: bodies.Penalty | None = None
    repetition_penalty: bodies.RepetitionPenalty | None = None
    seed: bodies.Seed | None = None
    stop: bodies.Stop | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    background: bool | None = None
    include: list[str] | None = None

    metadata: Any = None
    max_tool_calls: Any = None
    """Has no effect: it limits calls that a server makes."""
    store: bool | None = None
    user: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None


_decoder = msgspec.json.Decoder(ResponsesRequest)
_counted = msgspec.json.Decoder(InputRequest)


def request_of(text: bytes) -> tuple[ResponsesRequest, ChatRequest]:
    """The request, and the chat that it becomes."""
    request = bodies.decoded(_decoder, text)
    if request.background:
        raise BadParameter("background", "'background' is not supported")
    for name in request.include or ():
        if name != _ENCRYPTED:
            raise BadParameter("include", f"'include' with '{name[:80]}' is not supported")
    chat = _chat(
        request,
        max_tokens=request.max_output_tokens,
        **{name: getattr(request, name) for name in _PASSED},
    )
    return request, chat


def counted(text: bytes) -> ChatRequest:
    """The chat whose prompt is counted."""
    return _chat(bodies.decoded(_counted, text))


def _chat(request: InputRequest, **more: Any) -> ChatRequest:
    for name in ("previous_response_id", "conversation"):
        if getattr(request, name) is not None:
            raise BadParameter(
                name, f"'{name}' is not supported: this server keeps no responses; send all items as 'input'"
            )
    if request.truncation not in (None, "disabled"):
        raise BadParameter("truncation", "'truncation' must be 'disabled'")
    messages = [] if request.instructions is None else [{"role": "system", "content": request.instructions}]
    chat = ChatRequest(
        model=request.model,
        messages=messages + _messages(request.input),
        tools=None if request.tools is None else [_tool(number, tool) for number, tool in enumerate(request.tools)],
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_format(request.text.format if request.text is not None else None),
        reasoning_effort=request.reasoning.effort if request.reasoning is not None else None,
        **more,
    )
    bodies.check_chat(chat)
    return chat


def without_long_strings(request: ResponsesRequest) -> ResponsesRequest:
    """The request that the response shows, without what may contain strings that were cut out."""
    return replace(request, instructions=None, tools=None, text=None, metadata=None)


def _messages(conversation: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(conversation, str):
        return [{"role": "user", "content": conversation}]
    messages: list[dict[str, Any]] = []
    thought: dict[str, Any] = {}
    for number, item in enumerate(conversation):
        where = f"input[{number}]"
        before, thought = thought, {}
        match item.get("type", "message"):
            case "reasoning":
                thought = {"reasoning_content": _thought(where, item)}
            case "message":
                message = _message(where, item)
                messages.append({**message, **before} if message["role"] == "assistant" else message)
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                if not all(isinstance(value, str) for value in (*function.values(), item.get("call_id"))):
                    raise BadParameter(where, f"'{where}' needs the strings 'call_id', 'name' and 'arguments'")
                call = {"id": item["call_id"], "type": "function", "function": function}
                if messages and messages[-1]["role"] == "assistant" and "tool_calls" in messages[-1]:
                    messages[-1]["tool_calls"].append(call)
                else:
                    messages.append({"role": "assistant", "content": None, **before, "tool_calls": [call]})
            case "function_call_output":
                content = bodies.text_parts(f"{where}.output", item.get("output"), _TEXTS)
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
            case kind:
                raise BadParameter(f"{where}.type", f"items of the type {str(kind)[:40]!r} are not supported")
    return messages


def _thought(where: str, item: dict[str, Any]) -> str:
    parts = bodies.text_parts(f"{where}.content", item.get("content") or "", (_REASONING,))
    return parts if isinstance(parts, str) else "".join(part["text"] for part in parts)


def _message(where: str, item: dict[str, Any]) -> dict[str, Any]:
    role = _ROLES.get(str(item.get("role")))
    if role is None:
        raise BadParameter(f"{where}.role", f"'{where}.role' must be one of {', '.join(_ROLES)}")
    image = "input_image" if role == "user" else ""
    return {"role": role, "content": bodies.text_parts(f"{where}.content", item.get("content"), _TEXTS, image)}


def _tool(number: int, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise BadParameter(
            f"tools[{number}].type", f"tools of the type {str(tool.get('type'))[:40]!r} are not supported"
        )
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(schema: dict[str, Any] | None) -> dict[str, Any] | None:
    if schema is None or schema.get("type") != "json_schema":
        return schema
    return {"type": "json_schema", "json_schema": {name: value for name, value in schema.items() if name != "type"}}


class _TextItem(Struct, frozen=True):
    """A kind of item with a text. `fields` are those of the item, `part_fields` those of its part, and `event_fields`
    those of the events with its text."""

    prefix: str
    part: str
    fields: dict[str, Any] = {}
    part_fields: dict[str, Any] = {}
    event_fields: dict[str, Any] = {}


_TEXT_ITEMS = {
    "reasoning": _TextItem("rs", _REASONING, {"summary": [], "encrypted_content": None}),
    "message": _TextItem(
        "msg", "output_text", {"role": "assistant"}, {"annotations": [], "logprobs": []}, {"logprobs": []}
    ),
}


class ResponsesFormat(ChatFormat):
    """A response, or the events of its stream. It has one choice."""

    def __init__(self, response_id: str, created: int, request: ResponsesRequest, reading: TextReading) -> None:
        super().__init__(ResponseOptions(response_id, request.model, created), reading)
        self._number = 0
        self._items: list[dict[str, Any]] = []
        """The items that have begun."""
        self._open = ""
        """The type of the last item, if it is a text that can go on."""
        self._text: list[str] = []
        """The pieces of that text."""
        self._calls: dict[int, int] = {}
        """Index of a call -> that of its item."""
        self._document = {
            "id": response_id,
            "object": "response",
            "created_at": created,
            "model": request.model,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": request.temperature,
            "text": {"format": request.text.format if request.text and request.text.format else {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_p": request.top_p,
            "truncation": "disabled",
        }

    # ------------------------------------------------------------------------------------ as a whole

    def add(self, choice: Choice, delta: Delta) -> int:
        delta = self._read(choice, delta)
        choice.finish = delta.finish or choice.finish
        self._grow(choice, delta)
        return len(delta.thought) + len(delta.text)

    def whole(self, choices: list[Choice], usage: TokenUsage) -> list[Buffer]:
        self._reason(choices[0].finish or "stop", choices[0])
        self._finish_items()
        return [_encode(self._final(choices[0], usage))]

    # ------------------------------------------------------------------------------------ as events

    def chunk(self, index: int, choice: Choice, delta: Delta) -> bytes:
        first = b""
        if not choice.begun:
            choice.begun = True
            begun = {**self._document, "status": "in_progress", "output": [], "usage": None}
            first = self._event("response.created", response=begun) + self._event(
                "response.in_progress", response=begun
            )
        delta = self._read(choice, delta)
        events = self._grow(choice, delta)
        if delta.finish is not None:
            choice.finish = delta.finish
            self._reason(delta.finish, choice)
            events += self._finish_items()
        return first + b"".join(events)

    def end(self, choices: list[Choice], usage: TokenUsage) -> bytes:
        final = self._final(choices[0], usage)
        return self._event(f"response.{final['status']}", response=final)

    def error(self, body: bytes) -> bytes:
        error = msgspec.json.decode(body)["error"]
        return self._event("error", code=error["code"], message=error["message"], param=error["param"])

    def _event(self, kind: str, **more: Any) -> bytes:
        document = {"type": kind, "sequence_number": self._number, **more}
        self._number += 1
        return named_event(kind, _encode(document))

    def _grow(self, choice: Choice, delta: Delta) -> list[bytes]:
        """Adds to the items. Returns the events."""
        events: list[bytes] = []
        for kind, text in (("reasoning", delta.thought), ("message", delta.text)):
            if text:
                events += self._begin_text(kind)
                self._text.append(text)
                events.append(self._of_text("delta", delta=text))
        for piece in choice.tool_calls.add(delta.tool_calls) if delta.tool_calls else ():
            at = self._calls.get(piece["index"])
            if at is None:
                events += self._end_text()
                at = self._calls[piece["index"]] = len(self._items)
                function = piece["function"]
                item = {"type": "function_call", "id": f"fc_{uuid4().hex}", "call_id": piece["id"]}
                item |= {"name": function.get("name"), "arguments": "", "status": "in_progress"}
                self._items.append(item)
                events.append(self._event("response.output_item.added", output_index=at, item=dict(item)))
            more = piece["function"].get("arguments") or ""
            self._items[at]["arguments"] += more
            where = {"output_index": at, "item_id": self._items[at]["id"]}
            events.append(self._event("response.function_call_arguments.delta", **where, delta=more))
        return events

    def _begin_text(self, kind: str) -> list[bytes]:
        if self._open == kind:
            return []
        events = self._end_text()
        self._open = kind
        item_kind = _TEXT_ITEMS[kind]
        item = {"type": kind, "id": f"{item_kind.prefix}_{uuid4().hex}", "status": "in_progress", **item_kind.fields}
        item["content"] = []
        self._items.append(item)
        at = len(self._items) - 1
        events.append(self._event("response.output_item.added", output_index=at, item=dict(item)))
        events.append(self._of_part("response.content_part.added", part=_part(item_kind, "")))
        return events

    def _end_text(self) -> list[bytes]:
        """Ends the text that can go on, if there is one."""
        if not self._open:
            return []
        item_kind, text = _TEXT_ITEMS[self._open], "".join(self._text)
        part = _part(item_kind, text)
        events = [self._of_text("done", text=text), self._of_part("response.content_part.done", part=part)]
        self._items[-1]["content"] = [part]
        self._open = ""
        self._text.clear()
        return [*events, self._done(len(self._items) - 1)]

    def _of_text(self, kind: str, **more: Any) -> bytes:
        item_kind = _TEXT_ITEMS[self._open]
        return self._of_part(f"response.{item_kind.part}.{kind}", **more, **item_kind.event_fields)

    def _of_part(self, kind: str, **more: Any) -> bytes:
        """An event of the only part of the last item."""
        at = len(self._items) - 1
        return self._event(kind, item_id=self._items[at]["id"], output_index=at, content_index=0, **more)

    def _done(self, at: int) -> bytes:
        self._items[at]["status"] = "completed"
        return self._event("response.output_item.done", output_index=at, item=self._items[at])

    def _finish_items(self) -> list[bytes]:
        events = self._end_text()
        for at in self._calls.values():
            item = self._items[at]
            where = {"output_index": at, "item_id": item["id"], "name": item["name"]}
            events.append(self._event("response.function_call_arguments.done", **where, arguments=item["arguments"]))
            events.append(self._done(at))
        return events

    def _final(self, choice: Choice, usage: TokenUsage) -> dict[str, Any]:
        document = {**self._document, "status": "completed", "output": self._items, "usage": _usage(usage)}
        if choice.finish == "length":
            document |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        return document


def _part(kind: _TextItem, text: str) -> dict[str, Any]:
    return {"type": kind.part, "text": text, **kind.part_fields}


def _usage(usage: TokenUsage) -> dict[str, Any] | None:
    if usage.prompt is None or usage.completion is None:
        return None
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached or 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.completion,
    }
