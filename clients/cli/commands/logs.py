"""`shmserve logs`: prints the latest records of the server's log, and with --follow also new ones.

Invariant: a record is printed once. The server numbers records, and each query asks for those after the last one read.
"""

from __future__ import annotations

import argparse
import select
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shmserve.clients.cli.commands.base import LEVELS, complain, connected, next_step, print_json, print_text, screen_of
from shmserve.errors import ConnectionLost, DeadlineExceeded, Unavailable
from shmserve.terminal.console import BAD, FAINT, WARN, Screen
from shmserve.terminal.errors import Failed
from shmserve.terminal.tables import visible

if TYPE_CHECKING:
    from shmserve.clients.queries import BlockingQueries

FOLLOW_S = 0.5
"""Polling interval of --follow."""
INDENT = "    "
STYLES = {"debug": FAINT, "warning": WARN, "error": BAD, "critical": BAD}
ELSEWHERE = "the log of a server that has ended is in its --log-file, or in `journalctl -u shmserve`"

Record = Mapping[str, Any]


def logs(args: argparse.Namespace) -> int:
    screen = screen_of(args)
    try:
        with connected(args) as client:
            reader = _Reader(args, client)
            records = list(reader.new())
            if args.model is not None and not records:
                client.statistics(args.model)  # raises if the model does not exist
            for record in records[-(args.lines or len(records)) :]:
                _print(args, record, screen)
            if args.follow:
                _follow(args, reader, screen)
    except ConnectionLost as error:
        raise Failed(f"{next_step(error, args)}; {ELSEWHERE}") from error
    return 0


class _Reader:
    """Reads records page by page."""

    def __init__(self, args: argparse.Namespace, client: BlockingQueries) -> None:
        self._args = args
        self._client = client
        self._after = 0
        self._started = 0
        """Number of the first record of the server process that answered last."""

    def new(self) -> Iterator[Record]:
        """The records since the last call."""
        more = True
        while more:
            answer = self._client.logs(self._args.model, self._after)
            if answer["lost"] and self._after:
                complain(self._args, f"{answer['lost']:,} records are no longer kept")
            if self._started and answer["started"] != self._started:
                complain(self._args, "the server was restarted")
            self._after, self._started, more = answer["next"], answer["started"], answer["more"]
            yield from filter(self._is_wanted, answer["records"])

    def _is_wanted(self, record: Record) -> bool:
        minimum = LEVELS.index(self._args.level)
        if self._args.instance not in (None, record.get("instance")):
            return False
        return LEVELS.index(record["level"]) >= minimum


def _follow(args: argparse.Namespace, reader: _Reader, screen: Screen) -> None:
    """Prints new records until Ctrl-C, and keeps trying while the server is unavailable."""
    was_available = True
    while True:
        sys.stdout.flush()
        select.select([], [], [], FOLLOW_S)
        try:
            for record in reader.new():
                _print(args, record, screen)
            was_available = True
        except (ConnectionLost, DeadlineExceeded, Unavailable) as error:
            if was_available:
                complain(args, f"{error}; waiting for the server")
            was_available = False


def _print(args: argparse.Namespace, record: Record, screen: Screen) -> None:
    if args.json:
        print_json(record, indent=None)
    else:
        print_text(record_text(record, screen))


def record_text(record: Record, screen: Screen) -> str:
    """The record as in the server's log: local time, level and text, then an indented traceback."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["time"]))
    style = STYLES.get(record["level"], "")
    head = screen.styled(f"{at},{int(record['time'] % 1 * 1000):03}", FAINT)
    level = screen.styled(record["level"].upper(), style)
    lines = [f"{head} {level} {screen.styled(visible(record['text']), style if style != FAINT else '')}"]
    lines += [INDENT + screen.styled(visible(line), FAINT) for line in record.get("traceback", "").splitlines()]
    return "\n".join(lines)
