"""The arguments of `shmserve gateway`, from the table in shmserve.gateway_options, and the parsers of their values.

This module imports little, so that `shmserve --help` is quick.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from shmserve.gateway.auth import restricted_apis
from shmserve.gateway.auth.browsers import read_servers
from shmserve.gateway_options import OPTIONS, Option
from shmserve.protocol.roles import check_caller_roles


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--new-token", metavar="NAME=ROLE,ROLE", type=_new_token,
                      help="create a token, print it and its line for --tokens-file, and exit")  # fmt: skip
    parser.add_argument("--ready-fd", metavar="N", type=int,
                      help="descriptor to which READY and NAME=PORT of each endpoint are written")  # fmt: skip
    parser.add_argument("--parent", metavar="PID", type=int, help=argparse.SUPPRESS)
    groups = {name: parser.add_argument_group(name) for name in dict.fromkeys(option.group for option in OPTIONS)}
    for option in OPTIONS:
        more: dict[str, Any] = {"action": "append"} if option.repeatable else {}
        if option.kind == "boolean":
            more = {"nargs": "?", "const": True}
        default = [] if option.repeatable else option.default
        groups[option.group].add_argument(
            f"--{option.name}",
            dest=option.dest,
            metavar=option.metavar,
            type=_reader(option),
            choices=option.choices or None,
            default=argparse.SUPPRESS if option.sets else default,
            help=_help(option),
            **more,
        )
    groups["metrics"].add_argument("--no-metrics", dest="allow_metrics", action="store_false",
                                   help="same as --allow-metrics=false")  # fmt: skip


def _help(option: Option) -> str:
    text = f"{option.help}; may be given several times" if option.repeatable else option.help
    return f"{text} (default: {option.default_text})" if option.default_text else text


def _reader(option: Option) -> Callable[[str], Any]:
    """The parser of an option's value as an argparse type; it raises ValueError for argparse."""
    read: Callable[[str], Any] = partial(_integer, option) if option.kind == "integer" else _READERS[option.kind]

    def checked(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def _new_token(text: str) -> tuple[str, str]:
    name, equals, roles = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=ROLE,ROLE")
    try:
        return name, _roles(roles)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text == "true"


def _integer(option: Option, text: str) -> int:
    if not text.isdecimal() or not option.minimum <= int(text) <= option.maximum:
        raise ValueError(f"{text!r} is not an integer from {option.minimum} to {option.maximum}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise ValueError(f"{text!r} is not a number of seconds above 0")
    return seconds


def _fraction(text: str) -> float:
    try:
        fraction = float(text)
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise ValueError(f"{text!r} is not a fraction above 0 and up to 1")
    return fraction


def _roles(text: str) -> str:
    check_caller_roles(text)
    return text


def _servers(text: str) -> str:
    read_servers(text)
    return text


_READERS: dict[str, Callable[[str], Any]] = {
    "boolean": _boolean,
    "seconds": _seconds,
    "fraction": _fraction,
    "roles": _roles,
    "servers": _servers,
    "text": str,
    "path": str,
    "HTTP restriction": restricted_apis.read,
    "gRPC restriction": partial(restricted_apis.read, prefix=restricted_apis.RPC_PREFIX),
}
