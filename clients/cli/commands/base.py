"""Shared parts of the commands: connecting to the server, error texts, JSON output.

Invariant: numpy and zmq are only imported inside functions, so that `shmserve --help` is fast.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shmserve.errors import DeadlineExceeded, InvalidRequest
from shmserve.terminal.errors import Misuse

if TYPE_CHECKING:
    from shmserve.clients.client import Client

ASK_S = 30.0
"""Timeout of queries, which a healthy server answers at once."""
CONNECT_S = 5.0
CLEAR_LINE = "\r\x1b[K"
_OF_PARSER = ("command", "run", "show_version")
"""What the parser adds to the arguments of every command."""


def order_of(args: argparse.Namespace) -> str:
    """The command's own arguments that were given or have a default, as JSON, for the process that replaces this one.

    Invariant: RunOrder and BuildOptions have a field for each argument of their commands.
    """
    given = {name: value for name, value in vars(args).items() if value is not None and name not in _OF_PARSER}
    return json.dumps(given, default=os.fspath)


def make_client(args: argparse.Namespace, timeout: float | None = ASK_S) -> Client:
    """The client for --url or --runtime-dir, else SHMSERVE_URL, else the default runtime directory."""
    from shmserve.clients.client import Client

    url = args.url
    if url is None and args.runtime_dir is None:
        url = os.environ.get("SHMSERVE_URL") or None
    try:
        return Client(
            url, runtime_dir=args.runtime_dir, timeout=timeout, reconnect_timeout=CONNECT_S,
            server_key=args.server_key, key_file=args.key_file,
        )  # fmt: skip
    except InvalidRequest as error:
        raise Misuse(next_step(error, args)) from error


@contextmanager
def connected(args: argparse.Namespace) -> Iterator[Client]:
    """A connected client. Raises ConnectionLost if there is no server."""
    with make_client(args) as client:
        client.metadata()
        yield client


def next_step(error: Exception, args: argparse.Namespace) -> str:
    """The error text, with a hint for the next step if there is one."""
    text = str(error).replace(" by url=", " by --url or --runtime-dir").replace(" by runtime_dir=", " by --runtime-dir")
    text = text.replace("server_key=", "--server-key").replace("key_file=", "--key-file")
    if text.startswith("Request for unknown model"):
        return f"{text}; `shmserve models` lists the models"
    if isinstance(error, DeadlineExceeded) and getattr(args, "timeout", None) is not None:
        return f"{text}; --timeout allows more"
    return text


def complain(args: argparse.Namespace, text: str) -> None:
    """Print one line about the command on stderr."""
    print(f"shmserve {args.command}: {' '.join(text.split())}", file=sys.stderr)


def print_json(value: Any, indent: int | None = 2) -> None:
    print(json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False))
