"""A repository on a web server: directory listings in JSON (as nginx writes them) or HTML, and plain GET requests.

The tag of a file is its ETag, or its time and size; a file without both has none. Every answer with content must have
the tag of the listing.

Invariant: credentials are sent only to the origin of the repository's address. aiohttp would send those of the session,
and those that it finds itself in ~/.netrc, to wherever a redirect leads.
"""

from __future__ import annotations

import asyncio
import html
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from types import MappingProxyType
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from fsspec.asyn import sync
from fsspec.implementations.http import HTTPFileSystem
from yarl import URL

from shmserve.repo.remote.address import RemoteAddress
from shmserve.repo.remote.credentials import Redactor
from shmserve.repo.remote.stores import (
    CONNECT_S,
    MAX_FILES,
    READ_S,
    Changed,
    Missing,
    NoRanges,
    RemoteFile,
    Store,
    StoreError,
    checked,
)

LISTING_BYTES = 16 << 20
_LEVELS = 16
_AT_ONCE = 8
_CHUNK = 1 << 20
_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_REDIRECTS = 10
_MISSING = (404, 410)
_FINAL = (401, 403)
_NO_SUCH_RANGE = 416
_CHARSETS = ("iso-8859-1", "iso-8859-15", "utf-8", "windows-1252")
"""The encodings of listings. Python has decoders that fail on or never finish what a server sends, such as punycode.
"""
_LINK = re.compile(r"""<a\s(?:[^<>]*?\s)?href\s*=\s*["']([^"'<>]+)["']""", re.IGNORECASE)


