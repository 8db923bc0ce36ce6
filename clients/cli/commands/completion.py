"""Tab completion with argcomplete.

When the user presses tab, the shell function that argcomplete generates runs the command with the typed line in the
environment. If there is no server, or it does not answer in time, no completions are offered and no error is shown.
Invariant: argcomplete is imported only to print that shell function or to complete.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable
from typing import Any

from shmserve.clients.cli.commands.base import make_client
from shmserve.errors import ServeError
from shmserve.extras import install_command, outdated
from shmserve.paths import python
from shmserve.terminal.errors import Failed, Misuse

SHELLS = ("bash", "zsh", "fish")
QUERY_TIMEOUT_S = 2.0
"""Maximum time to wait for the server's answer when completing."""
_COMPLETION_VARIABLE = "_ARGCOMPLETE"
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")

Completer = Callable[..., "list[str]"]


def completion(args: argparse.Namespace) -> int:
    """`shmserve completion SHELL`: prints the shell code that enables completion."""
    try:
        from argcomplete.shell_integration import shellcode
    except ImportError as error:
        raise Failed(f"completion needs the package argcomplete: {install_command('cli')}") from error
    if old := outdated("cli", ["argcomplete"]):
        raise Failed(f"completion cannot be used: {old}")
    print(shellcode(["shmserve"], shell=args.shell))
    return 0


def completes(action: argparse.Action, completer: Completer) -> None:
    """Attaches the completer to the action, as the attribute that argcomplete reads."""
    action.completer = completer  # type: ignore[attr-defined]


def wanted() -> bool:
    """Whether the shell has run this process to get completions."""
    return _COMPLETION_VARIABLE in os.environ


def complete(parser: argparse.ArgumentParser) -> None:
    """Prints the completions and exits."""
    try:
        import argcomplete
    except ImportError:
        sys.exit(1)
    if re.match(r"\S+\s+serve\s", os.environ.get("COMP_LINE", "")):
        _add_options_of_serve(parser)
    argcomplete.autocomplete(parser, always_complete_options="long")


def _add_options_of_serve(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `serve`. The broker defines them, so they are read from its `--help-all`."""
    import subprocess

    command = [*python(), "-m", "shmserve.broker.main", "--help-all"]
    environment = {name: value for name, value in os.environ.items() if name != _COMPLETION_VARIABLE}
    help_page = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    commands: Any = next(action for action in parser._actions if action.dest == "command")
    serve = commands.choices["serve"]
    for option in sorted(set(_OPTION.findall(help_page.stdout)) - {"--help", "--help-all"}):
        serve.add_argument(option)


# ---------------------------------------------------------------------------------------- completers


def models(parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """Names of models that are not on the command line yet."""
    typed = getattr(parsed_args, "model", None) or []
    return sorted({entry["name"] for entry in _index(parsed_args)} - set(typed if isinstance(typed, list) else []))


def versions(parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    return [entry["version"] for entry in _of_model(parsed_args) if entry["version"]]


def instances(parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    return [result["name"] for entry in _of_model(parsed_args) for result in entry.get("instances", ())]


def _of_model(args: argparse.Namespace) -> list[dict[str, Any]]:
    typed = getattr(args, "model", None) or []
    names = typed if isinstance(typed, list) else [typed]
    return [entry for entry in _index(args) if not names or entry["name"] in names]


def _index(args: argparse.Namespace) -> list[dict[str, Any]]:
    try:
        with make_client(args, QUERY_TIMEOUT_S) as client:
            return client.models()
    except (Misuse, ServeError):
        return []
