"""The head of an HTTP request -> an HttpHead. Invariant: a request whose body length is ambiguous is refused. The
gateway never interprets a message that a proxy in front of it could frame differently (request smuggling).

Clients repeat heads byte for byte, so parsed heads are cached.
"""

from __future__ import annotations

import re

import httptools
from msgspec import Struct

from shmserve.errors import ServeError
from shmserve.gateway.auth.access import EndpointAccess, Unauthenticated
from shmserve.gateway.auth.actions import FORMS, PAGE, TO_MODELS, UPLOADS
from shmserve.gateway.auth.browsers import BROWSER_HEADERS
from shmserve.gateway.auth.header_forwarding import HeaderParameters
from shmserve.gateway.http.limits import HEAD_WORK, HEADERS, LINE_WORK
from shmserve.gateway.http.routes import API_ROUTES, QUERY, NoRoute, RouteTable, resolve
from shmserve.gateway.limits.backlog import REQUEST_WORK
from shmserve.gateway.limits.bounded_cache import BoundedCache
from shmserve.gateway.limits.proxies import named_in
from shmserve.gateway.openai.errors import KIND as OPENAI
from shmserve.gateway.upstream.documents import Route
from shmserve.protocol.actions import Action

_CACHED_HEADS = 1024
_CACHED_BYTES = 2048
_ENCODINGS = ("gzip", "deflate")
Headers = list[tuple[bytes, bytes]]
_HOST = re.compile(rb"[A-Za-z0-9._~%!$&'()*+,;=:\[\]-]*")
_FRAMING = frozenset(
    (b"host", b"content-length", b"transfer-encoding", b"inference-header-content-length", b"content-encoding")
)
"""Headers that may occur only once: of several, a proxy could use a different one than the gateway does."""
_NO_ROUTE = Route(Action.NONE)
_NO_OPENAI_ROUTE = Route(Action.NONE, kind=OPENAI)
_OPENAI_PREFIX = "/v1/"


class HttpHead(Struct):
    """The head of one request. Shared by requests with equal bytes: never modify it."""

    route: Route
    keep_alive: bool
    length: int = 0
    """Bytes of the body; 0 if it is chunked."""
    chunked: bool = False
    json_length: int | None = None
    """Inference-Header-Content-Length: bytes of JSON at the start of the body; binary data follows."""
    has_form: bool = False
    """The body is a form with files."""
    encoding: str = ""
    """Content-Encoding of the body: gzip, deflate, an unsupported one, or none."""
    accepts: str = ""
    """Encoding to compress the response with: gzip, deflate or none."""
    old: bool = False
    """HTTP/1.0, which has no chunked encoding."""
    is_head: bool = False
    """Method HEAD: send the response headers only."""
    expects: bool = False
    """The client waits for 100 Continue before it sends the body."""
    token: str = ""
    """Name of the token that the request was authenticated with."""
    caller: str = ""
    """What a proxy says about its caller."""
    refusal: NoRoute | ServeError | None = None
    """Set if there is no route or access is denied."""
    forwarded: dict[str, str] | None = None
    """Headers to pass on to the model."""
    by_browser: bool = False
    """The request has a header that identifies a browser."""
    etags: str = ""
    """If-None-Match."""
    roles: frozenset[str] = frozenset()
    """Roles of the client; only set if the response depends on them: for the web page, and queries of clients."""
    reader: str = ""
    """The origin of another server whose page may read the response."""
    work: int = 0
    """The work for the request (limits/backlog.py) without its body."""
    body_work: int = 0
    """The work to parse the body."""


NO_HEAD = HttpHead(Route(Action.NONE), keep_alive=False)
"""The head of a request that cannot be read."""


