"""The process of a gateway. The rule of the file: it starts without a server, and stays when the server goes: callers
are told 503 until it is back.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import os
import signal
import sys

import uvloop

from shmserve.clients.commands_base import Failed, Misuse
from shmserve.clients.gateway.child import ServerLog, end_with
from shmserve.clients.gateway.door import Door
from shmserve.clients.gateway.limits import Limits
from shmserve.clients.gateway.link import GatewayLink
from shmserve.clients.gateway.regions import Regions
from shmserve.errors import InvalidRequest

log = logging.getLogger("shmserve.gateway")


def run(args: argparse.Namespace) -> int:
    _log_to_stderr(of_server=args.parent is not None)
    if args.parent is not None:
        end_with(args.parent)
    url = args.url
    if url is None and args.runtime_dir is None:
        url = os.environ.get("SHMSERVE_URL") or None
    try:
        link = GatewayLink(url, args.runtime_dir, f"gateway of {os.getpid()}", args.memory_bytes)
    except InvalidRequest as error:
        raise Misuse(str(error)) from error
    uvloop.run(_serve(args, link))
    return 0


def _log_to_stderr(of_server: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(ServerLog() if of_server else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _limits(args: argparse.Namespace) -> Limits:
    return Limits(
        args.http_max_input_size, args.http_max_json_size, args.http_max_held_size, args.http_max_connections,
        args.http_read_timeout, args.http_idle_timeout, args.exit_timeout_secs,
    )  # fmt: skip


async def _serve(args: argparse.Namespace, link: GatewayLink) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    link.bind()
    limits, roles = _limits(args), frozenset(args.http_roles.split(","))
    http = Door(link, limits, roles, regions=Regions(args.allow_client_shm))
    doors = [http]
    metrics_address = args.metrics_address or args.http_address
    try:
        ports = {"http": await _open(http, args.http_address, args.http_port, args.reuse_port)}
        log.info("HTTP on %s, port %d, for %s", args.http_address, ports["http"], args.http_roles.replace(",", " and "))
        if not args.no_metrics:
            metrics = Door(link, limits, frozenset({"observe"}), metrics=True, extra=lambda: _metrics(http))
            doors.append(metrics)
            ports["metrics"] = await _open(metrics, metrics_address, args.metrics_port, args.reuse_port)
            log.info("Prometheus on %s, port %d, path /metrics", metrics_address, ports["metrics"])
        for address in {args.http_address, metrics_address}:
            _warn(address)
        if args.ready_fd is not None:
            with open(args.ready_fd, "w") as ready:
                ready.write(f"READY {' '.join(f'{door}={port}' for door, port in ports.items())}\n")
        await stop.wait()
        log.info("no new requests are taken; those in flight have %g s", limits.exit_timeout_s)
    finally:
        for door in doors:
            await door.close()
        await link.close()


async def _open(door: Door, address: str, port: int, share: bool) -> int:
    try:
        return await door.open(address, port, share)
    except OSError as error:
        raise Failed(f"cannot listen on {address}, port {port}: {error.strerror or error}") from error


def _warn(address: str) -> None:
    """Whoever reaches the port may use it: that is said where it is more than this machine."""
    try:
        local = ipaddress.ip_address(address).is_loopback
    except ValueError:
        local = address == "localhost"
    if not local:
        log.warning(
            "%s is not this machine alone: whoever reaches the port may use it, and what is sent can be read on the "
            "way; put a proxy with TLS and a login before it, or listen on 127.0.0.1",
            address,
        )


def _metrics(door: Door) -> str:
    lines = [
        "# HELP shmserve_gateway_http_connections Connections of HTTP that are open",
        "# TYPE shmserve_gateway_http_connections gauge",
        f"shmserve_gateway_http_connections {door.connections}",
        "# HELP shmserve_gateway_http_answers_total Answers over HTTP, by their status",
        "# TYPE shmserve_gateway_http_answers_total counter",
    ]
    for status, count in sorted(door.answers.items()):
        lines.append(f'shmserve_gateway_http_answers_total{{status="{status}"}} {count}')
    return "\n".join(lines) + "\n"
