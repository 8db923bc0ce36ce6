"""Options of the gRPC endpoint, and how its listener is built. Option names and units are Triton's where it has the
option."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shmserve.gateway.auth.gate import Guard
    from shmserve.gateway.http2.listener import RpcListener
    from shmserve.gateway.limits.body_budget import Budget
    from shmserve.gateway.upstream.link import GatewayLink
    from shmserve.gateway.upstream.regions import Regions

_LEVELS = {"none": 0, "low": 1, "medium": 6, "high": 9}
"""zlib levels."""
Reads = Callable[[str], Any]


def add(option: Callable[..., Any], bool_: Reads, port: Reads, size: Reads, seconds: Reads) -> None:
    option("--allow-grpc", metavar="BOOL", type=bool_, nargs="?", const=True, default=True,
           help="enable the gRPC endpoint (default: true)")  # fmt: skip
    option("--grpc-address", metavar="ADDRESS", default="127.0.0.1",
           help="address of the gRPC listener (default: %(default)s, this machine only)")  # fmt: skip
    option("--grpc-port", metavar="N", type=port, default=8001, help="gRPC port; 0: any (default: %(default)s)")
    option("--reuse-grpc-port", dest="reuse_port", metavar="BOOL", type=bool_, nargs="?", const=True,
           help="as --reuse-port", default=argparse.SUPPRESS)  # fmt: skip
    option("--grpc-max-input-size", metavar="BYTES", type=size, default=64 << 20,
           help="maximum message size, also after decompression (default: %(default)s)")  # fmt: skip
    option("--grpc-infer-response-compression-level", metavar="LEVEL", choices=_LEVELS, default="none",
           help="compression of responses, where supported: none, low, medium, high (default: none)")  # fmt: skip
    option("--grpc-keepalive-time", metavar="MS", type=_whole, default=7_200_000,
           help="idle time before a keepalive ping is sent (default: %(default)s)")  # fmt: skip
    option("--grpc-keepalive-timeout", metavar="MS", type=_whole, default=20_000,
           help="time to wait for the answer to a keepalive ping (default: %(default)s)")  # fmt: skip
    option("--grpc-keepalive-permit-without-calls", metavar="BOOL", type=bool_, nargs="?", const=True, default=False,
           help="send and accept keepalive pings without calls in flight (default: false)")  # fmt: skip
    option("--grpc-http2-min-recv-ping-interval-without-data", metavar="MS", type=_from_0, default=300_000,
           help="minimum interval of pings without data; a shorter one is a strike (default: %(default)s)")  # fmt: skip
    option("--grpc-http2-max-ping-strikes", metavar="N", type=_from_0, default=2,
           help="strikes tolerated before the connection is closed; 0: no limit (default: %(default)s)")  # fmt: skip
    option("--grpc-stream-idle-timeout", metavar="SECONDS", type=seconds, default=3600.0,
           help="maximum idle time of a stream without requests in flight (default: %(default)g)")  # fmt: skip
    option("--grpc-max-connection-age", metavar="MS", type=_from_0, default=0,
           help="age at which a connection takes no more calls; 0: no limit (default: %(default)s)")  # fmt: skip
    option("--grpc-max-connection-age-grace", metavar="MS", type=_from_0, default=0,
           help="time for its calls to finish after that; 0: no limit (default: %(default)s)")  # fmt: skip


def _from_0(text: str) -> int:
    if not text.isdecimal() or not int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 0 to {2**31 - 1}")
    return int(text)


def _whole(text: str) -> int:
    found = _from_0(text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer above 0")
    return found


def make_listener(
    args: argparse.Namespace, link: GatewayLink, guard: Guard, regions: Regions, budget: Budget
) -> RpcListener:
    from shmserve.gateway.grpc.methods import Methods
    from shmserve.gateway.grpc.services import Services
    from shmserve.gateway.http2.connection import Http2Connection
    from shmserve.gateway.http2.limits import Http2Limits
    from shmserve.gateway.http2.listener import RpcListener

    services = Services(link, args.grpc_max_input_size, guard.access, regions, guard.forward)
    limits = Http2Limits(
        message_bytes=args.grpc_max_input_size,
        connections=args.http_max_connections,
        read_timeout_s=args.http_read_timeout,
        data_rate=args.http_min_data_rate,
        idle_timeout_s=args.http_idle_timeout,
        stream_idle_s=args.grpc_stream_idle_timeout,
        exit_timeout_s=args.exit_timeout_secs,
        compression=_LEVELS[args.grpc_infer_response_compression_level],
        keepalive_s=args.grpc_keepalive_time / 1000,
        keepalive_timeout_s=args.grpc_keepalive_timeout / 1000,
        pings_without_calls=args.grpc_keepalive_permit_without_calls,
        ping_interval_s=args.grpc_http2_min_recv_ping_interval_without_data / 1000,
        ping_strikes=args.grpc_http2_max_ping_strikes,
        age_s=args.grpc_max_connection_age / 1000,
        age_grace_s=args.grpc_max_connection_age_grace / 1000,
    )
    return RpcListener(
        Http2Connection,
        link.bind(),
        Methods(services),
        limits,
        services.close,
        budget,
        link.shares,
        link.turns,
        link.reads,
    )
