"""Anthropic's Messages: a request becomes a chat, and its answer becomes blocks of content.

Invariant: in a stream, one block is open at a time; it is closed before the next one begins.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.kserve.generate import named_event
from shmserve.gateway.openai import bodies
from shmserve.gateway.openai.bodies import ChatRequest
from shmserve.gateway.openai.errors import BadParameter, anthropic_body
from shmserve.gateway.openai.formats import ChatFormat, Choice, ResponseOptions
from shmserve.gateway.openai.reading import TextReading
from shmserve.gateway.openai.texts import Delta, TokenUsage

_TEXTS, _IMAGE = ("text",), "image"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_encode = msgspec.json.Encoder().encode


class ThinkingOptions(Struct, forbid_unknown_fields=True):
    """`budget_tokens` has no effect: only `max_tokens` limits the thinking."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None

    @property
    def shown(self) -> bool:
        return self.type != "disabled" and self.display != "omitted"


class OutputConfig(Struct, forbid_unknown_fields=True):
    """`effort` is the variable `reasoning_effort` of the template."""

    format: dict[str, Any] | None = None
    effort: str | None = None

    @property
    def response_format(self) -> dict[str, Any] | None:
        match self.format:
            case None:
                return None
            case {"type": "json_schema", "schema": dict(schema)}:
                return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        raise BadParameter("output_config.format", "'output_config.format' must be a 'json_schema' with a 'schema'")


class CountRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """What the tokens of a prompt follow from."""

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None

    context_management: Any = None
    """Has no effect: nothing is removed from the prompt."""


class MessagesRequest(CountRequest, kw_only=True, forbid_unknown_fields=True):
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    stop_sequences: list[str] | None = None

    metadata: Any = None
    service_tier: Any = None


_decoder = msgspec.json.Decoder(MessagesRequest)
_counted = msgspec.json.Decoder(CountRequest)


def request_of(text: bytes) -> tuple[ChatRequest, bool]:
    """The chat that the request becomes, and whether its answer shows the thinking of the model."""
    request = bodies.decoded(_decoder, text)
    chat = _chat(
        request,
        stream=request.stream,
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop=request.stop_sequences or None,
    )
    return chat, request.thinking is not None and request.thinking.shown


def counted(text: bytes) -> ChatRequest:
    """The chat whose prompt is counted."""
    return _chat(bodies.decoded(_counted, text))


def _chat(request: CountRequest, **more: Any) -> ChatRequest:
    thinking = request.thinking
    choice = request.tool_choice or {}
    messages: list[dict[str, Any]] = []
    if request.system is not None:
        messages.append({"role": "system", "content": bodies.text_parts("system", request.system, _TEXTS)})
    for number, message in enumerate(request.messages):
        messages += _messages(f"messages[{number}]", message)
    output = request.output_config or OutputConfig()
    chat = ChatRequest(
        model=request.model,
        messages=messages,
        tools=None if request.tools is None else [_tool(number, tool) for number, tool in enumerate(request.tools)],
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=False if choice.get("disable_parallel_tool_use") else None,
        chat_template_kwargs=None if thinking is None else {"enable_thinking": thinking.type != "disabled"},
        response_format=output.response_format,
        reasoning_effort=output.effort,
        **more,
    )
    bodies.check_chat(chat)
    return chat


