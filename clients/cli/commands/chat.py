"""`shmserve chat`: holds a conversation with a language model, through the OpenAI-compatible endpoint of a gateway."""

from __future__ import annotations

import argparse
import http.client
import json
import ssl
import sys
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from shmserve.clients.cli.commands.base import screen_of
from shmserve.clients.cli.contexts import token_of
from shmserve.errors import ConnectionLost, Denied, InvalidRequest, ModelFailed, NotFound, ServeError, Unavailable
from shmserve.terminal.console import BAD, FAINT, Screen
from shmserve.terminal.errors import Misuse

_ERRORS: dict[int, type[ServeError]] = {400: InvalidRequest, 401: Denied, 404: NotFound, 503: Unavailable}
HELP = "/clear forgets the conversation, /quit or Ctrl-D ends it; Ctrl-C stops an answer"

Message = dict[str, Any]


def chat(args: argparse.Namespace) -> int:
    endpoint = Endpoint(args.url, token_of(args.token_file, args.url) if args.token_file is not None else "")
    sampling = {"max_tokens": args.max_tokens, "temperature": args.temperature, "seed": args.seed}
    conversation = Conversation(endpoint, args.model, args.system, {k: v for k, v in sampling.items() if v is not None})
    if args.prompt or not sys.stdin.isatty():
        text = " ".join(args.prompt) or sys.stdin.read()
        if not text.strip():
            raise Misuse("there is no message: give it as an argument or on standard input")
        for piece in conversation.answer(text):
            print(piece, end="", flush=True)
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
    try:
        for piece in conversation.answer(text):
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(screen.styled(" (stopped)", FAINT), end="")
    except ServeError as error:
        print(screen.styled(f"error: {error}", BAD), end="")
    print()
    if conversation.figures:
        print(screen.styled(conversation.figures, FAINT))


class Conversation:
    """The messages so far. A message whose answer fails is forgotten; of a stopped answer, what had arrived remains."""

    def __init__(self, endpoint: Endpoint, model: str, system: str | None, sampling: Message) -> None:
        self._endpoint = endpoint
        self._model = model
        self._sampling = sampling
        self._first = [{"role": "system", "content": system}] if system else []
        self.messages: list[Message] = list(self._first)
        self.figures = ""
        """About the last answer: its tokens, and how long they took."""

    def clear(self) -> None:
        self.messages = list(self._first)

    def answer(self, text: str) -> Iterator[str]:
        asked = [*self.messages, {"role": "user", "content": text}]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        pieces: list[str] = []
        began, first, tokens = time.monotonic(), 0.0, 0
        self.figures = ""
        try:
            for chunk in self._endpoint.stream({"model": self._model, "messages": asked, **options, **self._sampling}):
                for choice in chunk.get("choices", ()):
                    if piece := choice.get("delta", {}).get("content"):
                        first = first or time.monotonic()
                        pieces.append(piece)
                        yield piece
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
        finally:
            if pieces:
                self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]
                self.figures = _figures(tokens or len(pieces), first - began, time.monotonic() - first)


def _figures(tokens: int, first_s: float, rest_s: float) -> str:
    rate = f", {(tokens - 1) / rest_s:,.0f} tokens/s" if tokens > 1 and rest_s > 0 else ""
    return f"{tokens} token{'' if tokens == 1 else 's'}{rate}, the first after {first_s * 1000:,.0f} ms"


class Endpoint:
    """An OpenAI-compatible endpoint. `url`: without /v1."""

    def __init__(self, url: str, token: str) -> None:
        self._parts = urlsplit(url if "//" in url else f"http://{url}")
        if self._parts.scheme not in ("http", "https") or not self._parts.hostname:
            raise Misuse(f"--url {url}: expected http://host:port or https://host:port")
        self._url = url
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})

    def stream(self, body: Message) -> Iterator[Message]:
        """The events of a chat completion. Closing the iterator closes the connection, which stops the model."""
        connection: http.client.HTTPConnection
        if self._parts.scheme == "https":
            connection = http.client.HTTPSConnection(self._parts.netloc, context=ssl.create_default_context())
        else:
            connection = http.client.HTTPConnection(self._parts.netloc)
        try:
            path = f"{self._parts.path.rstrip('/')}/v1/chat/completions"
            connection.request("POST", path, json.dumps(body), self._headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise _ERRORS.get(answer.status, ModelFailed)(_error_in(answer.read()) or f"status {answer.status}")
            for line in answer:
                data = line.partition(b"data: ")[2].strip()
                if data == b"[DONE]":
                    return
                if data:
                    event = json.loads(data)
                    if "error" in event:
                        raise ModelFailed(event["error"]["message"])
                    yield event
        except (OSError, http.client.HTTPException) as error:
            raise ConnectionLost(
                f"no answer from {self._url} ({error}); --url names the gateway's HTTP endpoint"
            ) from error
        finally:
            connection.close()


def _error_in(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]
