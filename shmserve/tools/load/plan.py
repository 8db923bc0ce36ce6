"""Defines what a run measures: the endpoint, the loads, the requests, and when a result is stable.

Invariant: a plan is plain data; it is sent to the generator processes and saved with the run.
"""

from __future__ import annotations

from random import Random

from msgspec import Struct, structs

from shmserve.errors import InvalidRequest

SECOND = 1_000_000_000

NATIVE, HTTP, GRPC, OPENAI = "native", "http", "grpc", "openai"
_KINDS = {"http": HTTP, "https": HTTP, "grpc": GRPC, "grpcs": GRPC}
_PORTS = {"http": ":80", "https": ":443"}
_SECURE = ("https", "grpcs")
SCHEMES = ("unix", "ipc", "tcp", *_KINDS)
PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9, 99.99)


def percentile_name(percentile: float) -> str:
    return f"p{percentile:g}"


class Endpoint(Struct, frozen=True, kw_only=True):
    """A server. `url` is a URL for shmserve.Client, or http, https, grpc or grpcs://HOST:PORT; None: the server of
    `runtime_dir`, or this user's server. `openai`: the URL is that of an OpenAI API, e.g. http://HOST:PORT/v1.
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
    openai: bool = False
    client_cert: str | None = None
    client_key: str | None = None
    """With TLS: files with the client's certificate and its key; None: no certificate, or the key is in the same file.
    """

    @property
    def scheme(self) -> str:
        return (self.url or "unix://").partition("://")[0]

    @property
    def kind(self) -> str:
        return OPENAI if self.openai else _KINDS.get(self.scheme, NATIVE)

    @property
    def has_port(self) -> bool:
        """Whether the protocol is HTTP or gRPC, so that there is an `address`."""
        return self.kind != NATIVE

    @property
    def is_secure(self) -> bool:
        """Whether it is an HTTP or gRPC endpoint with TLS."""
        return self.scheme in _SECURE

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of an HTTP or gRPC endpoint."""
        place = (self.url or "").partition("://")[2].rstrip("/")
        if self.openai:
            place = place.partition("/")[0]
            place += "" if place.rpartition(":")[2].isdecimal() else _PORTS.get(self.scheme, "")
        host, separator, port = place.rpartition(":")
        if not separator or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise InvalidRequest(f"invalid url {self.url!r}: expected {self.scheme}://HOST:PORT")
        return host.strip("[]"), int(port)

    @property
    def path(self) -> str:
        """The path of an OpenAI API, /v1 unless the URL has another one."""
        _, slash, path = (self.url or "").partition("://")[2].rstrip("/").partition("/")
        return slash + path or "/v1"

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


class ClosedLoop(Struct, frozen=True, tag="closed"):
    """A closed loop: each of `concurrency` callers sends its next request after the response to the last one."""

    concurrency: int

    @property
    def value(self) -> float:
        return self.concurrency

    def __str__(self) -> str:
        return f"concurrency {self.concurrency}"


class OpenLoop(Struct, frozen=True, tag="open"):
    """An open loop: `rate` requests per second, even if the server cannot keep up."""

    rate: float
    arrivals: str = "poisson"
    seed: int = 0

    @property
    def value(self) -> float:
        return self.rate

    def __str__(self) -> str:
        return f"{self.rate:,.6g}/s {self.arrivals}"


class ReplayLoop(Struct, frozen=True, tag="replay"):
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


Load = ClosedLoop | OpenLoop | ReplayLoop


class LatencyLimit(Struct, frozen=True):
    """The search: the highest load from `low` to `high` whose latency percentile does not exceed `ns`."""

    percentile: float
    ns: int
    low: float = 1
    high: float = 1024
    resolution: float = 0.05
    """Relative width at which the search ends."""

    def __str__(self) -> str:
        return f"{percentile_name(self.percentile)} <= {self.ns / 1e6:g} ms"


class RequestInputs(Struct, frozen=True, kw_only=True):
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


class Lengths(Struct, frozen=True):
    """Lengths in tokens: equally distributed from `low` to `high`, or, with a `deviation`, normally around their middle
    and cut off at both."""

    low: int
    high: int
    deviation: float = 0.0

    def draw(self, random: Random) -> int:
        if not self.deviation:
            return random.randint(self.low, self.high)
        return min(self.high, max(self.low, round(random.gauss((self.low + self.high) / 2, self.deviation))))


CHAT, COMPLETIONS = "chat", "completions"
DEFAULT_PROMPT, DEFAULT_OUTPUT = Lengths(128, 128), 128


class PromptPlan(Struct, frozen=True, kw_only=True):
    """What a language model is asked: the prompts of a file, or random words."""

    api: str = CHAT
    file: str | None = None
    words: Lengths = DEFAULT_PROMPT
    """Lengths of random prompts."""
    output: Lengths | None = None
    """`max_tokens` of the requests; None: those of the file, or DEFAULT_OUTPUT."""
    sampling: str = "{}"
    """A JSON object with other parameters of the requests."""
    seed: int = 0
    distinct: int = 1000
    """Number of random prompts."""


class Objectives(Struct, frozen=True):
    """Maximum times of a request, in ns; 0: any."""

    ttft: int = 0
    """To the first token."""
    itl: int = 0
    """Mean time between the tokens after it."""
    e2e: int = 0
    """To the end."""

    def __str__(self) -> str:
        return ", ".join(f"{name} <= {ns / 1e6:g} ms" for name, ns in structs.asdict(self).items() if ns)


class Sequences(Struct, frozen=True):
    """Requests are parts of `count` sequences at a time of `length` requests each."""

    count: int
    length: int


class MeasureSettings(Struct, frozen=True, kw_only=True):
    """When a result counts. A window is extended beyond `window_ns`, up to 10 times its length, until it has
    `min_responses` responses."""

    warmup_ns: int = SECOND
    window_ns: int = SECOND
    min_windows: int = 3
    max_windows: int = 10
    min_responses: int = 30
    tolerance: float = 0.05
    """A result is stable if the half-width of the confidence interval of throughput and latency is at most this share
    of the mean."""
    confidence: float = 0.95
    percentile: float = 50.0
    """The latency that must be stable; one of PERCENTILES."""


class LoadPlan(Struct, frozen=True, kw_only=True):
    """A whole run. With `limit`, `loads` has one entry, which defines what is varied."""

    model: str
    version: str = ""
    endpoint: Endpoint = Endpoint()
    loads: tuple[Load, ...] = (ClosedLoop(1),)
    limit: LatencyLimit | None = None
    inputs: RequestInputs = RequestInputs()
    prompts: PromptPlan | None = None
    """For a language model, instead of `inputs`."""
    objectives: Objectives | None = None
    """For a language model: requests that meet all of them count as good."""
    stream: bool = False
    sequences: Sequences | None = None
    deadline_ns: int = 0
    """Sent with each request; 0: none. A later response does not count as goodput."""
    settings: MeasureSettings = MeasureSettings()
    processes: int = 0
    """Generator processes; 0: one, or more if one cannot generate the load."""
    in_flight: int = 4096
    """Maximum number of requests in flight in an open loop. Further ones are delayed, and their latency includes the
    delay."""
