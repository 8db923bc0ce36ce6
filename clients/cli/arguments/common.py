"""Adds commands, and the options that several commands share."""

from __future__ import annotations

import argparse
import importlib
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shmserve.clients.cli.commands import completion
from shmserve.clients.cli.help import CommandParser, rare
from shmserve.system import interrupts

WHERE = """
Connects to this user's server on this machine, unless --url, --runtime-dir, --context, SHMSERVE_URL,
SHMSERVE_RUNTIME_DIR or the current context selects another.
"""
CODES = """exit codes:
  0    {}
  1    {}
  2    wrong usage
  130  interrupted
"""
MAX_INTEGER = 2**63 - 1
DIGITS = 30
MAX_NS = 10**18
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s|min|m|h)?")
_UNITS = {"us": 1e3, "ms": 1e6, "s": 1e9, "m": 60e9, "min": 60e9, "h": 3600e9}
ELSEWHERE = ("--url URL, --runtime-dir DIR", "the server (default: this user's)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(?:i?B)?|B)?", re.IGNORECASE)


def add_command(
    commands: Any,
    name: str,
    module: str,
    about: str,
    examples: str,
    codes: tuple[str, str] = ("done", "failed"),
    note: str = "",
    also: tuple[str, str] | None = None,
    synonyms: Mapping[str, str] = {},
) -> CommandParser:
    """Adds a command, implemented by the function of this name in a module of `commands`. `about` is one sentence,
    without capital letter and full stop. `codes`: meanings of exit codes 0 and 1. `note`: more for the full help.
    """
    command: CommandParser = commands.add_parser(
        name,
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        epilog=f"{CODES.format(*codes)}{note}\nexamples:\n{examples}",
        examples=examples,
        also=also,
        synonyms=synonyms,
    )

    def run(args: argparse.Namespace) -> int:
        function = getattr(importlib.import_module(f"shmserve.clients.cli.commands.{module}"), name)
        interrupts.raise_exception()
        code: int = function(args)
        return code

    command.set_defaults(run=run)
    return command


def add_server_command(
    commands: Any,
    name: str,
    module: str,
    about: str,
    examples: str,
    codes: tuple[str, str] = ("done", "failed"),
    keys: bool = True,
    urls: str = "",
    synonyms: Mapping[str, str] = {},
) -> CommandParser:
    """Adds a command that connects to a server. `keys`: it also works over tcp. `urls`: additional kinds of --url, for
    the help."""
    command = add_command(commands, name, module, about, examples, codes, WHERE, ELSEWHERE, synonyms)
    where = command.add_mutually_exclusive_group()
    rare(
        where.add_argument,
        "--url",
        metavar="URL",
        help=f"{urls}unix:///path/lane.sock, ipc:///path/broker.sock, tcp://host:port or https://host:port",
    )
    rare(
        where.add_argument,
        "--runtime-dir",
        metavar="DIR",
        help="the server's runtime directory (--runtime-dir of serve)",
    )
    if keys:
        text = "with tcp://: the server's public key, or the file NAME.pub"
        rare(command.add_argument, "--server-key", metavar="KEY", help=text)
        text = "with tcp://: your own NAME.key, from `shmserve keygen NAME`"
        rare(command.add_argument, "--key-file", metavar="FILE", help=text)
        text = "with http:// and https://: a file with the token to send"
        rare(command.add_argument, "--token-file", metavar="FILE", type=Path, help=text)
        text = "the server of this context (default: the current one, see `shmserve context`)"
        rare(where.add_argument, "--context", metavar="NAME", help=text)
    return command


def add_color(parser: argparse.ArgumentParser) -> None:
    text = "use colour, or not (default: on a terminal, unless NO_COLOR is set)"
    add = parser.add_argument
    rare(add, "--color", action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)


def add_model(command: argparse.ArgumentParser, nargs: str | None = None) -> None:
    kind: dict[str, Any] = {} if nargs is None else {"nargs": nargs}
    completion.completes(command.add_argument("model", metavar="MODEL", **kind), completion.models)


