"""`shmserve check`: reports problems in model repositories before they are served; with --load, also by loading the
models.

Invariant: this module implements no checks. It runs `repo.check` and, with --load, a temporary server, and prints the
findings.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmserve.clients.cli.commands.base import StatusLine, counted, output
from shmserve.errors import ConnectionLost, InvalidRequest
from shmserve.repo.gpus import discover
from shmserve.terminal.console import BAD, FAINT, GOOD, WARN, Screen
from shmserve.terminal.errors import Failed, Misuse

if TYPE_CHECKING:
    from shmserve.clients.cli.temporary_server import TemporaryServer
    from shmserve.clients.client import Client
    from shmserve.repo.check import Checked, CheckedModel, CheckFinding
    from shmserve.repo.config.schema import ModelConfig

ASK_S = 10.0
TICK_S = 0.2
"""Refresh interval of the progress line."""
LOG_LINES = 20
"""Maximum number of a worker's last log lines to show."""
_OF_WORKER = re.compile(r"\S+ \S+ (?P<ours>ERROR)?[A-Z]* \[(?P<group>.+?)_\d+\] (?(ours)(?:  )?)(?P<text>.*)")

Entry = Mapping[str, Any]
"""A model version, as returned by `Client.models`."""


def check(args: argparse.Namespace) -> int:
    """Returns 0 if there are no errors (with --strict, nor warnings), else 1. Raises Misuse for invalid arguments."""
    from shmserve.repo.check import as_json

    if args.load and args.watch is not None:
        raise Misuse("--load and --watch cannot be combined: every model would be loaded again and again")
    if args.load and args.target is not None:
        raise Misuse("--load and --target cannot be combined: the models would be loaded on this machine")
    bad = 0

    def ask() -> Checked:
        nonlocal bad
        checked = _checked(args)
        bad = checked.count("error") + (checked.count("warning") if args.strict else 0)
        return checked

    output(args, ask, lambda checked, screen: checked_text(checked, args.quiet, args.strict, screen), as_json)
    return 1 if bad else 0


def _checked(args: argparse.Namespace) -> Checked:
    roots = [Path(root) for root in args.roots]
    try:
        checked = _check(args, roots)
    except InvalidRequest as error:
        raise Misuse(str(error)) from error
    return _with_load(roots, checked, args) if args.load else checked


def _check(
    args: argparse.Namespace, roots: Sequence[Path], completed: Mapping[str, ModelConfig] | None = None
) -> Checked:
    """The problems that a server with these options would have. `completed`: the configurations of loaded models."""
    from shmserve.repo.check import check

    return check(
        roots,
        backends=_backends(args),
        gpus=discover().numbers if args.target is None else args.target,
        directory=args.backend_directory or "",
        config_name=args.model_config_name,
        completed=completed,
        policies=None if args.host_policy is None else [text.partition(",")[0] for text in args.host_policy],
        namespacing=args.model_namespacing,
    )


def _backends(args: argparse.Namespace) -> frozenset[str]:
    from shmserve.repo.backends import backend_directory_problem, installed

    directory = args.backend_directory
    fault = backend_directory_problem(directory) if directory else ""
    if fault:
        raise Misuse(f"--backend-directory {fault}")
    return installed(directory or "")


# ------------------------------------------------------------------------------------------------- text output


def checked_text(checked: Checked, quiet: bool, strict: bool, screen: Screen) -> str:
    """The findings. `quiet`: only those that make the check fail."""
    shown = ("error", "warning") if strict or not quiet else ("error",)
    lines = [line for finding in checked.findings for line in _finding_lines(finding, "", shown, screen)]
    width = max((len(model.full_name) for model in checked.models), default=0)
    for model in checked.models:
        if not quiet:
            problems = _counted(model.findings)
            style = BAD if not model.ok else WARN if problems else GOOD
            lines.append(f"{model.full_name.ljust(width)}  {screen.styled(problems or 'ok', style)}")
        for finding in model.findings:
            lines += _finding_lines(finding, "" if quiet else "  ", shown, screen)
    if not quiet:
        total = counted(len(checked.models), "model")
        lines.append(f"{total} checked, {_counted(checked.all()) or 'no problems'}")
    return "\n".join(lines)


def _finding_lines(finding: CheckFinding, indent: str, shown: Sequence[str], screen: Screen) -> list[str]:
    if finding.severity not in shown:
        return []
    severity = "warning" if finding.severity == "warning" else ""
    text = ": ".join(part for part in (finding.where, severity, finding.path, finding.text) if part)
    style = WARN if severity else BAD
    lines = screen.wrapped(text, indent, f"{indent}    ", style)
    if finding.hint:
        lines += screen.wrapped(f"-> {finding.hint}", f"{indent}    ", f"{indent}       ")
    for line in finding.log:
        lines += screen.wrapped(f"| {line}", f"{indent}    ", f"{indent}    | ", FAINT)
    return lines


def _counted(findings: Sequence[CheckFinding]) -> str:
    errors = sum(finding.severity == "error" for finding in findings)
    parts = [counted(errors, "error")] if errors else []
    if len(findings) > errors:
        parts.append(counted(len(findings) - errors, "warning"))
    return ", ".join(parts)


# -------------------------------------------------------------------------------------------------- loading


