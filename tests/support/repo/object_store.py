"""A real S3 server (moto) as a process, and a proxy in front of it that cuts, delays, changes or refuses responses."""

from __future__ import annotations

import http.client
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import quote

from tests.support.http_endpoint import Endpoint
from tests.support.patience import PATIENCE_S

SECRET = "wJalrXUtnFEMIsecretK7MDENG"
KEY_ID = "AKIAIOSFODNN7TESTING"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"}
BUCKET = "models"
_PROGRAM = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""

Rule = Callable[[str, str], str]
"""(method, path) -> pass, cut (half of the body), flip (a byte of the body) or refuse (status 503)."""


class ObjectStore:
    """The bucket `models` of the server at `port`."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._request("PUT", f"/{BUCKET}")

    def put(self, key: str, data: bytes | str) -> None:
        self._request("PUT", f"/{BUCKET}/{quote(key)}", data.encode() if isinstance(data, str) else data)

    def put_model(self, repository: str, folder: Path) -> None:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(f"{repository}/{folder.name}/{path.relative_to(folder)}", path.read_bytes())

    def delete(self, key: str) -> None:
        self._request("DELETE", f"/{BUCKET}/{quote(key)}")

    def _request(self, method: str, path: str, body: bytes = b"") -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            # moto does not check signatures, but takes the region and the service from them.
            scope = f"Credential={KEY_ID}/20260101/us-east-1/s3/aws4_request"
            headers = {"Authorization": f"AWS4-HMAC-SHA256 {scope}, SignedHeaders=host, Signature=0"}
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            text = answer.read()
            assert answer.status < 300, (method, path, answer.status, text[:500])
        finally:
            connection.close()


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    command = [sys.executable, "-c", _PROGRAM]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            port = next(int(line) for line in process.stdout if line.strip().isdigit())
            yield ObjectStore(port)
        finally:
            process.stdin.close()
            process.wait(PATIENCE_S)


class Proxy(Endpoint):
    """`rule` decides about each request; `requests` has the requests that have begun. While `gate` is clear, responses
    for objects with `holds(path)` wait, and `held` is set."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._target = port
        self.rule: Rule = lambda method, path: "pass"
        self.holds: Callable[[str], bool] = lambda path: False
        self.held = threading.Event()
        self.requests: list[tuple[str, str, dict[str, str]]] = []

    @property
    def url(self) -> str:
        """The url of the repository `repo` in the bucket."""
        return f"s3://127.0.0.1:{self.port}/{BUCKET}/repo"

    def reset(self) -> None:
        self.rule, self.holds = lambda method, path: "pass", lambda path: False
        self.gate.set()
        self.held.clear()
        self.requests.clear()

    def ranges(self, part: str) -> list[str]:
        """The ranges that were requested of objects whose path contains this."""
        return [headers["range"] for method, path, headers in self.requests if part in path and "range" in headers]

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path
        self.requests.append((handler.command, path, {name.lower(): text for name, text in handler.headers.items()}))
        if not self.gate.is_set() and self.holds(path):
            self.held.set()
            self.gate.wait(PATIENCE_S)
        what = self.rule(handler.command, path)
        if what == "refuse":
            handler.send_error(503)
            return
        connection = http.client.HTTPConnection("127.0.0.1", self._target, timeout=PATIENCE_S)
        try:
            connection.request(handler.command, path, headers=dict(handler.headers.items()))
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        if what == "flip" and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        handler.send_response(answer.status)
        for name, text in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                handler.send_header(name, text)
        length = answer.getheader("Content-Length") if handler.command == "HEAD" else str(len(body))
        handler.send_header("Content-Length", length or "0")
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(body[: len(body) // 2] if what == "cut" else body)
