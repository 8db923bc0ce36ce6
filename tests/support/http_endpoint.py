"""HTTP servers in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

E = TypeVar("E", bound="Endpoint")


class QuietServer(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores errors, because tests kill clients of this server."""


class Endpoint:
    """A server that can be down, and up again on the same port. While `gate` is clear, its responses wait."""

    def __init__(self, handler: Callable[..., BaseHTTPRequestHandler] | None = None) -> None:
        """Without a handler, `handle` gets the requests."""
        self.port = 0
        self.gate = threading.Event()
        self.gate.set()
        self._server: ThreadingHTTPServer | None = None
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.close_connection = True
                endpoint.handle(self)

            do_HEAD = do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self._handler = handler or Handler

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        raise NotImplementedError

    def listen(self) -> None:
        self._server = QuietServer(("127.0.0.1", self.port), self._handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        """Closes the socket: from now on connections are refused."""
        if self._server is not None:
            self.gate.set()
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None

    def __enter__(self: E) -> E:
        self.listen()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def web_server(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    with Endpoint(handler) as endpoint:
        yield f"http://127.0.0.1:{endpoint.port}"
