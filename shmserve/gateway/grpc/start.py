"""Builds the listener of the gRPC endpoint from its options."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from shmserve.settings.limits import GatewayLimits

if TYPE_CHECKING:
    from shmserve.gateway.auth.gate import Guard
    from shmserve.gateway.http2.listener import RpcListener
    from shmserve.gateway.limits.body_budget import Budget
    from shmserve.gateway.upstream.link import GatewayLink
    from shmserve.gateway.upstream.regions import Regions

_LEVELS = {"none": 0, "low": 1, "medium": 6, "high": 9}
"""zlib levels."""


def make_listener(
    args: argparse.Namespace, common: GatewayLimits, link: GatewayLink, guard: Guard, regions: Regions, budget: Budget
) -> RpcListener:
    from shmserve.gateway.grpc.methods import Methods
    from shmserve.gateway.grpc.services import Services
    from shmserve.gateway.http2.connection import Http2Connection
    from shmserve.gateway.http2.limits import Http2Limits
    from shmserve.gateway.http2.listener import RpcListener

    services = Services(link, args.grpc_max_input_size, guard.access, regions, guard.forward)
    limits = Http2Limits(
        message_bytes=args.grpc_max_input_size,
        connections=common.http_connections,
        read_timeout_s=common.http_read_secs,
        idle_timeout_s=common.http_idle_secs,
        stream_idle_s=common.grpc_stream_idle_secs,
        compression=_LEVELS[args.grpc_infer_response_compression_level],
        keepalive_s=args.grpc_keepalive_time / 1000,
        keepalive_timeout_s=args.grpc_keepalive_timeout / 1000,
        pings_without_calls=args.grpc_keepalive_permit_without_calls,
        ping_interval_s=args.grpc_http2_min_recv_ping_interval_without_data / 1000,
        ping_strikes=args.grpc_http2_max_ping_strikes,
        age_s=args.grpc_max_connection_age / 1000,
        age_grace_s=args.grpc_max_connection_age_grace / 1000,
    )
    return RpcListener(link, Http2Connection, Methods(services), limits, budget, services.close)
