"""The arguments of `shmserve gateway`: the flags of the network endpoints, and those of the process itself.

This module imports little, so that `shmserve --help` is quick.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from shmserve.gateway.auth import restricted_apis
from shmserve.gateway.auth.browsers import read_servers
from shmserve.protocol.roles import check_caller_roles
from shmserve.settings.flag import Flag
from shmserve.settings.limits import GATEWAY_LIMITS, read_limit
from shmserve.settings.parser import add_flags, checked
from shmserve.settings.table import GATEWAY_GROUPS
from shmserve.settings.values import COMMON, Reader, text_value


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--new-token",
        metavar="NAME=ROLE,ROLE",
        type=checked(_new_token),
        help="create a token, print it and its line for --tokens-file, and exit",
    )
    parser.add_argument(
        "--ready-fd", metavar="N", type=int, help="write READY and NAME=PORT of each endpoint to this descriptor"
    )
    parser.add_argument("--parent", metavar="PID", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--busy-poll-ns", type=int, default=0, help=argparse.SUPPRESS)
    add_flags(parser, GATEWAY_GROUPS, _READERS, with_defaults=True)


def _new_token(text: str) -> tuple[str, str]:
    name, equals, roles = text.partition("=")
    if not equals or not name:
        raise ValueError(f"{text!r} is not NAME=ROLE,ROLE")
    check_caller_roles(roles)
    return name, roles


def _roles(_: Flag, text: str) -> str:
    check_caller_roles(text)
    return text


def _servers(_: Flag, text: str) -> str:
    read_servers(text)
    return text


_READERS: Mapping[str, Reader] = {
    **COMMON,
    "path": text_value,
    "limit": lambda _, text: read_limit(GATEWAY_LIMITS, text),
    "roles": _roles,
    "servers": _servers,
    "HTTP restriction": lambda _, text: restricted_apis.read(text),
    "gRPC restriction": lambda _, text: restricted_apis.read(text, prefix=restricted_apis.RPC_PREFIX),
}
