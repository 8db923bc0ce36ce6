"""Language models behind an OpenAI API, of any server: chats and completions that are streamed."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from msgspec import Struct

from shmserve.errors import ModelFailed, NotFound, Unsupported
from shmserve.tools.load.plan import Endpoint
from shmserve.tools.load.targets.base import (
    Arrays,
    ModelFacts,
    PromptRequest,
    Receiver,
    RequestSlot,
    SequencePart,
    TargetOptions,
)
from shmserve.tools.load.targets.connecting import explained
from shmserve.tools.load.targets.http_connection import HttpCaller, HttpConnections, error_text

_DONE = b"[DONE]"


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(Struct):
    text: str = ""
    delta: _Delta | None = None

    @property
    def has_tokens(self) -> bool:
        delta = self.delta
        return bool(self.text or (delta and (delta.content or delta.reasoning_content or delta.tool_calls)))


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class OpenAiTarget:
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._connections = HttpConnections(endpoint)

    async def facts(self, model: str, version: str) -> ModelFacts:
        """An API that lists its models must have this one."""
        with explained(self._endpoint):
            listed = await self._connections.get(f"{self._endpoint.path}/models", {})
        names = [str(entry.get("id")) for entry in listed.get("data", ())]
        if names and model not in names:
            raise NotFound(f"{self._endpoint.url} has no model '{model}'; it has: {', '.join(names)}")
        return ModelFacts(
            inputs={}, outputs={}, decoupled=True, server={"name": self._endpoint.url or "", "version": ""}
        )

    def prepare(self, arrays: Arrays, facts: ModelFacts, options: TargetOptions) -> Any:
        raise Unsupported("an OpenAI API takes prompts, no tensors")

    def prepare_prompt(self, prompt: PromptRequest, facts: ModelFacts, options: TargetOptions) -> Any:
        body: dict[str, Any] = {"model": options.model, "max_tokens": prompt.max_tokens}
        chat = prompt.messages or (options.chat and [{"role": "user", "content": prompt.text}])
        body |= {"messages": chat} if chat else {"prompt": prompt.text}
        body |= {"stream": True, "stream_options": {"include_usage": True}, **options.sampling}
        path = f"{self._endpoint.path}{'/chat' if chat else ''}/completions"
        text = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\n{self._connections.head}Content-Type: application/json\r\n"
        return f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text

    async def slot(self) -> RequestSlot:
        return _OpenAiSlot(await self._connections.caller())

    async def statistics(self, model: str, version: str) -> dict[str, Any]:
        return {}

    async def close(self) -> None:
        self._connections.close()


class _OpenAiSlot:
    def __init__(self, caller: HttpCaller) -> None:
        self._caller = caller

    async def send(self, body: Any, part: SequencePart | None) -> None:
        raise Unsupported("requests to an OpenAI API are streamed")

    async def stream(self, body: Any, part: SequencePart | None, on_answer: Receiver) -> None:
        """Chunks without tokens, such as the role of a chat, are no responses. A server that does not count tokens is
        taken to send one with each chunk."""
        chunks = 0
        usage: _Usage | None = None
        errors: list[str] = []

        def receive(event: bytes) -> None:
            nonlocal chunks, usage
            for line in event.splitlines():
                field, _, data = line.partition(b":")
                if field != b"data" or data.strip() == _DONE:
                    continue
                try:
                    chunk = _decode(data)
                except msgspec.DecodeError as error:
                    errors.append(f"an event is not in OpenAI's format: {error}")
                    continue
                if any(choice.has_tokens for choice in chunk.choices):
                    on_answer()
                    chunks += 1
                usage = chunk.usage or usage
                if chunk.error is not None:
                    errors.append(error_text(chunk.error))

        await self._caller.ask(body, receive)
        if errors:
            raise ModelFailed(errors[0])
        on_answer.count(usage.prompt_tokens if usage else 0, usage.completion_tokens if usage else chunks)
