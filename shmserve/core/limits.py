"""The core's limits: what each one protects, its default, and the reason for the default.

Invariant: a limit that --limit can set is a field of Limits and a row of NAMED, and is described only there; the table
in docs/security.md is generated from them.
"""

from __future__ import annotations

from msgspec import Struct

from shmserve.protocol.messages import FIELD_BYTES, PACKET_BYTES
from shmserve.settings.limits import Limit

SECOND = 1_000_000_000
"""In ns."""
PATIENCE_S = 1
"""Burst of protocol errors that is accepted at once, in seconds' worth of the permitted rate. Above it, the client is
throttled to the rate."""
BURST_S = 10
"""A client with this many seconds' worth of errors is disconnected."""
ANY_GPU = -1
"""In `Limits.gpu_budgets`: each GPU that has no entry."""


def pause_ns(deaths: int, second: int, limit: int) -> int:
    """Back-off before a restart after consecutive deaths: none after the first, then `second`, doubled each time up to
    `limit`."""
    return min(second << (deaths - 2), limit) if deaths > 1 else 0


class Limits(Struct, frozen=True):
    connections: int = 4096
    uid_connections: int = 1024
    requests: int = 65_536
    client_requests: int = 8192
    client_questions: int = 1024
    model_queue: int = 32_768
    model_queue_bytes: int = 256 << 20
    queue_bytes: int = 1 << 30
    held_bytes: int = 64 << 30
    client_held_bytes: int = 8 << 30
    client_input_bytes: int = 2 << 30
    segments: int = 16_384
    client_segments: int = 1024
    client_outbox_bytes: int = 64 << 20
    outbox_bytes: int = 256 << 20
    leases: int = 32
    client_errors: int = 100
    override_bytes: int = 1 << 30
    crashes: int = 3
    """Consecutive crashes of an instance, without a completed batch between them, after which it counts as broken:
    quarantined if other instances of its version completed batches in that time, lost otherwise. Models can override
    it; 0: never."""
    backoff_ns: int = 1_000_000_000
    """Delay before the second consecutive restart (the first is immediate); doubles up to backoff_max_ns."""
    backoff_max_ns: int = 60_000_000_000
    loading: int = 4
    """Instances that load at the same time. Loading takes CPU time and disk bandwidth from instances that serve."""
    load_retries: int = 0
    """How often a version that fails to load is retried, each time after backoff_ns."""
    execution_ns: int = 300_000_000_000
    """A longer batch counts as hung, and its worker is killed. Models can override it; 0: no limit."""
    load_ns: int = 1_800_000_000_000
    """A worker that takes longer to load is killed, and its load fails; 0: no limit."""
    rate_limit: bool = False
    """Instances run batches only while they hold their resources."""
    resources: tuple[tuple[str, int, int], ...] = ()
    """Available resources: name, device (rate_limiter.SHARED, rate_limiter.ANY), count."""
    cache_bytes: int = 0
    """Size of the response cache, for models that use it; 0: no cache."""
    leaving_ns: int = 30_000_000_000
    """Grace period for the sequences of a version that is no longer served."""
    exit_ns: int = 30_000_000_000
    """Grace period for running batches of an instance that was restarted; then it is killed."""
    idle_unload_ns: int = 0
    """Time without requests after which a version goes to sleep. Models can override it; 0: never."""
    memory_budget: int = 0
    """Memory of all instances on the host, in bytes; 0: no limit."""
    gpu_budgets: tuple[tuple[int, int], ...] = ()
    """As `memory_budget`, for GPUs: their number (or ANY_GPU) and bytes."""
    memory_wait_ns: int = 500_000_000
    """How long a version waits for memory before a busy version has to make room for it, and the minimum time that a
    version serves before it has to make room while busy."""
    unread_ns: int = 50_000_000
    """How long the callers of a batch may keep the model waiting by accepting no more responses, in total, while other
    requests wait for the model."""
    summaries: bool = False
    """Collect latency quantiles (--metrics-config summary_latencies)."""
    contexts_per_second: int = 0
    """Maximum number of requests per second that are traced because their client's trace context is sampled. Beyond
    that, and without such a context, the rate of the sample applies. 0: contexts are ignored."""
    first_responses: bool = False
    """Collect first response times (--metrics-config histogram_latencies). Those of decoupled models are always
    collected, in other buckets."""
    prefetch_ns: int = 100_000_000
    """With several instances, a batch is sent ahead to a busy one only if batches take less than this. It goes to the
    instance that started first, so it waits at the wrong instance if another one finishes earlier."""


NAMED = (
    # Each costs a descriptor and a few KiB; more than the number of programs on one machine.
    Limit("connections", "connections of all clients; clients with the role operate are always admitted"),
    # A quarter of the total, so that one user cannot lock out the others.
    Limit("uid_connections", "connections of one user; all ZeroMQ clients count as the server's user"),
    # About 100 MiB of records, and a queue of several seconds of work.
    Limit("requests", "requests in flight of all clients"),
    # A longer queue does not improve batching.
    Limit("client_requests", "requests in flight of one client"),
    # A gateway forwards those of all its callers; at about 300 bytes each they are cheap to keep.
    Limit("client_questions", "unanswered queries (readiness, metadata, metrics and the like) of one client"),
    # Half of `requests`, so that a stuck model leaves room for the others.
    Limit("model_queue", "requests queued for one model version; its max_queue_size may be lower"),
    # A quarter of `queue_bytes`; tensors in shared memory do not count.
    Limit(
        "model_queue_bytes",
        "bytes inside messages (parameters and small tensors) queued for one model version",
        FIELD_BYTES,
    ),
    # Memory that a server can spare without swapping.
    Limit("queue_bytes", "bytes inside messages of all requests in flight", FIELD_BYTES),
    # The output memory (--worker-output-bytes) of 16 instances.
    Limit("held_bytes", "bytes of responses in shared memory that all clients hold"),
    # An eighth of `held_bytes`.
    Limit(
        "client_held_bytes",
        "bytes of responses in shared memory that one client holds; above it, its requests are refused",
    ),
    # Half of the output memory of an instance (--worker-output-bytes). Requests may share the same bytes, which need
    # not be in memory before a worker reads them, so an input may cost its sender nothing.
    Limit(
        "client_input_bytes",
        "bytes of shared memory that requests in flight of one client have as inputs; each handle counts in full",
    ),
    # Each costs the broker a descriptor, and a mapping in each worker that uses it.
    Limit("segments", "shared memory segments of clients, workers and the broker"),
    # A client needs a few; arenas grow by doubling.
    Limit("client_segments", "shared memory segments of one client"),
    # One second of responses at full rate; a client further behind does not catch up.
    Limit("client_outbox_bytes", "unsent bytes queued for one client that does not read", PACKET_BYTES),
    Limit(
        "outbox_bytes",
        "unsent bytes queued for all clients that do not read; the limit of one user is a quarter",
        PACKET_BYTES,
    ),
    # Each costs the broker a page of memory, and a check in each turn.
    Limit("leases", "instances lent to clients, which then bypass the broker; 0: none", 0),
    # Enough to report a bug in a client, and a flood of invalid messages costs the others little.
    Limit(
        "client_errors",
        f"protocol errors of one client per second, not counting refused requests; a client with more is throttled "
        f"to this rate, and disconnected after {BURST_S} times as many at once; 0: no limit",
        0,
    ),
    # Models that are sent instead of stored are small.
    Limit("override_bytes", "bytes of the files in one load call"),
)
