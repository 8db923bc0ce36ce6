"""`shmserve ready`: its exit code says whether the server or a model accepts requests."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from shmserve.clients.cli.commands.base import (
    complain,
    connected,
    make_client,
    next_step,
    output,
    print_json,
    screen_of,
)
from shmserve.clients.waiting import OUT_OF_SERVICE, degraded, failed_changes, shortened, why_not_ready
from shmserve.errors import ConnectionLost, DeadlineExceeded, Denied, Unavailable
from shmserve.terminal.console import BAD, GOOD, WARN, Screen
from shmserve.terminal.errors import Misuse

if TYPE_CHECKING:
    from shmserve.clients.queries import BlockingQueries

REASONS = 10
"""Maximum number of reasons to print."""
UNKNOWN = "it is starting or stopping"

State = Mapping[str, Any]
"""Keys: model (None: the server), ready, reasons (why not), warnings."""


def ready(args: argparse.Namespace) -> int:
    if args.wait is not None:
        if args.watch is not None:
            raise Misuse("--wait and --watch cannot be combined")
        return _wait(args)
    with connected(args) as client:
        if args.watch is not None:
            return output(args, lambda: _state(args.model, client), ready_text)
        return _report(args, _state(args.model, client))


def _wait(args: argparse.Namespace) -> int:
    with make_client(args) as client:
        try:
            client.wait_ready(args.model, timeout=args.wait)
        except (DeadlineExceeded, Unavailable) as error:
            head, _, why = next_step(error, args).partition(": ")
            reasons = why_not_ready(args.model, _index(client)) or [why or head]
            return _report(args, {"model": args.model, "ready": False, "reasons": reasons, "warnings": []}, head)
        warnings = _warnings(args.model, _index(client))
        return _report(args, {"model": args.model, "ready": True, "reasons": [], "warnings": warnings})


def _state(model: str | None, client: BlockingQueries) -> State:
    result = client.ready(model)
    index = _index(client)
    return {
        "model": model,
        "ready": result,
        "reasons": [] if result else _drained(model, client) or why_not_ready(model, index) or [UNKNOWN],
        "warnings": _warnings(model, index) if result else [],
    }


def _drained(model: str | None, client: BlockingQueries) -> list[str]:
    """That the server is out of service, as a reason, if it is. The readiness of a model does not depend on this."""
    with suppress(ConnectionLost, Denied, DeadlineExceeded):  # the role infer does not include `service`
        if model is None and client.service()["out_of_service"]:
            return [OUT_OF_SERVICE]
    return []


def _index(client: BlockingQueries) -> list[dict[str, Any]]:
    try:
        return client.models()
    except (ConnectionLost, Denied, DeadlineExceeded):  # the role infer does not include `models`
        return []


def _warnings(model: str | None, index: list[dict[str, Any]]) -> list[str]:
    return [*degraded(model, index), *failed_changes(model, index)]


def _report(args: argparse.Namespace, state: State, head: str = "") -> int:
    """`head`: replaces the default text for what is not ready."""
    if args.json:
        print_json(state)
    elif state["ready"]:
        print(screen_of(args).styled(f"{_what(state)} is ready", GOOD))
        for text in state["warnings"]:
            complain(args, f"warning: {text}")
    else:
        first, *others = not_ready_lines(state, head)
        complain(args, first)
        print(*others, sep="\n", end="\n" if others else "", file=sys.stderr)
    return 0 if state["ready"] else 1


def _what(state: State) -> str:
    return f"model '{state['model']}'" if state["model"] else "the server"


def not_ready_lines(state: State, head: str = "") -> list[str]:
    """One line for a single reason, otherwise one line for each of the first REASONS."""
    head, reasons = head or f"{_what(state)} is not ready", [shortened(reason) for reason in state["reasons"]]
    if len(reasons) == 1:
        return [head if reasons[0] == head else f"{head}: {reasons[0]}"]
    more = [f"  and {len(reasons) - REASONS:,} more; `shmserve models` lists them"] if len(reasons) > REASONS else []
    return [f"{head}; {len(reasons):,} reasons:", *(f"  {reason}" for reason in reasons[:REASONS]), *more]


def ready_text(state: State, screen: Screen) -> str:
    """The screen of --watch."""
    if not state["ready"]:
        first, *others = not_ready_lines(state)
        return "\n".join([screen.styled(first, BAD), *others])
    warnings: Sequence[str] = state["warnings"]
    lines = [screen.styled(f"warning: {shortened(text)}", WARN) for text in warnings]
    return "\n".join([screen.styled(f"{_what(state)} is ready", GOOD), *lines])
