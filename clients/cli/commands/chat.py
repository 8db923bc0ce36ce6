"""`shmserve chat`: holds a conversation with a language model, through the OpenAI-compatible endpoint of a gateway."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from shmserve.clients.cli.commands.base import counted, screen_of
from shmserve.clients.cli.contexts import token_of
from shmserve.errors import ConnectionLost, Internal, InvalidRequest, ModelFailed, ServeError
from shmserve.terminal.console import BAD, FAINT, Screen
from shmserve.terminal.errors import Misuse
from shmserve.transport.http_link import HttpLink, parts_of

HELP = "/clear forgets the conversation, /quit or Ctrl-D ends it; Ctrl-C stops an answer"

Message = dict[str, Any]
_THINKING = ("reasoning_content", "reasoning")
"""The field of a message with the thinking of the model, which servers name differently; some send it as both."""


def chat(args: argparse.Namespace) -> int:
    url = args.url if "//" in args.url else f"http://{args.url}"
    endpoint = ChatEndpoint(url, token_of(args.token_file, url) if args.token_file is not None else "")
    sampling = {"max_tokens": args.max_tokens, "temperature": args.temperature, "seed": args.seed}
    conversation = Conversation(endpoint, args.model, args.system, {k: v for k, v in sampling.items() if v is not None})
    if args.prompt or not sys.stdin.isatty():
        text = " ".join(args.prompt) or sys.stdin.read()
        if not text.strip():
            raise Misuse("there is no message: give it as an argument or on standard input")
        for piece, thought in conversation.answer(text):
            print("" if thought else piece, end="", flush=True)
        print()
        return 0
    _talk(conversation, screen_of(args))
    return 0


def _talk(conversation: Conversation, screen: Screen) -> None:
    """Reads messages from the terminal until its end."""
    import readline  # noqa: F401 - `input` edits lines and remembers earlier ones with it

    print(screen.styled(HELP, FAINT))
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        match text:
            case "":
                continue
            case "/quit":
                return
            case "/clear":
                conversation.clear()
                continue
            case _ if text.startswith("/"):
                print(screen.styled(HELP, FAINT))
                continue
        _show(conversation, text, screen)


def _show(conversation: Conversation, text: str, screen: Screen) -> None:
    thinks = False
    try:
        for piece, thought in conversation.answer(text):
            end_of_thinking = "\n" if thinks and not thought else ""
            thinks = thought
            print(end_of_thinking + (screen.styled(piece, FAINT) if thought else piece), end="", flush=True)
    except KeyboardInterrupt:
        print(screen.styled(" (stopped)", FAINT), end="")
    except ServeError as error:
        print(screen.styled(f"error: {error}", BAD), end="")
    print()
    if conversation.figures:
        print(screen.styled(conversation.figures, FAINT))


class Conversation:
    """The messages so far. A message whose answer fails is forgotten; a stopped answer is kept as far as it had
    arrived.
    """

    def __init__(self, endpoint: ChatEndpoint, model: str, system: str | None, sampling: Message) -> None:
        self._endpoint = endpoint
        self._model = model
        self._sampling = sampling
        self._first = [{"role": "system", "content": system}] if system else []
        self.messages: list[Message] = list(self._first)
        self.figures = ""
        """About the last answer: its tokens, and how long they took."""

    def clear(self) -> None:
        self.messages = list(self._first)

    def answer(self, text: str) -> Iterator[tuple[str, bool]]:
        """Pieces of the answer, and of what the model thinks before it (True)."""
        asked = [*self.messages, {"role": "user", "content": text}]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        pieces: list[str] = []
        began, first, tokens = time.monotonic(), 0.0, 0
        self.figures = ""
        try:
            for chunk in self._endpoint.stream({"model": self._model, "messages": asked, **options, **self._sampling}):
                for delta in [choice.get("delta") or {} for choice in chunk.get("choices") or ()]:
                    if thought := next(filter(None, map(delta.get, _THINKING)), ""):
                        first = first or time.monotonic()
                        yield thought, True
                    if piece := delta.get("content"):
                        first = first or time.monotonic()
                        pieces.append(piece)
                        yield piece, False
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
        finally:
            if pieces:
                self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]
                self.figures = _figures(tokens or len(pieces), first - began, time.monotonic() - first)


def _figures(tokens: int, first_s: float, rest_s: float) -> str:
    rate = f", {(tokens - 1) / rest_s:,.0f} tokens/s" if tokens > 1 and rest_s > 0 else ""
    return f"{counted(tokens, 'token')}{rate}, the first after {first_s * 1000:,.0f} ms"


class ChatEndpoint:
    """An OpenAI-compatible endpoint. `url`: with or without /v1."""

    def __init__(self, url: str, token: str) -> None:
        try:
            self._parts = parts_of(url)
        except InvalidRequest as error:
            raise Misuse(f"--url: {error}") from None
        self._token = token

    def stream(self, body: Message) -> Iterator[Message]:
        """The events of a chat completion. Closing the iterator closes the connection, which stops the model."""
        path = f"{self._parts.path.rstrip('/').removesuffix('/v1')}/v1/chat/completions"
        with closing(HttpLink(self._parts.scheme, self._parts.netloc, self._token, timeout=None)) as link:
            try:
                for data in link.events(path, json.dumps(body).encode()):
                    if data == b"[DONE]":
                        return
                    yield _chunk(data)
            except ConnectionLost as error:
                raise ConnectionLost(f"{error}; --url names the gateway's HTTP endpoint") from error


def _chunk(data: bytes) -> Message:
    """An event of the stream. Raises ModelFailed if it is an error, and Internal if it is not one of OpenAI's API."""
    try:
        chunk: Message = json.loads(data)
        failure = chunk.get("error")
        text = failure["message"] if isinstance(failure, dict) else failure
    except (AttributeError, KeyError, ValueError) as error:
        raise Internal(f"the server's answer is not that of OpenAI's API: {error!r}") from error
    if text:
        raise ModelFailed(text)
    return chunk
