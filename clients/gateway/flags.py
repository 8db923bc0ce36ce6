"""The options of `shmserve gateway`. The rule of the file: next to nothing is imported, as `shmserve --help` has to be
quick.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from shmserve.access import INFER, OBSERVE, ROLES, names, roles_of
from shmserve.clients.gateway.grpc import start as grpc_start
from shmserve.clients.gateway.guards import restrict
from shmserve.clients.gateway.zmqtcp import start as zmqtcp_start


def add(made: argparse.ArgumentParser) -> None:
    option = made.add_argument
    option("--allow-http", metavar="BOOL", type=_bool, nargs="?", const=True, default=True,
           help="a door for HTTP (default: true)")  # fmt: skip
    option("--http-address", metavar="ADDRESS", default="127.0.0.1",
           help="where HTTP is listened for (default: %(default)s, this machine alone)")  # fmt: skip
    option("--http-port", metavar="N", type=_port, default=8000, help="its port (default: %(default)s; 0: any)")
    option("--allow-metrics", metavar="BOOL", type=_bool, nargs="?", const=True, default=True,
           help="a door for Prometheus (default: true)")  # fmt: skip
    option("--metrics-address", metavar="ADDRESS", help="where Prometheus is listened for (default: as --http-address)")
    option("--metrics-port", metavar="N", type=_port, default=8002, help="its port (default: %(default)s; 0: any)")
    option("--no-metrics", dest="allow_metrics", action="store_false", help="as --allow-metrics=false")
    option("--http-roles", metavar="ROLE,ROLE", type=_roles,
           help=f"what callers may do, of {', '.join(ROLES)} (default: {','.join(names(INFER | OBSERVE))}; with "
           "--tokens-file nothing, but for those with a token)")  # fmt: skip
    option("--grpc-roles", metavar="ROLE,ROLE", type=_roles, help="the same for gRPC (default: as --http-roles)")
    option("--allow-client-shm", metavar="BOOL", type=_bool, nargs="?", const=True, default=False,
           help="callers may register shared memory of this machine (default: false)")  # fmt: skip
    option("--copy-client-shm", metavar="BOOL", type=_bool, nargs="?", const=True, default=False,
           help="the gateway copies what is in it; otherwise workers map it (default: false)")  # fmt: skip
    option("--reuse-port", metavar="BOOL", type=_bool, nargs="?", const=True, default=False,
           help="several gateways may listen on the same ports (default: false)")  # fmt: skip
    option("--reuse-http-port", dest="reuse_port", metavar="BOOL", type=_bool, nargs="?", const=True,
           help="the same", default=argparse.SUPPRESS)  # fmt: skip
    option("--http-max-input-size", metavar="BYTES", type=_above_0, default=64 << 20,
           help="of a body, also when it is decompressed (default: %(default)s)")  # fmt: skip
    option("--http-max-json-size", metavar="BYTES", type=_size, default=16 << 20,
           help="of the JSON in a request to a model; 0: as --http-max-input-size (default: %(default)s)")  # fmt: skip
    option("--http-max-held-size", metavar="BYTES", type=_above_0, default=1 << 30,
           help="of what has arrived of the large bodies of all requests (default: %(default)s)")  # fmt: skip
    option("--http-max-connections", metavar="N", type=_above_0, default=4096, help="(default: %(default)s)")
    option("--http-read-timeout", metavar="SECONDS", type=_seconds, default=60.0,
           help="for a request that does not go on, or a caller who does not read (default: %(default)g)")  # fmt: skip
    option("--http-min-data-rate", metavar="BYTES", type=_above_0, default=1024,
           help="a second; a caller who sends or reads less does not go on (default: %(default)s)")  # fmt: skip
    option("--http-idle-timeout", metavar="SECONDS", type=_seconds, default=600.0,
           help="between two requests (default: %(default)g)")  # fmt: skip
    option("--exit-timeout-secs", metavar="SECONDS", type=_seconds, default=30.0,
           help="for requests in flight at the end (default: %(default)g)")  # fmt: skip
    option("--memory-bytes", metavar="BYTES", type=_above_0, default=4 << 30,
           help="the most shared memory for tensors that come in (default: %(default)s)")  # fmt: skip
    for kind in ("connection", "address", "token"):
        option(f"--{kind}-share", metavar="FRACTION", type=_fraction, default=0.25,
               help=f"what one {kind} may have in flight, of what the others leave of the broker's client_requests and "
               "of --memory-bytes; 1: no limit of its own (default: %(default)g)")  # fmt: skip
    grpc_start.add(made.add_argument_group("gRPC").add_argument, _bool, _port, _above_0, _seconds)
    _add_guards(made.add_argument_group("who may come in"))
    zmqtcp_start.add(made.add_argument_group("ZeroMQ, with keys").add_argument, _above_0)
    option(
        "--ready-fd", metavar="N", type=int, help="a descriptor to which READY is written, and DOOR=PORT for each door"
    )
    option("--parent", metavar="PID", type=int, help=argparse.SUPPRESS)


def _add_guards(made: Any) -> None:
    option = made.add_argument
    option("--tls-cert", metavar="FILE", help="TLS at all doors with this certificate, and those up to the root (PEM)")
    option("--tls-key", metavar="FILE", help="its private key, where it is not in the same file")
    option("--tls-client-ca", metavar="FILE", help="callers need a certificate that one of these has signed")
    option("--grpc-use-ssl", metavar="BOOL", type=_bool, nargs="?", const=True, default=False,
           help="TLS of its own for gRPC")  # fmt: skip
    option("--grpc-server-cert", metavar="FILE", help="its certificate")
    option("--grpc-server-key", metavar="FILE", help="its private key")
    option("--grpc-use-ssl-mutual", metavar="BOOL", type=_bool, nargs="?", const=True, default=False,
           help="callers of gRPC need a certificate, too")  # fmt: skip
    option("--grpc-root-cert", metavar="FILE", help="who has to have signed it")
    option(
        "--tokens-file",
        metavar="FILE",
        help="who has a token, and his roles; read again at SIGHUP, as are certificates",
    )
    option("--new-token", metavar="NAME=ROLE,ROLE", type=_new_token,
           help="make a token, say it, print the line for --tokens-file, and exit")  # fmt: skip
    option("--http-restricted-api", metavar="API,API:HEADER=VALUE", type=_restriction(""), action="append", default=[],
           help="these APIs want this header; may be given more than once")  # fmt: skip
    option("--grpc-restricted-protocol", metavar="API,API:KEY=VALUE", type=_restriction(restrict.RPC_PREFIX),
           action="append", default=[],
           help=f"the same for gRPC, where the header is called {restrict.RPC_PREFIX}KEY")  # fmt: skip
    option("--http-header-forward-pattern", metavar="REGEX",
           help="headers with such names go on to the model, as parameters")  # fmt: skip
    option("--grpc-header-forward-pattern", metavar="REGEX", help="the same for gRPC")


def _restriction(prefix: str) -> Callable[[str], restrict.Restriction]:
    def read(text: str) -> restrict.Restriction:
        try:
            return restrict.read(text, prefix)
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
        raise argparse.ArgumentTypeError(f"{text!r} is no port, which is a number from 0 to 65535")
    return int(text)


def _bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text == "true"


def _size(text: str) -> int:
    return 0 if text == "0" else _above_0(text)


def _above_0(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
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
