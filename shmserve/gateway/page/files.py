"""The files of the web page, read once. They contain no data, so they are the same for every viewer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

FOLDER = Path(__file__).parent / "static"
INDEX = "index.html"
_KINDS = {
    ".css": b"text/css; charset=utf-8",
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".png": b"image/png",
    ".svg": b"image/svg+xml",
}
_POLICY = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self' blob: data:",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",
    "trusted-types 'none'",
)
_CONFINED = (
    b"X-Content-Type-Options: nosniff\r\n"
    b"X-Frame-Options: DENY\r\n"
    b"Referrer-Policy: same-origin\r\n"
    b"Cross-Origin-Opener-Policy: same-origin\r\n"
    b"Cross-Origin-Resource-Policy: same-origin\r\n"
)


def confinement(servers: Iterable[str] = ()) -> bytes:
    """Headers of all responses of the page. The page runs only its own code, connects to no hosts but these servers,
    and cannot be shown in a frame. Pages of other origins cannot use its files. Trusted types forbid it to parse text
    as HTML."""
    policy = (*_POLICY, " ".join(("connect-src 'self'", *servers)))
    return b"Content-Security-Policy: " + "; ".join(policy).encode() + b"\r\n" + _CONFINED


class PageFile(Struct, frozen=True):
    kind: bytes
    body: bytes
    etag: str


class PageFiles:
    def __init__(self, folder: Path = FOLDER) -> None:
        self._files = {
            path.relative_to(folder).as_posix(): _read(path)
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.suffix in _KINDS
        }

    def find(self, name: str) -> PageFile | None:
        """`name`: a path relative to the folder; "": the page itself."""
        return self._files.get(name or INDEX)


def _read(path: Path) -> PageFile:
    body = path.read_bytes()
    return PageFile(_KINDS[path.suffix], body, f'"{hashlib.sha256(body).hexdigest()[:32]}"')
