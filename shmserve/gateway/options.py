"""The options of `shmserve gateway`. Little is imported here, as `shmserve --help` must be fast."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from shmserve.gateway.auth import restricted_apis
from shmserve.gateway.grpc import start as grpc_start
from shmserve.gateway.zmq_tcp import start as zmqtcp_start
from shmserve.protocol.roles import INFER, OBSERVE, ROLES, names, roles_of


def add(made: argparse.ArgumentParser) -> None:
    option = made.add_argument
    option("--allow-http", metavar="BOOL", type=_bool, nargs="?", const=True, default=True,
           help="enable the HTTP endpoint (default: true)")  # fmt: skip
    option("--http-address", metavar="ADDRESS", default="127.0.0.1",
           help="address of the HTTP listener (default: %(default)s, this machine only)")  # fmt: skip
    option("--http-port", metavar="N", type=_port, default=8000, help="HTTP port; 0: any (default: %(default)s)")
    option("--allow-metrics", metavar="BOOL", type=_bool, nargs="?", const=True, default=True,
           help="enable the Prometheus endpoint (default: true)")  # fmt: skip
    option("--metrics-address", metavar="ADDRESS", help="metrics address (default: as --http-address)")
    option("--metrics-port", metavar="N", type=_port, default=8002, help="metrics port; 0: any (default: %(default)s)")
    option("--no-metrics", dest="allow_metrics", action="store_false", help="same as --allow-metrics=false")
    option("--http-roles", metavar="ROLE,ROLE", type=_roles,
           help=f"roles of HTTP callers, of {', '.join(ROLES)} (default: {','.join(names(INFER | OBSERVE))}; with "
           "--tokens-file none for callers without a token)")  # fmt: skip
    option("--grpc-roles", metavar="ROLE,ROLE", type=_roles, help="roles of gRPC callers (default: as --http-roles)")
    option("--allow-client-shm", metavar="BOOL", type=_bool, nargs="?", const=True, default=False,
           help="allow callers to register shared memory of this machine (default: false)")  # fmt: skip
    option("--copy-client-shm", metavar="BOOL", type=_bool, nargs="?", const=True, default=False,
           help="copy registered shared memory in the gateway; false: workers map it (default: false)")  # fmt: skip
    option("--reuse-port", metavar="BOOL", type=_bool, nargs="?", const=True, default=False,
           help="allow several gateways to listen on the same ports (default: false)")  # fmt: skip
    option("--reuse-http-port", dest="reuse_port", metavar="BOOL", type=_bool, nargs="?", const=True,
           help="same as --reuse-port", default=argparse.SUPPRESS)  # fmt: skip
    option("--http-max-input-size", metavar="BYTES", type=_above_0, default=64 << 20,
           help="maximum body size, also after decompression (default: %(default)s)")  # fmt: skip
    option("--http-max-json-size", metavar="BYTES", type=_size, default=16 << 20,
           help="maximum JSON size of a model request; 0: as --http-max-input-size (default: %(default)s)")  # fmt: skip
    option("--http-max-held-size", metavar="BYTES", type=_above_0, default=1 << 30,
           help="maximum received bytes of the large bodies of all requests (default: %(default)s)")  # fmt: skip
    option(
        "--http-max-connections",
        metavar="N",
        type=_above_0,
        default=4096,
        help="connection limit (default: %(default)s)",
    )
    option("--http-read-timeout", metavar="SECONDS", type=_seconds, default=60.0,
           help="timeout for a stalled request, or a client that does not read (default: %(default)g)")  # fmt: skip
    option("--http-min-data-rate", metavar="BYTES", type=_above_0, default=1024,
           help="minimum bytes per second; a slower client counts as stalled (default: %(default)s)")  # fmt: skip
    option("--http-idle-timeout", metavar="SECONDS", type=_seconds, default=600.0,
           help="maximum time between two requests of a connection (default: %(default)g)")  # fmt: skip
    option("--exit-timeout-secs", metavar="SECONDS", type=_seconds, default=30.0,
           help="time for requests in flight to finish on shutdown (default: %(default)g)")  # fmt: skip
    option("--memory-bytes", metavar="BYTES", type=_above_0, default=4 << 30,
           help="maximum shared memory for input tensors (default: %(default)s)")  # fmt: skip
    for kind in ("connection", "address", "token"):
        option(f"--{kind}-share", metavar="FRACTION", type=_fraction, default=0.25,
               help=f"how much of the broker's client_requests and of --memory-bytes one {kind} may have in flight, "
               "as a fraction of what the others leave; 1: no limit (default: %(default)g)")  # fmt: skip
    grpc_start.add(made.add_argument_group("gRPC").add_argument, _bool, _port, _above_0, _seconds)
    _add_guards(made.add_argument_group("access control"))
    zmqtcp_start.add(made.add_argument_group("ZeroMQ over tcp").add_argument, _above_0)
    option(
        "--ready-fd", metavar="N", type=int, help="descriptor to which READY and NAME=PORT of each endpoint are written"
    )
    option("--parent", metavar="PID", type=int, help=argparse.SUPPRESS)


def _add_guards(made: Any) -> None:
    option = made.add_argument
    option("--tls-cert", metavar="FILE", help="enable TLS on all endpoints, with this certificate chain (PEM)")
    option("--tls-key", metavar="FILE", help="private key of --tls-cert, if not in the same file")
    option("--tls-client-ca", metavar="FILE", help="require client certificates signed by one of these CAs")
    option("--grpc-use-ssl", metavar="BOOL", type=_bool, nargs="?", const=True, default=False,
           help="enable TLS for gRPC with separate certificates")  # fmt: skip
    option("--grpc-server-cert", metavar="FILE", help="certificate for gRPC")
    option("--grpc-server-key", metavar="FILE", help="private key for gRPC")
    option("--grpc-use-ssl-mutual", metavar="BOOL", type=_bool, nargs="?", const=True, default=False,
           help="require client certificates for gRPC")  # fmt: skip
    option("--grpc-root-cert", metavar="FILE", help="CA certificates that must have signed them")
    option("--tokens-file", metavar="FILE", help="tokens and their roles; reloaded on SIGHUP, as are certificates")
    option("--new-token", metavar="NAME=ROLE,ROLE", type=_new_token,
           help="create a token, print it and its line for --tokens-file, and exit")  # fmt: skip
    option("--http-restricted-api", metavar="API,API:HEADER=VALUE", type=_restriction(""), action="append", default=[],
           help="require this header for these APIs; repeatable")  # fmt: skip
    option("--grpc-restricted-protocol", metavar="API,API:KEY=VALUE", type=_restriction(restricted_apis.RPC_PREFIX),
           action="append", default=[],
           help=f"the same for gRPC; the header is {restricted_apis.RPC_PREFIX}KEY")  # fmt: skip
    option("--http-header-forward-pattern", metavar="REGEX",
           help="pass matching headers to the model as request parameters")  # fmt: skip
    option("--grpc-header-forward-pattern", metavar="REGEX", help="the same for gRPC")


def _restriction(prefix: str) -> Callable[[str], restricted_apis.Restriction]:
    def read(text: str) -> restricted_apis.Restriction:
        try:
            return restricted_apis.read(text, prefix)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _new_token(text: str) -> tuple[str, str]:
    name, equals, roles = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=ROLE,ROLE")
    return name, _roles(roles)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port number from 0 to 65535")
    return int(text)


def _bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text == "true"


def _size(text: str) -> int:
    return 0 if text == "0" else _above_0(text)


def _above_0(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer above 0")
    return int(text)


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return found


def _fraction(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction above 0 and up to 1")
    return found


def _roles(text: str) -> str:
    try:
        roles_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
