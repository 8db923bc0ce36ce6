"""A saved run: the plan, and for each load the windows, the latencies and the server's counts; as JSON.

Times are in ns. A histogram is an HDR histogram in its standard compressed form (V2, base64).
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from shmserve.errors import InvalidRequest
from shmserve.tools.load.plan import Load, LoadPlan

FORMAT = 1


class Interval(Struct, frozen=True):
    """A mean and its confidence interval."""

    mean: float
    low: float
    high: float

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2


class LoadWindow(Struct, frozen=True, kw_only=True):
    """The responses that arrived in `length_ns` from `start_ns` after the start of the load."""

    start_ns: int
    length_ns: int
    good: int
    """Number of successful responses."""
    failed: int
    late: int = 0
    """Number of successful responses after the deadline."""
    mean_ns: float = 0.0
    percentiles: dict[str, float] = {}
    """Latency in ns: "p50", "p99", ..."""

    @property
    def per_s(self) -> float:
        return self.good * 1e9 / self.length_ns

    @property
    def in_time_per_s(self) -> float:
        return (self.good - self.late) * 1e9 / self.length_ns


class Latencies(Struct, frozen=True, kw_only=True):
    """Latencies of successful responses."""

    count: int
    mean: float
    low: float
    high: float
    percentiles: dict[str, Interval]
    histogram: str


class Language(Struct, frozen=True, kw_only=True):
    """What a language model did in successful requests. Tokens are counted by the server."""

    prompt_per_s: Interval
    output_per_s: Interval
    """Tokens of the requests that ended per second."""
    prompt_tokens: float
    output_tokens: float
    """Mean number of tokens of a request."""
    between_tokens: Latencies
    """For each request, the mean time between its tokens after the first."""
    good: Interval | None = None
    """Successful requests per second that met all objectives."""


class ServerSide(Struct, frozen=True, kw_only=True):
    """The server's counts during the load. Times are means per successful request, in ns."""

    requests: int
    failed: int
    batches: int
    rows: int
    parts: dict[str, float]
    """queue, gather, compute, scatter."""
    batch_sizes: dict[str, int] = {}
    reasons: dict[str, int] = {}
    """Why batches were formed -> how often. Only shmserve counts this."""

    @property
    def mean_batch(self) -> float:
        return self.rows / self.batches if self.batches else 0.0


class MachineUsage(Struct, frozen=True, kw_only=True):
    """Processor use in cores: of the machine, and of the server's processes if they run on it. GPUs from NVML."""

    machine: float
    server: dict[str, float] = {}
    """Role, e.g. broker, gateway, model -> cores."""
    gpus: dict[str, float] = {}
    """GPU -> utilization from 0 to 1."""
    gpu_bytes: dict[str, int] = {}


class Cost(Struct, frozen=True, kw_only=True):
    """The generator's own resource use, and how precisely it sent."""

    processes: int
    cores: float
    """Processor use of all generator processes together."""
    busiest: float
    """Processor use of the busiest process. Near 1, the generator is the bottleneck."""
    request_ns: float
    """CPU time of the generator per request."""
    send_delay_p50_ns: float = 0.0
    send_delay_p99_ns: float = 0.0
    """Open loop: how late requests were sent. Their latency includes this."""


class Point(Struct, frozen=True, kw_only=True):
    """The result for one load, from the windows `used[0]` to `used[1] - 1`."""

    load: Load
    windows: tuple[LoadWindow, ...]
    timeline: tuple[LoadWindow, ...] = ()
    """Parts of the windows, for charts."""
    used: tuple[int, int]
    stable: bool
    note: str
    throughput: Interval
    """Successful responses per second."""
    goodput: Interval | None = None
    """Successful responses per second within the deadline."""
    rows: float = 1
    """Mean number of rows per request: throughput times rows is the rate of inferences."""
    latency: Latencies
    failed: int = 0
    """Includes requests that were never answered."""
    errors: dict[str, int] = {}
    first_answer: Latencies | None = None
    between_answers: Latencies | None = None
    answers_per_s: float = 0.0
    language: Language | None = None
    server: ServerSide | None = None
    usage: MachineUsage | None = None
    cost: Cost

    @property
    def value(self) -> float:
        return self.load.value


class EchoResult(Struct, frozen=True, kw_only=True):
    """The generator's own limit, measured against an echo server of the same protocol."""

    protocol: str
    per_s: float
    """Responses per second of one generator process."""
    request_ns: float
    """CPU time of the generator per request."""
    p50_ns: float


class SavedRun(Struct, frozen=True, kw_only=True):
    format: int = FORMAT
    created: str
    plan: LoadPlan
    server: dict[str, str]
    """Name and version from the server's metadata."""
    machine: dict[str, str]
    points: tuple[Point, ...]
    best: float | None = None
    """With a limit: the highest load that kept the limit."""
    undecided: float | None = None
    """With a limit: the load at which the search ended because there were too few responses to tell whether it kept the
    limit."""
    echo: EchoResult | None = None


def encode(run: SavedRun) -> bytes:
    return msgspec.json.format(msgspec.json.encode(run), indent=1)


def read(path: Path) -> SavedRun:
    try:
        run = msgspec.json.decode(path.read_bytes(), type=SavedRun)
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} is not a saved run of `shmserve bench`: {error}") from error
    if run.format != FORMAT:
        raise InvalidRequest(f"{path} has format {run.format}; this version reads format {FORMAT}")
    return run