class HttpStore(Store):
    def __init__(self, address: RemoteAddress, redact: Redactor) -> None:
        super().__init__(address, redact)
        self._base = f"{address.endpoint}/{quote(address.path)}".rstrip("/")
        options = self._options
        self._auth = aiohttp.BasicAuth(options["login"], options["password"]) if options else None

    def _make(self) -> Any:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=READ_S)
        more: dict[str, Any] = {"timeout": timeout, "trust_env": False, "auto_decompress": False}
        return HTTPFileSystem(client_kwargs=more, skip_instance_cache=True, use_listings_cache=False)

    def models(self) -> list[str]:
        entries = self._run(self._entries(f"{self._base}/"))
        return sorted(name.rstrip("/") for name in entries if name.endswith("/"))

    def files(self, model: str) -> list[RemoteFile]:
        files: list[RemoteFile] = self._run(self._walk(model), model)
        if not files:
            raise Missing(f"the repository has no model '{model}'")
        return checked(model, files)

    def file(self, name: str) -> RemoteFile:
        entry: RemoteFile = self._run(self._head(name, f"{self._base}/{quote(name)}", asyncio.Semaphore()), name)
        return entry

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        data: bytes = self._run(self._get(file, start, end))
        return data

    def stream(self, file: RemoteFile, write: Callable[[bytes], None]) -> None:
        self._run(self._copy(file, write))

    def same_content(self, one: RemoteFile, other: RemoteFile) -> bool:
        return False

    # ------------------------------------------------------------------------------------ in the loop of fsspec

    def _run(self, work: Any, model: str = "") -> Any:
        return self._call(lambda: sync(self._fs.loop, _awaited, work), model)

    @asynccontextmanager
    async def _request(
        self, method: str, url: str, headers: Mapping[str, str] = MappingProxyType({})
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        session = await self._fs.set_session()
        sent = {"Accept-Encoding": "identity", **headers}
        here = URL(url)
        home = here.origin()
        for _ in range(_MAX_REDIRECTS + 1):
            auth = self._auth if here.origin() == home else None
            proxy, proxy_auth = _proxy_of(here)
            async with session.request(
                method, here, headers=sent, auth=auth, proxy=proxy, proxy_auth=proxy_auth, allow_redirects=False
            ) as answer:
                if answer.status not in _REDIRECTS or "Location" not in answer.headers:
                    if answer.status in _FINAL and here.origin() != home:
                        text = f"it redirects to {here.origin()}, which answered {answer.status}"
                        raise StoreError(f"{text} and gets no credentials for {home}", final=True)
                    self._check(answer)
                    yield answer
                    return
                here = redirected(here, answer.headers["Location"])
        raise StoreError(f"the web server sent more than {_MAX_REDIRECTS} redirects", final=True)

    async def _entries(self, url: str) -> list[str]:
        """The names in a directory; those of directories end with a slash."""
        async with self._request("GET", url) as answer:
            if answer.content_length is not None and answer.content_length > LISTING_BYTES:
                raise StoreError(f"the listing of a directory has more than {LISTING_BYTES} bytes", final=True)
            body = await _limited(answer, LISTING_BYTES)
            if answer.content_type == "application/json":
                return _of_json(body)
            if answer.content_type == "text/html" or "Content-Type" not in answer.headers:
                return of_html(body, answer.charset, url)
            return []

    async def _walk(self, model: str) -> list[RemoteFile]:
        files: list[tuple[str, str]] = []
        todo = [""]
        while todo:
            folder = todo.pop()
            for name in await self._entries(f"{self._base}/{quote(f'{model}/{folder}')}"):
                if name.startswith("."):
                    continue
                if name.endswith("/"):
                    if folder.count("/") > _LEVELS:
                        raise StoreError(f"'{model}' has more than {_LEVELS} levels of directories", final=True)
                    todo.append(folder + name)
                else:
                    files.append((folder + name, f"{self._base}/{quote(f'{model}/{folder}{name}')}"))
            if len(files) + len(todo) > MAX_FILES:
                raise StoreError(f"'{model}' has more than {MAX_FILES} files; is it a model?", final=True)
        limit = asyncio.Semaphore(_AT_ONCE)
        return list(await asyncio.gather(*(self._head(path, url, limit) for path, url in files)))

    async def _head(self, path: str, url: str, limit: asyncio.Semaphore) -> RemoteFile:
        async with limit, self._request("HEAD", url) as answer:
            length = answer.headers.get("Content-Length", "")
            return RemoteFile(path, url, int(length) if length.isdigit() else -1, _tag(answer.headers))

    async def _get(self, file: RemoteFile, start: int, end: int) -> bytes:
        async with self._request("GET", file.key, {"Range": f"bytes={start}-{end - 1}"}) as answer:
            if answer.status == _NO_SUCH_RANGE:
                raise Changed(f"{file.path} changed")
            _same(file, answer.headers)
            if answer.status != 206 and (start or end != file.size):
                raise NoRanges("the web server does not send parts of files")
            data = await _limited(answer, end - start)
        if len(data) != end - start:
            raise Changed(f"{file.path}: {len(data)} bytes instead of {end - start}")
        return data

    async def _copy(self, file: RemoteFile, write: Callable[[bytes], None]) -> None:
        async with self._request("GET", file.key) as answer:
            _same(file, answer.headers)
            async for chunk in answer.content.iter_chunked(_CHUNK):
                await asyncio.to_thread(write, chunk)  # which may wait for room in the cache

    def _check(self, answer: aiohttp.ClientResponse) -> None:
        if answer.status in _MISSING:
            raise FileNotFoundError(answer.status)
        if answer.status >= 400 and answer.status != _NO_SUCH_RANGE:
            text = f"the web server answered {answer.status} {self._redact(answer.reason or '')}"
            raise StoreError(text, final=answer.status in _FINAL)


def redirected(here: URL, location: str) -> URL:
    """Where a redirect leads. Raises StoreError if it must not be followed."""
    try:
        there = here.join(URL(location))
        origin = there.origin()
    except ValueError:
        raise StoreError("the web server redirects to what is not an address", final=True) from None
    if there.scheme not in ("http", "https") or (here.scheme, there.scheme) == ("https", "http"):
        text = f"the web server redirects from {here.scheme} to {there.scheme} ({origin}), which is not followed"
        raise StoreError(f"{text}; if it is right, give that address as the repository", final=True)
    return there.with_user(None)


def _proxy_of(url: URL) -> tuple[URL | None, aiohttp.BasicAuth | None]:
    """The proxy of the environment for this address, and its credentials."""
    address = getproxies().get(url.scheme)
    if not address or proxy_bypass(url.host or ""):
        return None, None
    proxy = URL(address)
    auth = aiohttp.BasicAuth(proxy.user, proxy.password or "") if proxy.user else None
    return proxy.with_user(None), auth


async def _awaited(work: Any) -> Any:
    return await work


async def _limited(answer: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    async for chunk in answer.content.iter_chunked(_CHUNK):
        pieces.append(chunk)
        size += len(chunk)
        if size > max_bytes:
            raise StoreError(f"the web server sent more than {max_bytes} bytes")
    return b"".join(pieces)


def _tag(headers: Mapping[str, str]) -> str:
    time = headers.get("Last-Modified")
    return headers.get("ETag") or (f"{time} {headers.get('Content-Length', '')}" if time else "")


def _same(file: RemoteFile, headers: Mapping[str, str]) -> None:
    """Raises Changed if the answer is of another version of the file."""
    if "ETag" in headers:
        is_same = headers["ETag"] == file.tag
    else:
        time = headers.get("Last-Modified")
        is_same = file.tag.startswith(f"{time} ") if time else not file.tag
    if not is_same:
        raise Changed(f"{file.path} changed")


def _of_json(body: bytes) -> list[str]:
    """A listing as by nginx's `autoindex_format json`."""
    try:
        entries = json.loads(body)
        names = [entry["name"] + ("/" if entry["type"] == "directory" else "") for entry in entries]
    except (ValueError, TypeError, KeyError):
        raise StoreError("a JSON listing is not a list of objects with name and type", final=True) from None
    return sorted(name for name in names if _is_name(name))


def of_html(body: bytes, charset: str | None, url: str) -> list[str]:
    """The names in a directory to which the page at this URL has links."""
    charset = (charset or "").lower()
    text = body.decode(charset if charset in _CHARSETS else "utf-8", "ignore")
    base, names = urlsplit(url), set()
    for href in _LINK.findall(text):
        with suppress(ValueError):  # it is not a URL
            link = urlsplit(urljoin(url, html.unescape(href)))
            if link.netloc == base.netloc and link.path.startswith(base.path) and not link.query:
                names.add(unquote(link.path[len(base.path) :]))
    return sorted(name for name in names if _is_name(name))


def _is_name(name: str) -> bool:
    """Whether it is that of an entry of this directory; listings have other links too."""
    return re.fullmatch(r"[^/\0]+/?", name) is not None and name.rstrip("/") not in (".", "..")