def add_json(command: argparse.ArgumentParser, text: str = "print JSON") -> None:
    command.add_argument("--json", action="store_true", help=text)


def add_output(command: argparse.ArgumentParser, watch: bool = False, json: str = "print JSON") -> None:
    """The options of commands that only print: --watch, --json, --color."""
    if watch:
        text = "refresh every SECONDS (default: 1) until Ctrl-C; with --json, print a line each time"
        command.add_argument("--watch", metavar="SECONDS", type=seconds, nargs="?", const=1.0, help=text)
    add_json(command, json)
    add_color(command)


def add_version(command: argparse.ArgumentParser) -> None:
    text = "model version (default: latest)"
    completion.completes(
        command.add_argument("--version", metavar="N", type=at_least_1, help=text), completion.versions
    )


def add_backend_settings(add: Callable[..., argparse.Action]) -> None:
    text = "backend setting, as for serve; repeatable"
    rare(add, "--backend-config", metavar="BACKEND,KEY=VALUE", action="append", default=[], help=text)
    add_backend_directory(add)


def add_backend_directory(add: Callable[..., argparse.Action]) -> None:
    variable = "SHMSERVE_BACKEND_DIRECTORY"
    text = f"directory of custom backends, as for serve (default: ${variable})"
    default = os.environ.get(variable) or None
    rare(add, "--backend-directory", metavar="DIR", type=Path, default=default, help=text)


def integer(minimum: int, maximum: int = MAX_INTEGER) -> Callable[[str], int]:
    """The type of an option with an integer from `minimum` to `maximum`."""

    def read(text: str) -> int:
        result = minimum - 1
        if text.isdecimal():
            result = int(text) if len(text) < DIGITS else maximum + 1
        if not minimum <= result <= maximum:
            unbounded = maximum == MAX_INTEGER and result < minimum
            known = f"of at least {minimum}" if unbounded else f"from {minimum} to {maximum:,}"
            raise argparse.ArgumentTypeError(f"'{text[:DIGITS]}' is not an integer {known}")
        return result

    return read


at_least_0, at_least_1 = integer(0), integer(1)


def parsed(text: str) -> float:
    """Returns NaN if the text is not a number: every comparison with NaN is false."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _above_0(what: str, limit: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = parsed(text)
        if not 0 < value < limit:
            raise argparse.ArgumentTypeError(f"'{text}' is not {what} above 0")
        return value

    return read


seconds, positive = _above_0("a number of seconds", 1e6), _above_0("a number", 1e9)


def duration(text: str) -> int:
    """Parses 300us, 20ms, 1.5s, 2m or 1h. Returns nanoseconds."""
    result = _TIME.fullmatch(text.strip())
    if result is not None and not result[2]:
        raise argparse.ArgumentTypeError(f"'{text}' has no unit: {text.strip()}ms? Units are us, ms, s, m and h")
    value = float(result[1]) * _UNITS[result[2]] if result else 0.0
    if not 1 <= value < MAX_NS:
        raise argparse.ArgumentTypeError(f"'{text}' is not a duration above 0, such as 300us, 20ms, 1.5s or 2m")
    return round(value)


def span(text: str) -> tuple[int, int]:
    """8 or 8-128."""
    low, dash, high = text.partition("-")
    result = at_least_1(low), at_least_1(high if dash else low)
    if result[0] > result[1]:
        raise argparse.ArgumentTypeError(f"'{text}': the upper bound is below the lower bound")
    return result


def size(text: str) -> int:
    """2GiB, 512M or a number of bytes. Units are binary."""
    result = _SIZE.fullmatch(text.strip())
    value = float(result[1]) * 1024 ** " KMGT".index((result[2] or " ").upper()) if result else 0.0
    if not 1 <= value <= MAX_INTEGER:
        raise argparse.ArgumentTypeError(f"'{text[:DIGITS]}' is not a size above 0, such as 512MiB or 2GiB")
    return round(value)
