"""The client over HTTP, and the command that chats: answers that are errors, late or of another protocol."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from threading import Event

import pytest

from shmserve.clients.cli import main
from shmserve.clients.cli.commands import chat, completion
from shmserve.clients.cli.commands.chat import ChatEndpoint, Conversation
from shmserve.clients.cli.parser import parser
from shmserve.clients.http_client import HttpClient
from shmserve.errors import ConnectionLost, DeadlineExceeded, Internal, ModelFailed, ServeError
from tests.support.cases import cases
from tests.support.http_endpoint import Endpoint
from tests.support.patience import PATIENCE_S


class Echo(Endpoint):
    """Answers a POST with its field `event` as an event, and a GET with models or the metadata of one."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = Event()

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        self.asked.set()
        self.gate.wait()
        metadata = {"outputs": [{"name": "y", "datatype": "FP32"}]}
        text = json.dumps([{"name": "m"}] if request.path == "/shmserve/models" else metadata)
        if request.command == "POST":
            body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
            text = f"data: {body['event'][0]}\n\n"
        request.send_response(200)
        request.send_header("Content-Length", str(len(text)))
        request.end_headers()
        request.wfile.write(text.encode())


@pytest.fixture
def endpoint() -> Iterator[Echo]:
    with Echo() as endpoint:
        yield endpoint


@pytest.fixture
def url(endpoint: Echo) -> str:
    return f"http://127.0.0.1:{endpoint.port}"


@cases(
    ("{", Internal, "the server's answer is not that of OpenAI's API: JSONDecodeError"),
    ("[]", Internal, "the server's answer is not that of OpenAI's API: AttributeError"),
    ('"text"', Internal, "the server's answer is not that of OpenAI's API: AttributeError"),
    ('{"error": {}}', Internal, "the server's answer is not that of OpenAI's API: KeyError('message')"),
    ('{"error": {"message": "too long"}}', ModelFailed, "too long"),
    ('{"error": "too long"}', ModelFailed, "too long"),
)
def test_events_of_a_chat(event: str, kind: type[ServeError], text: str, url: str) -> None:
    with pytest.raises(kind) as failed:
        list(ChatEndpoint(url, "").stream({"event": [event]}))
    assert str(failed.value).startswith(text)


@cases(("{", Internal), ("[]", Internal), ('"text"', Internal), ('{"error": "too long"}', ModelFailed))
def test_events_of_a_model(event: str, kind: type[ServeError], url: str) -> None:
    with HttpClient(url) as client, client.stream("m", {"event": [event.encode()]}) as parts, pytest.raises(kind):
        list(parts)


def test_thinking_that_is_sent_under_both_names_is_shown_once(url: str) -> None:
    event = json.dumps({"choices": [{"delta": {"reasoning": "hm", "reasoning_content": "hm"}}]})
    conversation = Conversation(ChatEndpoint(url, ""), "m", None, {"event": [event]})
    assert list(conversation.answer("hi")) == [("hm", True)]


def test_the_url_of_a_chat_is_http_by_default(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning of a token that others can read needs the whole URL."""
    urls: list[str] = []
    monkeypatch.setattr(chat, "token_of", lambda _, url: urls.append(url))
    assert main.main(["chat", "m", "hi", "--url", url.removeprefix("http://"), "--token-file", "f"]) == 1
    assert urls == [url]


def test_a_timeout_is_not_a_lost_connection(endpoint: Echo, url: str) -> None:
    endpoint.gate.clear()
    with HttpClient(url) as client:
        for call in (client.load, lambda model, timeout: client.infer(model, {}, timeout=timeout)):
            with pytest.raises(DeadlineExceeded, match=rf"{url} did not answer within 0\.01 s"):
                call("m", timeout=0.01)


def test_close_ends_the_operations_of_other_threads(endpoint: Echo, url: str) -> None:
    """As Ctrl-C does during a load."""
    endpoint.gate.clear()
    client = HttpClient(url)
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(client.load, "m")
        try:
            assert endpoint.asked.wait(PATIENCE_S)
            client.close()
            assert isinstance(load.exception(PATIENCE_S), ConnectionLost)
        finally:
            endpoint.gate.set()


def test_models_of_a_chat_are_completed(url: str) -> None:
    assert completion.models(parser().parse_args(["chat", "x", "--url", url])) == ["m"]
