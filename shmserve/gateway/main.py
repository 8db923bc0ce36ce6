"""The gateway process. Invariant: the gateway starts without a server and, unless the server started it, outlives the
server. Clients get 503 while there is no server."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import uvloop

from shmserve.errors import InvalidRequest, Unavailable
from shmserve.gateway.auth import tokens
from shmserve.gateway.auth.gate import Guard, Guards
from shmserve.gateway.grpc import start as grpc_start
from shmserve.gateway.http.connection import HttpListener
from shmserve.gateway.http.limits import HttpLimits
from shmserve.gateway.http.requests import make_listener, make_metrics_listener
from shmserve.gateway.limits.body_budget import Budget
from shmserve.gateway.limits.caller_shares import ShareBounds
from shmserve.gateway.limits.proxies import TrustedProxies, networks_of
from shmserve.gateway.upstream.link import GatewayLink
from shmserve.gateway.upstream.regions import Regions
from shmserve.gateway.zmq_tcp import start as zmqtcp_start
from shmserve.settings.limits import GatewayLimits
from shmserve.system.process import PDEATHSIG, prctl
from shmserve.system.service_manager import ServiceManager, of_this_process
from shmserve.terminal.errors import Failed, Misuse

if TYPE_CHECKING:
    from shmserve.gateway.http2.listener import RpcListener
    from shmserve.gateway.zmq_tcp.listener import ZmqTcpListener

log = logging.getLogger("shmserve.gateway")
STOPPED = "the server stopped before this request completed (--exit-timeout-secs)"


class ServiceState:
    """Reports the state of this process to the service manager, if it runs under one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, manager: ServiceManager) -> None:
        self._loop = loop
        self._manager = manager
        self._timer: asyncio.TimerHandle | None = None
        if manager.watchdog_s:
            self._beat()

    def ready(self, ports: Mapping[str, int]) -> None:
        """All listeners are open."""
        text = ", ".join(f"{endpoint} on port {port}" for endpoint, port in ports.items())
        self._manager.notify("READY=1", f"STATUS=listening: {text or 'no endpoints'}", once=True)

    def reloading(self) -> None:
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._manager.notify("RELOADING=1", f"MONOTONIC_USEC={now}", once=True)

    def stopping(self) -> None:
        self._manager.notify("STOPPING=1", "STATUS=finishing requests in flight", once=True)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._manager.close()

    def _beat(self) -> None:
        self._timer = self._loop.call_later(self._manager.watchdog_s / 2, self._beat)
        self._manager.notify("WATCHDOG=1")


def run(args: argparse.Namespace) -> int:
    if args.new_token is not None:
        return _new_token(*args.new_token)
    _log_to_stderr(of_server=args.parent is not None)
    if args.parent is not None:
        _end_with_parent(args.parent)
    guards = Guards(args)
    make_zmq = zmqtcp_start.check(args)
    url = args.url
    if url is None and args.runtime_dir is None:
        url = os.environ.get("SHMSERVE_URL") or None
    limits = GatewayLimits(**dict(args.limit))
    bounds = ShareBounds(limits.caller_share, limits.gateway_input_bytes, _proxies(args))
    try:
        name = f"gateway of {os.getpid()}"
        link = GatewayLink(url, args.runtime_dir, name, limits.gateway_input_bytes, bounds, args.busy_poll_ns)
    except InvalidRequest as error:
        raise Misuse(str(error)) from error
    uvloop.run(_serve(args, limits, link, guards, make_zmq))
    return 0


def _new_token(name: str, roles: str) -> int:
    try:
        token, line = tokens.new(name, roles)
    except ValueError as error:
        raise Misuse(f"--new-token: {error}") from error
    print(f"token of {name}, not shown again: {token}", file=sys.stderr)
    print(line)
    return 0


def _end_with_parent(parent: int) -> None:
    """Lets the kernel kill this process when its parent, the server with this pid, ends for any reason. The ports are
    then free for the next gateway."""
    if error := prctl(PDEATHSIG, signal.SIGKILL):
        raise Failed(f"cannot set the parent-death signal: {os.strerror(error)}")
    if os.getppid() != parent:
        raise Failed(f"the server (process {parent}) exited before its gateway started")


class _ServerLog(logging.Formatter):
    """Formats lines as `level: text`, as workers do; the server that started this gateway adds the time."""

    def format(self, record: logging.LogRecord) -> str:
        lines = super().format(record).splitlines() or [""]
        level = record.levelname.lower()
        return "\n".join(f"{level}: {line}" for line in lines)


