"""What `--limit NAME=VALUE` sets: the rows of limits, and the limits of a gateway. Those of the core are in
shmserve.core.limits.

Invariant: a limit is a field of its process's limits and a row of the table beside it, and is described only there; the
tables in docs/security.md are generated from them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shmserve.settings.flag import did_you_mean
from shmserve.settings.values import fraction, number


class Limit(NamedTuple):
    """A limit that --limit sets: what it counts, and its minimum."""

    name: str
    counts: str
    minimum: int = 1


class GatewayLimits(NamedTuple):
    http_connections: int = 4096
    http_held_bytes: int = 1 << 30
    http_json_bytes: int = 16 << 20
    http_read_secs: int = 60
    http_idle_secs: int = 600
    grpc_stream_idle_secs: int = 3600
    gateway_input_bytes: int = 4 << 30
    caller_share: float = 0.25


GATEWAY_LIMITS = (
    # Each costs a descriptor and a few KiB.
    Limit(
        "http_connections", "connections of one endpoint, HTTP or gRPC; at the limit, a new connection closes idle ones"
    ),
    # Memory that a gateway can spare without swapping.
    Limit("http_held_bytes", "received bytes of the large request bodies of all HTTP and gRPC calls together"),
    # Parsed numbers take many times as much memory and time.
    Limit(
        "http_json_bytes",
        "bytes of JSON in a request to a model; 0: as --http-max-input-size, the default with --triton-compatible",
        0,
    ),
    # Longer than an interruption of a mobile network.
    Limit(
        "http_read_secs",
        "seconds without progress of a request that is received, or of a response that its client does not read",
    ),
    # As long as proxies keep theirs open.
    Limit("http_idle_secs", "seconds between two requests of a connection"),
    # Conversations and sequences pause for minutes.
    Limit("grpc_stream_idle_secs", "seconds of a gRPC stream without a request in flight"),
    # Twice the `client_input_bytes` that the broker grants a gateway, as memory is returned late.
    Limit("gateway_input_bytes", "bytes of shared memory for the input tensors of all calls"),
    # Three callers leave the fourth more than a third of the gateway.
    Limit(
        "caller_share",
        "requests and input bytes that one connection, one address or one token may have in flight, as a fraction of "
        "what the others leave free; 1: no limit, for a gateway behind a balancer that sends all calls",
    ),
)


def read_limit(rows: Iterable[Limit], text: str) -> tuple[str, float]:
    """Parses NAME=VALUE, where NAME may contain dashes in place of underscores. Raises ValueError."""
    key, equals, value = text.partition("=")
    name = key.strip().replace("-", "_")
    known = {row.name: row for row in rows}
    if not equals:
        raise ValueError(f"'{text}' is not NAME=VALUE")
    if name not in known:
        raise ValueError(f"unknown limit '{key}'{did_you_mean(name, known)}")
    if name.endswith("_share"):
        return name, fraction(value)
    return name, number(value, name.endswith("_bytes"), known[name].minimum)
