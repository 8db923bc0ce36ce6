"""What the commands share: how they fail, how they find the server, how they print JSON.

The rule of the file: numpy and zmq are imported inside functions only, so that `shmserve --help` is quick.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shmserve.errors import DeadlineExceeded, InvalidRequest
from shmserve.terminal.errors import Misuse

if TYPE_CHECKING:
    from shmserve.clients.client import Client

ASK_S = 30.0
"""Questions are answered at once, or the server is in trouble."""
CONNECT_S = 5.0


def make_client(args: argparse.Namespace, timeout: float | None = ASK_S) -> Client:
    """The client that --url and --runtime-dir ask for, else SHMSERVE_URL, else the default place."""
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
    """A client whose server is there; ConnectionLost where it is not."""
    with make_client(args) as client:
        client.metadata()
        yield client


def next_step(error: Exception, args: argparse.Namespace) -> str:
    """What failed, and what may help where it is known."""
    text = str(error).replace(" by url=", " by --url or --runtime-dir").replace(" by runtime_dir=", " by --runtime-dir")
    text = text.replace("server_key=", "--server-key").replace("key_file=", "--key-file")
    if text.startswith("Request for unknown model"):
        return f"{text}; `shmserve models` lists the models"
    if isinstance(error, DeadlineExceeded) and getattr(args, "timeout", None) is not None:
        return f"{text}; --timeout allows more"
    return text


def print_json(value: Any, indent: int | None = 2) -> None:
    print(json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False))
