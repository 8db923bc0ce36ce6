"""Shared parts of the commands: connecting to the server, error texts, JSON output.

Invariant: numpy, zmq and modules that only a command's output needs are imported inside functions, so that `shmserve
--help` is fast.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from shmserve.errors import DeadlineExceeded, InvalidRequest, ServeError
from shmserve.terminal.errors import Failed, Misuse

if TYPE_CHECKING:
    from pathlib import Path
    from typing import TypeAlias

    from shmserve.clients.client import Client
    from shmserve.clients.http_client import HttpClient
    from shmserve.terminal.console import Screen

    AnyClient: TypeAlias = Client | HttpClient

Result = TypeVar("Result")

ASK_S = 30.0
"""Timeout of queries, which a healthy server answers at once."""
CONNECT_S = 5.0
NAMES_S = 2.0
"""Timeout of the query for the names of models, for a hint."""
LEVELS = ("debug", "info", "warning", "error", "critical")
"""Levels of the server's log, in ascending order."""
CLEAR_LINE = "\r\x1b[K"
_OF_PARSER = ("command", "run", "show_version", "color")
"""Attributes that the parser adds to the arguments of every command."""

_UNKNOWN = re.compile(r"Request for unknown model: '(.*?)'")
_NOT_SERVED = re.compile(r"cannot restart .*?model '(.*?)': it is not served")


def order_of(args: argparse.Namespace) -> str:
    """The command's arguments that were given or have a default, as JSON, for the process that replaces this one.

    Invariant: RunOrder and BuildOptions have a field for each argument of their commands.
    """
    provided = {name: value for name, value in vars(args).items() if value is not None and name not in _OF_PARSER}
    return json.dumps(provided, default=os.fspath)


def make_client(args: argparse.Namespace, timeout: float | None = ASK_S) -> AnyClient:
    """The client for the server that the options, the environment or the context select."""
    from shmserve.clients.cli.contexts import place_of

    place = place_of(args)
    try:
        if place.is_http:
            from shmserve.clients.http_client import HttpClient

            return HttpClient(str(place.url), place.token, timeout)
        from shmserve.clients.client import Client

        return Client(
            place.url,
            runtime_dir=place.runtime_dir,
            timeout=timeout,
            reconnect_timeout=CONNECT_S,
            server_key=place.server_key,
            key_file=place.key_file,
        )
    except InvalidRequest as error:
        raise Misuse(next_step(error, args)) from error


@contextmanager
def connected(args: argparse.Namespace) -> Iterator[AnyClient]:
    """A connected client. Raises ConnectionLost if there is no server."""
    with make_client(args) as client:
        client.metadata()
        yield client


def next_step(error: Exception, args: argparse.Namespace) -> str:
    """The error text, with a hint for the next step if there is one."""
    text = str(error).replace(" by url=", " by --url or --runtime-dir").replace(" by runtime_dir=", " by --runtime-dir")
    text = text.replace("server_key=", "--server-key").replace("key_file=", "--key-file")
    if stopped := _NOT_SERVED.match(text):
        near = _near(stopped[1], args)
        return f"{text}; did you mean '{near}'?" if near else text
    if unknown := _UNKNOWN.match(text):
        near = _near(unknown[1], args) if text.endswith(" is not found") else ""
        return f"{text}; did you mean '{near}'?" if near else f"{text}; `shmserve models` lists the models"
    if isinstance(error, DeadlineExceeded) and getattr(args, "timeout", None) is not None:
        return f"{text}; --timeout allows more"
    return text


def _near(name: str, args: argparse.Namespace) -> str:
    """The model of the server with the most similar name; empty if there is none, or the server does not list its
    models."""
    from difflib import get_close_matches

    if not hasattr(args, "context"):  # the command has a server of its own
        return ""
    try:
        with make_client(args, NAMES_S) as client:
            names = {entry["name"] for entry in client.models()}
    except (Misuse, ServeError):  # the role infer does not include `models`
        return ""
    return "" if name in names else next(iter(get_close_matches(name, names, 1)), "")


def complain(args: argparse.Namespace, text: str) -> None:
    """Prints one line about the command on stderr."""
    print(f"shmserve {args.command}: {' '.join(text.split())}", file=sys.stderr)


class StatusLine:
    """One line on stderr that is updated in place, and removed at the end of the block; nothing without a terminal."""

    def __init__(self, wanted: bool = True) -> None:
        self.is_shown = wanted and sys.stderr.isatty()

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.show("")

    def show(self, text: str) -> None:
        """The start of the text, as far as it fits the width."""
        if self.is_shown:
            print(CLEAR_LINE + text[: shutil.get_terminal_size().columns - 1], end="", file=sys.stderr, flush=True)


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def print_json(value: Any, indent: int | None = 2) -> None:
    is_unicode = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    print(json.dumps(value, indent=indent, ensure_ascii=not is_unicode, allow_nan=False))


def print_text(text: str) -> None:
    """Prints the lines of a text, none if it is empty."""
    print(text, end="\n" if text else "")


def write_file(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Failed(f"cannot write {path}: {error.strerror}") from error


def screen_of(args: argparse.Namespace) -> Screen:
    """Standard output, with the choice of --color."""
    from shmserve.terminal.console import Screen

    return Screen(getattr(args, "color", None))


def output(
    args: argparse.Namespace,
    ask: Callable[[], Result],
    text: Callable[[Result, Screen], str],
    document: Callable[[Result], Any] = lambda result: result,
) -> int:
    """Prints the result of `ask` as text, or as a document with --json; with --watch repeatedly, until Ctrl-C."""
    screen, again = screen_of(args), False
    while True:
        result = ask()
        if args.json:
            print_json(document(result), indent=2 if args.watch is None else None)
        elif args.watch is not None and screen.can_redraw:
            print(screen.frame(text(result, screen), again), end="")
        else:
            print_text(text(result, screen))
        if args.watch is None:
            return 0
        sys.stdout.flush()
        again = True
        select.select([], [], [], args.watch)