def _log_to_stderr(of_server: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_ServerLog() if of_server else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _http_limits(args: argparse.Namespace, limits: GatewayLimits) -> HttpLimits:
    return HttpLimits(
        input_bytes=args.http_max_input_size,
        json_bytes=limits.http_json_bytes or args.http_max_input_size,
        keep_idle=args.http_keep_idle,
        connections=limits.http_connections,
        read_timeout_s=limits.http_read_secs,
        idle_timeout_s=limits.http_idle_secs,
    )


class Opening(NamedTuple):
    """An endpoint: its listener, access control and address."""

    name: str
    title: str
    listener: HttpListener | RpcListener
    guard: Guard
    address: str
    port: int


def _openings(
    args: argparse.Namespace,
    limits: GatewayLimits,
    link: GatewayLink,
    guards: Guards,
    zmq_listener: ZmqTcpListener | None,
) -> list[Opening]:
    openings = []
    regions = Regions(args.allow_client_shm, lambda: link.session.memory.foreign, link.send_soon)
    budget = Budget(limits.http_held_bytes, limits.caller_share)
    http_limits = _http_limits(args, limits)
    http = make_listener(link, http_limits, guards.http, regions, budget, args.allow_openai)
    if args.allow_http:
        openings.append(Opening("http", "HTTP", http, guards.http, args.http_address, args.http_port))
    providers: list[Callable[[], str]] = [
        link.shares.metrics,
        partial(http.metrics, "HTTP", "HTTP responses", "status"),
    ]
    if zmq_listener is not None:
        providers.append(zmq_listener.metrics)
    if args.allow_grpc:
        rpc = grpc_start.make_listener(args, limits, link, guards.rpc, regions, budget)
        providers.append(partial(rpc.metrics, "gRPC", "Completed gRPC calls", "code"))
        openings.append(Opening("grpc", "gRPC", rpc, guards.rpc, args.grpc_address, args.grpc_port))
    if args.allow_metrics:
        guard = guards.metrics
        metrics = make_metrics_listener(
            link, http_limits, guard.access, lambda: "".join([text() for text in providers])
        )
        address = args.metrics_address or args.http_address
        openings.append(Opening("metrics", "Prometheus", metrics, guard, address, args.metrics_port))
    return openings


def _proxies(args: argparse.Namespace) -> TrustedProxies:
    try:
        return TrustedProxies(networks_of(args.trusted_proxies or ""))
    except ValueError as error:
        raise Misuse(f"--trusted-proxies: {error}") from error


async def _serve(
    args: argparse.Namespace,
    limits: GatewayLimits,
    link: GatewayLink,
    guards: Guards,
    make_zmq: Callable[[GatewayLink], ZmqTcpListener] | None,
) -> None:
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, signals.put_nowait, number)
    service = ServiceState(loop, of_this_process())
    link.bind()
    zmq_listener = make_zmq(link) if make_zmq is not None else None
    openings = _openings(args, limits, link, guards, zmq_listener)
    ports = {}
    try:
        for opening in openings:
            ports[opening.name] = await _open(opening, args.reuse_http_port or args.reuse_grpc_port)
        if zmq_listener is not None:
            ports["zmq"] = zmqtcp_start.listen(zmq_listener, args)
        for warning in {opening.guard.exposure(opening.address) for opening in openings} - {None}:
            log.warning("%s; or listen on 127.0.0.1 behind a proxy that provides this", warning)
        if args.ready_fd is not None:
            with open(args.ready_fd, "w") as ready:
                ready.write(f"READY {' '.join(f'{endpoint}={port}' for endpoint, port in ports.items())}\n")
        service.ready(ports)
        _freeze()
        while await signals.get() == signal.SIGHUP:
            service.reloading()
            await _renew(openings, guards)
            service.ready(ports)
        service.stopping()
        log.info(
            "shutting down: new requests are refused, requests in flight have %g s to finish", args.exit_timeout_secs
        )
    finally:
        await _stop(args, [opening.listener for opening in openings], zmq_listener, link, signals)
        service.close()


async def _stop(
    args: argparse.Namespace,
    listeners: Sequence[HttpListener | RpcListener],
    zmq_listener: ZmqTcpListener | None,
    link: GatewayLink,
    signals: asyncio.Queue[int],
) -> None:
    """Waits for the requests in flight. After the exit timeout, or another SIGINT, those that are left are failed."""
    closing = asyncio.gather(
        *(listener.close() for listener in listeners), *([zmq_listener.close()] if zmq_listener is not None else [])
    )
    interrupted = asyncio.ensure_future(_interrupt(signals))
    either: list[asyncio.Future[Any]] = [closing, interrupted]
    await asyncio.wait(either, timeout=args.exit_timeout_secs, return_when=asyncio.FIRST_COMPLETED)
    interrupted.cancel()
    if not closing.done():
        error = Unavailable(STOPPED)
        if zmq_listener is not None:
            zmq_listener.give_up()
        await link.close(error)
        for listener in listeners:
            listener.give_up(error)
    await closing
    await link.close()


async def _interrupt(signals: asyncio.Queue[int]) -> None:
    """SIGTERM again does not count: a supervisor may send it to each process of a group, and to its parent."""
    while await signals.get() != signal.SIGINT:
        pass


def _freeze() -> None:
    """Excludes modules from garbage collection: scanning them takes 20 to 35 ms, during which no client is served."""
    gc.collect()
    gc.freeze()


async def _open(opening: Opening, share: bool) -> int:
    address, guard = opening.address, opening.guard
    try:
        port = await opening.listener.open(address, opening.port, share, guard.tls)
    except OSError as error:
        raise Failed(f"cannot listen on {address}, port {opening.port}: {error.strerror or error}") from error
    log.info("%s on %s, port %d%s, %s", opening.title, address, port, " with TLS" if guard.tls else "", guard.access)
    return port


async def _renew(openings: list[Opening], guards: Guards) -> None:
    try:
        guards.read_again()
        for opening in openings:
            await opening.listener.renew(opening.guard.tls)
    except (Failed, OSError) as error:
        log.error("%s; the previous certificates and tokens stay in use", error)
    else:
        log.info("certificates and tokens reloaded")
