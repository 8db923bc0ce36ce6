"""Checks the options of the ZeroMQ endpoint before anything listens, and starts its listener. zmq is imported only if
the endpoint is enabled."""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from shmserve.errors import InvalidRequest
from shmserve.terminal.errors import Failed, Misuse

if TYPE_CHECKING:
    from shmserve.gateway.upstream.link import GatewayLink
    from shmserve.gateway.zmq_tcp.listener import ZmqTcpListener

log = logging.getLogger("shmserve.gateway")

_ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:.%]+\]|[^\s:/\[\]]+):([0-9]{1,5})")


def check(args: argparse.Namespace) -> Callable[[GatewayLink], ZmqTcpListener] | None:
    """Returns the function that builds the listener, or None if the endpoint is disabled. Raises Misuse and
    Unsupported."""
    options = [f"--{name}" for name in ("zmq-server-key", "zmq-keys") if getattr(args, name.replace("-", "_"))]
    if args.zmq_address is None:
        if options:
            raise Misuse(
                f"{' and '.join(options)} without --zmq-address: set the listen address, e.g. tcp://127.0.0.1:8790"
            )
        return None
    if len(options) < 2:
        raise Misuse(
            "--zmq-address needs --zmq-server-key and --zmq-keys: every client needs a key; "
            "`shmserve keygen` creates keys"
        )
    address = _ADDRESS.fullmatch(args.zmq_address)
    if address is None or int(address[2]) > 65535:
        raise Misuse(f"--zmq-address {args.zmq_address} is not tcp://HOST:PORT")
    from shmserve.gateway.zmq_tcp.keys import KeyFile
    from shmserve.gateway.zmq_tcp.listener import ZmqTcpListener
    from shmserve.gateway.zmq_tcp.peer import ZmqLimits
    from shmserve.transport.keys import check_curve, read_pair

    check_curve()
    try:
        pair, key_file = read_pair(args.zmq_server_key), KeyFile(args.zmq_keys)
    except InvalidRequest as error:
        raise Misuse(str(error)) from error
    limits = ZmqLimits(input_bytes=args.http_max_input_size)
    return lambda link: ZmqTcpListener(link, limits, pair, key_file)


def listen(listener: ZmqTcpListener, args: argparse.Namespace) -> int:
    """Opens the listener and returns its port."""
    from shmserve.gateway.limits.proxies import is_local
    from shmserve.gateway.zmq_tcp.listener import host_of

    try:
        port = listener.open(args.zmq_address, args.reuse_http_port or args.reuse_grpc_port)
    except OSError as error:
        raise Failed(f"cannot listen on {args.zmq_address}: {error.strerror or error}") from error
    log.info("ZeroMQ with CURVE on %s, port %d, %d client keys", args.zmq_address, port, listener.keys)
    if not is_local(host_of(args.zmq_address)[0]):
        log.warning(
            "%s is reachable from other machines: clients with a key in --zmq-keys can connect", args.zmq_address
        )
    return port
