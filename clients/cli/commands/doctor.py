"""`shmserve doctor`: reports whether this machine can run a server, and the commands that fix problems."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from shmserve.clients.cli.commands.base import print_json, print_text, screen_of
from shmserve.clients.client import Client
from shmserve.doctor.checks import can_serve, examine
from shmserve.doctor.machine import ERROR, INFO, OK, WARNING, Finding, Machine
from shmserve.errors import ServeError
from shmserve.terminal.console import BAD, FAINT, GOOD, WARN, Column, Screen

STYLES = {OK: GOOD, INFO: FAINT, WARNING: WARN, ERROR: BAD}
COLUMNS = (
    Column("check"),
    Column("state", style=lambda state: STYLES[state]),
    Column("found", free=True),
    Column("needed", rank=1),
)


def doctor(args: argparse.Namespace) -> int:
    """Returns 0 if a server can run here, else 1."""
    findings = examine(Machine(runtime_dir=args.runtime_dir, ports_of=_ports_of))
    if args.json:
        print_json({"can_serve": can_serve(findings), "findings": msgspec.to_builtins(findings)})
    else:
        print_text(report(findings, screen_of(args)))
    return 0 if can_serve(findings) else 1


def _ports_of(runtime_dir: Path) -> Mapping[str, int] | None:
    try:
        with Client(runtime_dir=runtime_dir) as client:
            result: Mapping[str, int] = client.activity()["server"].get("ports", {})
            return result
    except ServeError:
        return None


def report(findings: Sequence[Finding], screen: Screen) -> str:
    """The table, and below it what to do, errors first."""
    rows = [[finding.check, finding.state, finding.found, finding.needed or "-"] for finding in findings]
    lines = [screen.table(COLUMNS, rows), ""]
    for state in (ERROR, WARNING, INFO):
        for finding in findings:
            if finding.state == state and finding.fix:
                lines += screen.wrapped(finding.fix, f"{finding.check}: ", "  ", STYLES[state])
    counts = {state: sum(finding.state == state for finding in findings) for state in (ERROR, WARNING)}
    verdict = "a server can run here" if can_serve(findings) else "a server cannot run here"
    return "\n".join([*lines, "", f"{verdict}: errors {counts[ERROR]}, warnings {counts[WARNING]}"])