class BadHead(Exception):
    """The end of this request cannot be determined; the connection cannot be used again."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class _Lines:
    """Callbacks of the HTTP parser, which it owns."""

    def __init__(self) -> None:
        self.target = b""
        self.headers: Headers = []
        self.complete = False
        self.keep_alive = False
        self.parser = httptools.HttpRequestParser(self)

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))
        if len(self.headers) > HEADERS:
            raise BadHead(431, f"the request has more than {HEADERS} headers")

    def on_headers_complete(self) -> None:
        self.complete = True
        self.keep_alive = self.parser.should_keep_alive()  # the parser resets this at the end of a request


class HttpHeads:
    """Parser and cache of heads. `routes`: the table of the endpoint."""

    def __init__(
        self, access: EndpointAccess, routes: RouteTable = API_ROUTES, forward: HeaderParameters | None = None
    ) -> None:
        self._routes = routes
        self._access = access
        self._forward = forward
        self._cache: BoundedCache[bytes, HttpHead] = BoundedCache(_CACHED_HEADS)

    def head(self, block: bytes) -> HttpHead:
        """`block`: the bytes of the head, including the empty line."""
        head = self._cache.get(block)
        if head is None:
            head = parse(block, self._routes, self._access, self._forward)
            if len(block) <= _CACHED_BYTES and not isinstance(head.refusal, Unauthenticated):
                self._cache.put(block, head)
        return head

    def forget(self) -> None:
        """Clears the cache, after access rules have changed."""
        self._cache.clear()


def parse(
    block: bytes,
    routes: RouteTable = API_ROUTES,
    access: EndpointAccess | None = None,
    forward: HeaderParameters | None = None,
) -> HttpHead:
    if block.count(b"\n") != block.count(b"\r\n") or block.count(b"\r") != block.count(b"\r\n"):
        raise BadHead(400, "the lines of the request do not end as HTTP requires")
    if block[: block.find(b"\r\n")].count(b" ") > 2:  # the parser accepts repeated spaces
        raise BadHead(400, "the first line of the request is not METHOD PATH HTTP/1.1")
    lines = _Lines()
    parser = lines.parser
    try:
        parser.feed_data(block)
    except httptools.HttpParserUpgrade:
        pass  # Upgrade is ignored: the connection stays on HTTP/1.1
    except httptools.HttpParserError as error:
        cause = error.__context__
        if isinstance(cause, BadHead):
            raise cause from None
        raise BadHead(400, f"the request is not valid HTTP: {error}") from None
    method, http = parser.get_method().decode("ascii"), parser.get_http_version()
    if not lines.complete or method == "CONNECT":
        raise BadHead(400, "the request is not valid HTTP")
    if http not in ("1.1", "1.0"):
        raise BadHead(505, "only HTTP/1.1 is supported")
    head = _head(method, http, _path(lines.target), lines.headers, lines.keep_alive, routes)
    if head.refusal is None and (access is not None or forward is not None):
        _guard(head, lines.headers, access, forward)
    head.work = work_of(block)
    head.body_work = (head.length if head.json_length is None else min(head.json_length, head.length)) // HEAD_WORK
    return head


def work_of(block: bytes) -> int:
    """The work for a request with this head (limits/backlog.py)."""
    return REQUEST_WORK + len(block) // HEAD_WORK + block.count(b"\n") // LINE_WORK


def _guard(head: HttpHead, headers: Headers, access: EndpointAccess | None, forward: HeaderParameters | None) -> None:
    def header(name: str) -> str | None:
        raw = name.encode()
        values = [_text(value).strip() for written, value in headers if written.lower() == raw]
        return ", ".join(values) if values else None

    try:
        if access is not None:
            action = head.route.action
            if action in PAGE:
                head.reader = access.browsers.reader(action, header)  # also for a refusal
            if head.by_browser or action in PAGE:
                access.browsers.check(action, header)
            head.token = access.check(action, header)
            if action in PAGE or head.route.kind == QUERY:
                head.roles = access.roles(header)
        head.caller = named_in(header)
        if forward is not None and head.route.action in TO_MODELS and forward.active:
            head.forwarded = forward.of([(_text(name), _text(value).strip()) for name, value in headers])
    except ServeError as error:
        head.refusal = error.with_traceback(None)  # the head is cached: do not keep the frames alive


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _path(target: bytes) -> str:
    try:
        text = target.decode("ascii")
        if not text.startswith("/"):
            text = (httptools.parse_url(target).path or b"/").decode("ascii")
    except (UnicodeDecodeError, httptools.HttpParserError):
        raise BadHead(400, "the request has no path") from None
    return text


def _head(method: str, http: str, target: str, headers: Headers, keep_alive: bool, routes: RouteTable) -> HttpHead:
    route = resolve(method, target, routes)
    no_route = _NO_OPENAI_ROUTE if target.startswith(_OPENAI_PREFIX) else _NO_ROUTE
    head = HttpHead(
        no_route if isinstance(route, NoRoute) else route,
        keep_alive and http == "1.1",
        old=http == "1.0",
        is_head=method == "HEAD",
        refusal=route if isinstance(route, NoRoute) else None,
        has_form=isinstance(route, Route) and route.action in FORMS,
    )
    seen: set[bytes] = set()
    for written, value in headers:
        name = written.lower()
        if name in _FRAMING:
            if name in seen:
                raise BadHead(400, f"the request has more than one header {name.decode()}")
            seen.add(name)
        elif name.replace(b"_", b"-") in _FRAMING:  # some proxies treat `_` and `-` as equal
            raise BadHead(400, f"the request has the header {name.decode('latin-1')}")
        elif name in BROWSER_HEADERS:
            head.by_browser = head.by_browser or not _is_of_node(name, value, headers)
        match name:
            case b"host":
                if _HOST.fullmatch(value.strip(b" \t")) is None:
                    raise BadHead(400, "the header host is not HOST or HOST:PORT")
            case b"content-length":
                head.length = _number(name, value)
            case b"transfer-encoding":
                if value.strip().lower() != b"chunked":
                    raise BadHead(501, "the only supported transfer encoding is chunked")
                head.chunked = True
            case b"inference-header-content-length":
                head.json_length = _number(name, value)
            case b"content-type":
                is_form = value.strip().lower().startswith(b"multipart/form-data")
                head.has_form = head.has_form or (is_form and head.route.action in UPLOADS)
            case b"content-encoding":
                head.encoding = _encoding(value)
            case b"accept-encoding":
                head.accepts = head.accepts or _accepted(value)
            case b"if-none-match":
                head.etags = _text(value)
            case b"expect":
                if value.strip().lower() != b"100-continue":
                    raise BadHead(417, "the only supported expectation is 100-continue")
                head.expects = http == "1.1"
    if b"host" not in seen and http == "1.1":
        raise BadHead(400, "the request has no host header, which HTTP/1.1 requires")
    if head.chunked and (b"content-length" in seen or http == "1.0"):
        raise BadHead(400, "the request has conflicting body lengths")
    return head


def _number(name: bytes, value: bytes) -> int:
    digits = value.strip(b" \t")
    if not digits.isdigit() or len(digits) > 18:
        raise BadHead(400, f"the value of {name.decode()} is not a number of bytes")
    return int(digits)


def _is_of_node(name: bytes, value: bytes, headers: Headers) -> bool:
    """Node's fetch sends Accept-Language too, and Sec-Fetch-Mode, which a page in a browser cannot add: a browser sends
    it itself, together with Sec-Fetch-Site."""
    if name != b"accept-language" or value.strip() != b"*":
        return False
    return any(other.lower() == b"sec-fetch-mode" for other, _ in headers)


def _encoding(value: bytes) -> str:
    text = value.strip().lower().decode("latin-1")
    return "" if text == "identity" else text


def _accepted(value: bytes) -> str:
    """The first of gzip and deflate in Accept-Encoding whose quality is not 0, or ""."""
    for part in value.lower().decode("latin-1").split(","):
        name, _, quality = part.partition(";")
        if name.strip() in _ENCODINGS and quality.replace(" ", "").rstrip("0.") != "q=":
            return name.strip()
    return ""
