"""`shmserve drain`: takes the server out of service before an upgrade, and waits until it is empty."""

from __future__ import annotations

import argparse
import select
import sys
import time
from collections.abc import Mapping
from itertools import cycle
from typing import TYPE_CHECKING, Any

from shmserve.clients.cli.commands.base import StatusLine, complain, connected, counted, print_json
from shmserve.clients.cli.commands.operate import SPINNER
from shmserve.terminal.errors import Misuse

if TYPE_CHECKING:
    from shmserve.clients.queries import BlockingQueries

POLL_S = 0.25
SPIN_S = 0.1
REPORT_S = 1.0
"""Interval between lines of --json."""
UNTIL_QUIET_S = 5.0
"""A load balancer needs a few checks to notice, usually one per second."""

State = Mapping[str, Any]


def drain(args: argparse.Namespace) -> int:
    waits = args.timeout is not None or args.quiet is not None or not args.wait
    if args.undrain and waits:
        raise Misuse("--undrain cannot be combined with --no-wait, --timeout or --quiet")
    if not args.wait and (args.timeout is not None or args.quiet is not None):
        raise Misuse("--no-wait cannot be combined with --timeout or --quiet")
    with connected(args) as client:
        if args.undrain:
            return _done(args, client.undrain(), "the server is in service again")
        state = client.drain()
        if not args.wait:
            return _done(args, state, f"the server is out of service; {work_text(state)}")
        return _wait(args, client)


def _done(args: argparse.Namespace, state: State, text: str) -> int:
    if args.json:
        print_json(state, indent=None)
    else:
        print(text)
    return 0


def _wait(args: argparse.Namespace, client: BlockingQueries) -> int:
    quiet_s = UNTIL_QUIET_S if args.quiet is None else args.quiet
    with StatusLine(not args.json) as status:
        progress = _Progress(args.json, status, quiet_s)
        began = time.monotonic()
        while True:
            state = client.service()
            empty = state["out_of_service"] and state["quiet_seconds"] >= quiet_s
            waited = time.monotonic() - began
            timed_out = args.timeout is not None and waited >= args.timeout
            if empty or timed_out or not state["out_of_service"]:
                break
            remaining = POLL_S if args.timeout is None else min(POLL_S, args.timeout - waited)
            progress.show(state, max(remaining, 0.001))
    if args.json:
        print_json({**state, "empty": empty}, indent=None)
    if empty:
        if not args.json:
            print(f"the server is empty: {_no_request(quiet_s)}; stop it, or run `shmserve drain --undrain`")
        return 0
    if not state["out_of_service"]:
        complain(args, "the server was put back into service meanwhile")
    else:
        complain(args, f"not empty after {args.timeout:g} s: {work_text(state)}; the server stays out of service")
    return 1


class _Progress:
    """Shows the progress: on a terminal as one line that is updated, with --json as a line every REPORT_S."""

    def __init__(self, as_json: bool, status: StatusLine, quiet_s: float) -> None:
        self._json = as_json
        self._status = status
        self._quiet_s = quiet_s
        self._turns = cycle(SPINNER)
        self._next_report = 0.0

    def show(self, state: State, seconds: float) -> None:
        """Shows the state for this long."""
        now = time.monotonic()
        if self._json and now >= self._next_report:
            self._next_report = now + REPORT_S
            print_json({**state, "empty": False}, indent=None)
            sys.stdout.flush()
        end = now + seconds
        while (remaining := end - time.monotonic()) > 0:
            self._status.show(f"{next(self._turns)} draining for {state['seconds']:.0f} s: {self._text(state)}")
            select.select([], [], [], min(remaining, SPIN_S) if self._status.is_shown else remaining)

    def _text(self, state: State) -> str:
        quiet = state["quiet_seconds"]
        return f"{_no_request(quiet)} of {self._quiet_s:g} s" if quiet else work_text(state)


def _no_request(seconds: float) -> str:
    return f"no request for {seconds:.1f} s"


def work_text(state: State) -> str:
    """The server's remaining work, and its clients."""
    parts = [counted(state["requests"], "request"), counted(state["sequences"], "open sequence")]
    named = [f"{client['name'] or 'unnamed'} {client['in_flight']:,}" for client in state["clients"]]
    if named:
        parts[0] += f" ({', '.join(named)})"
    return ", ".join(parts)