def _with_load(roots: Sequence[Path], checked: Checked, args: argparse.Namespace) -> Checked:
    """Loads the models in a temporary server. Adds their failures, and checks again with the configurations that the
    backends completed, which ensembles depend on."""
    from shmserve.clients.cli.temporary_server import TemporaryServer, ended_in_order

    options = ["--model-config-name", args.model_config_name] if args.model_config_name else []
    options += ["--model-namespacing", "true"] if args.model_namespacing else []
    options += ["--backend-directory", str(args.backend_directory)] if args.backend_directory else []
    if not any(model.versions and not model.ensemble for model in checked.models):
        return checked
    with ended_in_order(), TemporaryServer(roots, options) as server, server.client(ASK_S) as client:
        quiet = args.quiet or args.json
        with StatusLine(not quiet) as status:
            progress = _Progress(quiet, status)
            _await_load(server, client, args.timeout, progress)
            index = client.models()
            progress.show(index)
        completed = _completed(client, index)
        log = server.log
    return _judged(_check(args, roots, completed), index, _lines_of_workers(log), args.timeout)


def _await_load(server: TemporaryServer, client: Client, timeout: float | None, progress: _Progress) -> None:
    """Waits until no model is loading, or `timeout` has passed since the server first answered."""
    from shmserve.clients.cli.temporary_server import START_S

    deadline = time.monotonic() + START_S
    up = False
    while not server.ready(max(0.0, min(TICK_S, deadline - time.monotonic()))):
        try:
            progress.show(client.models())
        except ConnectionLost as error:  # the server has not opened its sockets yet
            if time.monotonic() >= deadline:
                raise Failed(f"the temporary server did not start within {START_S:g} s") from error
            continue
        if not up:
            up = True
            deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        if time.monotonic() >= deadline:
            return


def _completed(client: Client, index: Sequence[Entry]) -> dict[str, Any]:
    """The configuration of each loaded model, as completed by its backend."""
    from shmserve.repo.config.schema import from_triton_json

    return {
        entry["name"]: from_triton_json(client.config(entry["name"], entry["version"]))
        for entry in index
        if entry["state"] == "READY"
    }


def _judged(
    checked: Checked, index: Sequence[Entry], lines: Mapping[str, Sequence[str]], timeout: float | None
) -> Checked:
    entries: dict[str, list[Entry]] = {}
    for entry in index:
        entries.setdefault(entry["name"], []).append(entry)
    models = []
    for model in checked.models:
        failures = [
            finding
            for entry in entries.get(model.full_name, ())
            for finding in _failed(model, entry, lines, timeout)
            if not model.ensemble
        ]
        models.append(model._replace(findings=(*model.findings, *failures)))
    return checked._replace(models=tuple(models))


def _failed(
    model: CheckedModel, entry: Entry, lines: Mapping[str, Sequence[str]], timeout: float | None
) -> list[CheckFinding]:
    from shmserve.repo.check import CheckFinding

    if entry["state"] == "READY" or not entry["state"]:
        return []
    if not entry["version"] and not model.ok:  # refused because of a problem that is already listed
        return []
    file = f"{model.name}/{entry['version']}".rstrip("/")
    hint = ""
    if entry["state"] == "LOADING" and timeout is not None:
        text, hint = f"not loaded within {timeout:g} s", "--timeout allows more"
    else:
        text = f"could not be loaded: {entry['reason'] or entry['state']}"
    last = [line for instance in entry.get("instances", ()) for line in instance["last_words"]]
    if not last:  # no process has exited yet
        last = [line for group in model.groups for line in lines.get(group, ())]
    return [CheckFinding(model.name, "error", model.repository, file, 0, 0, "", text, hint, tuple(last[-LOG_LINES:]))]


def _lines_of_workers(log: str) -> dict[str, list[str]]:
    """Output of the instances, by instance group."""
    lines: dict[str, list[str]] = {}
    for line in log.split("\n"):
        match = _OF_WORKER.fullmatch(line)
        if match:
            lines.setdefault(match["group"], []).append(match["text"])
    return lines


class _Progress:
    """Progress of loading, on stderr: one updated line on a terminal, else one line per loaded or failed version."""

    def __init__(self, quiet: bool, status: StatusLine) -> None:
        self._quiet = quiet
        self._status = status
        self._reported: set[tuple[str, str]] = set()
        self._started = time.monotonic()

    def show(self, index: Sequence[Entry]) -> None:
        if self._quiet:
            return
        versions = [entry for entry in index if entry["version"]]
        loading = [entry for entry in versions if entry["state"] == "LOADING"]
        seconds = time.monotonic() - self._started
        if self._status.is_shown:
            names = ", ".join(f"{entry['name']} {entry['version']}" for entry in loading[:3])
            more = ", ..." if len(loading) > 3 else ""
            done = len(versions) - len(loading)
            self._status.show(
                f"loading: {done} of {len(versions)}, {seconds:.0f} s" + (f" ({names}{more})" if names else "")
            )
            return
        for entry in versions:
            key = (entry["name"], entry["version"])
            if entry["state"] != "LOADING" and key not in self._reported:
                self._reported.add(key)
                line = f"[{len(self._reported)}/{len(versions)}] {' '.join(key)} {entry['state']} after {seconds:.1f} s"
                print(line, file=sys.stderr, flush=True)
