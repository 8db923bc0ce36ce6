"""`shmserve trace`: records what ran when, and writes it as a timeline.

Invariant: the file appears complete or not at all.
"""

from __future__ import annotations

import argparse
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmserve.clients.cli.commands.base import StatusLine, complain, connected, next_step, print_json, print_text
from shmserve.errors import ServeError
from shmserve.system.files import new_file
from shmserve.terminal.errors import Failed

if TYPE_CHECKING:
    from shmserve.clients.queries import BlockingQueries
    from shmserve.tools.timeline import Collected

READ_S = 0.2
"""Interval at which records are read."""
VIEWER = "https://ui.perfetto.dev"


def trace(args: argparse.Namespace) -> int:
    from shmserve.tools.timeline import Collected, TraceTimeline, opened, summary, text, write

    collected = Collected(args.limit)
    with _new_file(args.output) as part:
        try:
            with connected(args) as client:
                about = _about(client)
                about["seconds"] = round(_record(args, client, collected), 3)
        except ServeError as error:
            raise Failed(next_step(error, args)) from error
        timeline = TraceTimeline(collected)
        about |= {"requests left out": collected.missing, "spans not shown": timeline.not_shown}
        with opened(part, args.output.suffix == ".gz") as file:
            write(file, timeline.events(), about)
    models = summary(collected)
    if args.json:
        print_json({"file": str(args.output), **_totals(collected), "seconds": about["seconds"], "models": models})
        return 0
    print_text(text(models))
    _report(args, collected, timeline.not_shown)
    return 0


def _report(args: argparse.Namespace, collected: Collected, not_shown: int) -> None:
    size = f"{args.output.stat().st_size / 1e6:.1f} MB"
    print_text(f"{args.output}: {_counts(collected)}, {size}; open it at {VIEWER}")
    if not collected.requests:
        complain(args, "no request ended meanwhile; send some, or record longer (--seconds)")
    if collected.missing:
        where = "--limit keeps more, --model records fewer"
        complain(args, f"{collected.missing:,} requests are left out, above the limit of {args.limit:,}; {where}")
    if not_shown:
        complain(args, f"{not_shown:,} requests have no row, as too many waited at once; the curve counts them")


def _counts(collected: Collected) -> str:
    return f"{collected.requests:,} requests in {len(collected.batches):,} batches"


def _totals(collected: Collected) -> dict[str, int]:
    return {"requests": collected.requests, "batches": len(collected.batches), "left_out": collected.missing}


def _about(client: BlockingQueries) -> dict[str, Any]:
    server = client.metadata()
    return {"server": server["name"], "version": server["version"], "recorded": time.strftime("%Y-%m-%dT%H:%M:%S%z")}


def _record(args: argparse.Namespace, client: BlockingQueries, collected: Collected) -> float:
    """Records until the time is over, or until Ctrl-C. Returns the duration in seconds."""
    number = client.record("start", models=args.model)["recording"]
    began = time.monotonic()
    with _interruptible() as interrupts, StatusLine() as status:
        while not interrupts and (remaining := began + args.seconds - time.monotonic()) > 0:
            select.select([], [], [], min(READ_S, remaining))
            _read(client, "read", number, collected)
            status.show(f"recording, {time.monotonic() - began:.0f} s: {_counts(collected)}")
        took = time.monotonic() - began
        _read(client, "stop", number, collected)
    return took


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Yields a list to which Ctrl-C appends, so that Ctrl-C interrupts no exchange with the server."""
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


def _read(client: BlockingQueries, do: str, number: int, collected: Collected) -> None:
    more = True
    while more:
        answer = client.record(do, number)
        collected.add(answer)
        more = answer["more"]


@contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """A file that only its owner can read, because it shows what other users do."""
    try:
        with new_file(path) as part:
            yield part
    except OSError as error:
        raise Failed(f"cannot write {path}: {error.strerror}; -o names another file") from error
