"""Defines what a run measures: the endpoint, the loads, the requests, and when a result is stable.

Invariant: a plan is plain data; it is sent to the generator processes and saved with the run.
"""

from __future__ import annotations

from msgspec import Struct

from shmserve.errors import InvalidRequest

SECOND = 1_000_000_000

NATIVE, HTTP, GRPC = "native", "http", "grpc"
_KINDS = {"http": HTTP, "https": HTTP, "grpc": GRPC, "grpcs": GRPC}
_SECURE = ("https", "grpcs")
SCHEMES = ("unix", "ipc", "tcp", *_KINDS)
PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9, 99.99)


class Endpoint(Struct, frozen=True, kw_only=True):
    """A server. `url` is a url for shmserve.Client, or http, https, grpc or grpcs://HOST:PORT; None: the server of
    `runtime_dir`, or this user's server.
    """

    url: str | None = None
    runtime_dir: str | None = None
    server_key: str | None = None
    key_file: str | None = None
    memory: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    """Sent with each request over HTTP and gRPC, e.g. a token. They are not part of a saved run."""
    ca: str | None = None
    """With TLS: a file with the trusted authorities; None: those of the system."""
    client_cert: str | None = None
    client_key: str | None = None
    """With TLS: files with the client's certificate and its key; None: no certificate, or the key is in the same file.
    """

    @property
    def scheme(self) -> str:
        return (self.url or "unix://").partition("://")[0]

    @property
    def kind(self) -> str:
        return _KINDS.get(self.scheme, NATIVE)

    @property
    def is_secure(self) -> bool:
        """Whether it is an HTTP or gRPC endpoint with TLS."""
        return self.scheme in _SECURE

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of an HTTP or gRPC endpoint."""
        host, separator, port = (self.url or "").partition("://")[2].rstrip("/").rpartition(":")
        if not separator or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise InvalidRequest(f"invalid url {self.url!r}: expected {self.scheme}://HOST:PORT")
        return host.strip("[]"), int(port)

    @property
    def authority(self) -> str:
        """Host and port as in a URL: an IPv6 address has brackets."""
        host, port = self.address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def origin(self) -> str:
        return f"{self.scheme}://{self.authority}"

    def __str__(self) -> str:
        return self.url or self.runtime_dir or "this user's server"


class Closed(Struct, frozen=True, tag="closed"):
    """A closed loop: each of `concurrency` callers sends its next request after the response to the last one."""

    concurrency: int

    @property
    def value(self) -> float:
        return self.concurrency

    def __str__(self) -> str:
        return f"concurrency {self.concurrency}"


class Open(Struct, frozen=True, tag="open"):
    """An open loop: `rate` requests per second, even if the server cannot keep up."""

    rate: float
    arrivals: str = "poisson"
    seed: int = 0

    @property
    def value(self) -> float:
        return self.rate

    def __str__(self) -> str:
        return f"{self.rate:,.6g}/s {self.arrivals}"


class Replay(Struct, frozen=True, tag="replay"):
    """An open loop with recorded send times, in ns since its start. After the last one, the recording is repeated."""

    times: tuple[int, ...]
    name: str = ""

    @property
    def value(self) -> float:
        return self.rate

    @property
    def period(self) -> int:
        """The time after which the recording is repeated: its end, plus one mean gap."""
        span = self.times[-1] - self.times[0]
        return span + max(1, span // max(1, len(self.times) - 1))

    @property
    def rate(self) -> float:
        return len(self.times) * SECOND / self.period

    def __str__(self) -> str:
        return f"recorded times{f' of {self.name}' if self.name else ''} ({self.rate:,.6g}/s)"


Load = Closed | Open | Replay


class Limit(Struct, frozen=True):
    """The search: the highest load from `low` to `high` whose latency percentile does not exceed `ns`."""

    percentile: float
    ns: int
    low: float = 1
    high: float = 1024
    resolution: float = 0.05
    """Relative width at which the search ends."""

    def __str__(self) -> str:
        return f"p{self.percentile:g} <= {self.ns / 1e6:g} ms"


class Inputs(Struct, frozen=True, kw_only=True):
    """The inputs of the requests: NAME=VALUE and NAME=@FILE texts, or a JSON file or directory; random for the rest."""

    texts: tuple[str, ...] = ()
    data: str | None = None
    batch: int | None = None
    shapes: tuple[str, ...] = ()
    seed: int = 0
    distinct: int = 16
    """Number of distinct requests, if all inputs are random."""
    outputs: tuple[str, ...] = ()
    """Outputs to request; empty: all."""


class Sequences(Struct, frozen=True):
    """Requests are parts of `count` sequences at a time of `length` requests each."""

    count: int
    length: int


class Settings(Struct, frozen=True, kw_only=True):
    """When a result counts. A window is extended beyond `window_ns` until it has `least` responses, up to 10 times its
    length."""

    warmup_ns: int = SECOND
    window_ns: int = SECOND
    min_windows: int = 3
    max_windows: int = 10
    least: int = 30
    tolerance: float = 0.05
    """A result is stable if the half-width of the confidence interval of throughput and latency is at most this share
    of the mean."""
    confidence: float = 0.95
    percentile: float = 50.0
    """The latency that must be stable; one of PERCENTILES."""


class Plan(Struct, frozen=True, kw_only=True):
    """A whole run. With `limit`, `loads` has one entry, which defines what is varied."""

    model: str
    version: str = ""
    endpoint: Endpoint = Endpoint()
    loads: tuple[Load, ...] = (Closed(1),)
    limit: Limit | None = None
    inputs: Inputs = Inputs()
    stream: bool = False
    sequences: Sequences | None = None
    deadline_ns: int = 0
    """Sent with each request; 0: none. A later response does not count as goodput."""
    settings: Settings = Settings()
    processes: int = 0
    """Generator processes; 0: one, or more if one cannot generate the load."""
    in_flight: int = 4096
    """Maximum number of requests in flight in an open loop. Further ones are delayed, and their latency includes the
    delay."""
