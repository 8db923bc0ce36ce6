"""Tool calls that a model makes by itself, read from its text by vLLM's parser for the format of the model."""

from __future__ import annotations

from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager

from shmserve.errors import InvalidRequest
from shmserve.workers.backends.language.engine import Step


class ToolParsers:
    """Those of a model. `name`: that of `--tool-call-parser` of vLLM's server."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        """Raises InvalidRequest if vLLM has no such parser, or it does not fit the tokenizer."""
        self._tokenizer = tokenizer
        try:
            self._parser = ParserManager.get_parser(name, enable_auto_tools=True, tokenizer=tokenizer)
        except (TypeError, KeyError) as error:
            raise InvalidRequest(f"vLLM cannot read tool calls with the parser '{name}': {error}") from error

    def reader(self, chat: dict[str, Any], texts: int) -> CallReaders:
        """Raises ValueError if vLLM refuses the tools."""
        request = ChatCompletionRequest(messages=[], tools=chat["tools"], tool_choice="auto")
        parsers = [self._parser(self._tokenizer, request.tools) for _ in range(texts)]
        return CallReaders(parsers[0].adjust_request(request), parsers)


class CallReaders:
    """Reads the texts of one request."""

    def __init__(self, request: Any, parsers: list[Any]) -> None:
        self._request = request
        self._parsers = parsers
        self._called = [False] * len(parsers)

    @property
    def skip_special_tokens(self) -> bool:
        """False: the calls are marked by special tokens."""
        skip: bool = self._request.skip_special_tokens
        return skip

    def read(self, step: Step, tokens: list[int], prompt: list[int]) -> None:
        """Moves the calls out of the text."""
        parser, finished = self._parsers[step.index], bool(step.finish)
        delta = parser.parse_delta(step.text, tokens, self._request, prompt, finished=finished)
        step.text = delta.content or "" if delta is not None else ""
        if delta is not None and delta.tool_calls:
            step.calls = [call.model_dump(exclude_none=True) for call in delta.tool_calls]
            self._called[step.index] = True
        if step.finish == "stop" and self._called[step.index]:
            step.finish = "tool_calls"