def _messages(where: str, message: dict[str, Any]) -> list[dict[str, Any]]:
    """One message may become several: each result of a tool is a message of its own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise BadParameter(f"{where}.role", f"'{where}.role' must be 'user' or 'assistant'")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise BadParameter(f"{where}.content", f"'{where}.content' is neither a string nor a list")
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in content:
        if not isinstance(block, dict):
            raise BadParameter(f"{where}.content", f"'{where}.content' has a block that is not an object")
        kind = block.get("type")
        if kind == "text" or (kind == _IMAGE and role == "user"):
            parts.append(block)
        elif kind == "thinking" and role == "assistant" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": _encode(block.get("input", {})).decode()}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            answer = bodies.text_parts(f"{where}.content", block.get("content") or "", _TEXTS)
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": answer})
        else:
            text = f"'{where}.content' of the role '{role}' has an unsupported block of the type {str(kind)[:40]!r}"
            raise BadParameter(f"{where}.content", text)
    said = bodies.text_parts(f"{where}.content", parts, _TEXTS, _IMAGE)
    more = {"reasoning_content": "".join(thoughts)} if thoughts else {}
    if calls:
        return [*results, {"role": role, "content": said or None, **more, "tool_calls": calls}]
    return [*results, {"role": role, "content": said, **more}] if said or not results else results


def _tool(number: int, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise BadParameter(f"tools[{number}].type", f"tools of the type {str(tool['type'])[:40]!r} are not supported")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: dict[str, Any]) -> Any:
    kind = str(choice.get("type", "auto"))
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind not in _CHOICES:
        raise BadParameter("tool_choice.type", "'tool_choice.type' must be 'auto', 'any', 'tool' or 'none'")
    return _CHOICES[kind]


class MessagesFormat(ChatFormat):
    """A message, or the events of its stream. It has one choice."""

    def __init__(self, response_id: str, model: str, shows_thinking: bool, reading: TextReading) -> None:
        super().__init__(ResponseOptions(response_id, model), reading)
        self._document = {"id": response_id, "type": "message", "role": "assistant", "model": model}
        self._shows_thinking = shows_thinking
        self._blocks = 0
        """Blocks that have begun."""
        self._open: str | int | None = None
        """The block that is open: its type, or the index of its call."""

    # ------------------------------------------------------------------------------------ as a whole

    def whole(self, choices: list[Choice], usage: TokenUsage) -> list[Buffer]:
        (choice,) = choices
        ends = {**self._ending(choice), "usage": _usage(usage)}
        blocks: list[list[Buffer]] = []
        if choice.thoughts and self._shows_thinking:
            blocks.append([b'{"type":"thinking","signature":"","thinking":"', *choice.thoughts, b'"}'])
        if choice.texts:
            blocks.append([b'{"type":"text","text":"', *choice.texts, b'"}'])
        for call in choice.tool_calls.whole():
            function = call["function"]
            block = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": _input(function)}
            blocks.append([_encode(block)])
        parts: list[Buffer] = [_encode(self._document)[:-1], b',"content":[']
        for number, pieces in enumerate(blocks):
            parts += [b",", *pieces] if number else pieces
        return [*parts, b"],", _encode(ends)[1:]]

    # ------------------------------------------------------------------------------------ as events

    def chunk(self, index: int, choice: Choice, delta: Delta) -> bytes:
        events: list[bytes] = []
        if not choice.begun:
            choice.begun = True
            begun: dict[str, Any] = {
                **self._document,
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": _usage(TokenUsage()),
            }
            events.append(_event("message_start", message=begun))
        delta = self._read(choice, delta)
        if delta.thought and self._shows_thinking:
            events += self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            events.append(self._delta({"type": "thinking_delta", "thinking": delta.thought}))
        if delta.text:
            events += self._begin("text", {"type": "text", "text": ""})
            events.append(self._delta({"type": "text_delta", "text": delta.text}))
        for piece in choice.tool_calls.add(delta.tool_calls) if delta.tool_calls else ():
            function = piece["function"]
            block = {"type": "tool_use", "id": piece.get("id"), "name": function.get("name"), "input": {}}
            events += self._begin(piece["index"], block)
            events.append(self._delta({"type": "input_json_delta", "partial_json": function.get("arguments") or ""}))
        if delta.finish is not None:
            choice.finish, choice.stop = delta.finish, delta.stop
            self._reason(delta.finish, choice)
        return b"".join(events)

    def end(self, choices: list[Choice], usage: TokenUsage) -> bytes:
        (choice,) = choices
        ends = _event("message_delta", delta=self._ending(choice), usage=_usage(usage))
        return b"".join([*self._close(), ends, _event("message_stop")])

    def error(self, body: bytes) -> bytes:
        return _event("error", error=msgspec.json.decode(anthropic_body(body))["error"])

    def _ending(self, choice: Choice) -> dict[str, str | None]:
        """Why the message ends."""
        reason = self._reason(choice.finish or "stop", choice)
        if reason == "stop" and choice.stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop}
        return {"stop_reason": _REASONS.get(reason, "end_turn"), "stop_sequence": None}

    def _begin(self, which: str | int, block: dict[str, Any]) -> list[bytes]:
        """Opens the block, unless it is open."""
        if self._open == which:
            return []
        closed = self._close()
        self._open = which
        self._blocks += 1
        return [*closed, _event("content_block_start", index=self._blocks - 1, content_block=block)]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _close(self) -> list[bytes]:
        if self._open is None:
            return []
        self._open = None
        return [_event("content_block_stop", index=self._blocks - 1)]


def _input(function: dict[str, Any]) -> Any:
    """The arguments of a call; {}: they are incomplete, because the text had reached its limit."""
    try:
        return msgspec.json.decode(function["arguments"])
    except msgspec.DecodeError:
        return {}


def _event(kind: str, **more: Any) -> bytes:
    return named_event(kind, _encode({"type": kind, **more}))


def _usage(usage: TokenUsage) -> dict[str, int]:
    """The tokens that were in the cache count apart."""
    cached = usage.cached or 0
    counted = {"input_tokens": (usage.prompt or 0) - cached, "output_tokens": usage.completion or 0}
    return counted if usage.cached is None else counted | {"cache_read_input_tokens": cached}
