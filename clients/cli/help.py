"""The argument parser of a command: short help, full help, and suggestions for misspelled words.

`--help` fits a terminal of 24 lines and 80 columns; `--help-all` lists everything. Invariant: only what `--help` needs
is imported here.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from shmserve.settings.flag import did_you_mean
from shmserve.terminal.help_text import LEFT, rows, width

SYNONYMS = {
    "benchmark": "bench",
    "list": "models",
    "ls": "models",
    "metrics": "stats",
    "perf": "bench",
    "predict": "infer",
    "ps": "models",
    "reload": "load",
    "start": "serve",
    "status": "models",
    "tail": "logs",
    "validate": "check",
}
"""Commands of other programs -> the command of this one."""

EXAMPLES = 3
"""Maximum number of examples in the short help."""


def make_rare(action: argparse.Action) -> argparse.Action:
    """Leaves the option out of `--help`; `--help-all` lists it."""
    action.rare = True  # type: ignore[attr-defined]
    return action


def rare(add: Callable[..., argparse.Action], *names: str, **more: Any) -> argparse.Action:
    """Adds an option that is left out of `--help`."""
    return make_rare(add(*names, **more))


class _HelpAll(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **more: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, **more)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, CommandParser)
        sys.stdout.write(parser.format_all())
        parser.exit()


class CommandParser(argparse.ArgumentParser):
    """`examples`: lines of the help. `also`: a row for options that `--help` does not list individually. `overview`
    replaces the list of arguments in `--help`. `synonyms`: options of other programs -> the option of this command."""

    def __init__(
        self,
        examples: str = "",
        also: tuple[str, str] | None = None,
        overview: Callable[[], list[str]] | None = None,
        synonyms: Mapping[str, str] = {},
        **more: Any,
    ) -> None:
        super().__init__(
            allow_abbrev=False, add_help=False, formatter_class=argparse.RawDescriptionHelpFormatter, **more
        )
        self.examples = [line for line in examples.splitlines() if line.strip()]
        self.also = also
        self._overview = overview
        self.synonyms = synonyms
        rare(self.add_argument, "-h", "--help", action="help", help="show the usual options")
        rare(self.add_argument, "--help-all", action=_HelpAll, help="show all options")

    # ------------------------------------------------------------------------------------ help

    def format_usage(self) -> str:
        if self._overview is not None:
            return f"usage: {self.prog} COMMAND [OPTIONS]\n"
        words = [self.prog]
        for action in self._actions:
            if action.required and action.option_strings:
                words.append(f"{action.option_strings[0]} {_metavar(action)}")
        words += [_positional(action) for action in self._actions if not action.option_strings]
        return f"usage: {' '.join(words)} [OPTIONS]\n"

    def format_help(self) -> str:
        if self._overview is not None:
            return "\n".join([self.format_usage().rstrip(), *self._overview()]) + "\n"
        shown = [action for action in self._actions if not getattr(action, "rare", False)]
        known = [action for action in shown if action.help and action.help is not argparse.SUPPRESS]
        pairs = [(names_of(action), _first_text(action)) for action in known]
        lines = [self.format_usage(), *textwrap.wrap(self.description or "", width()), ""]
        lines += rows([*pairs, *([self.also] if self.also else [])])
        if self.examples:
            lines += ["", "examples:", *[line for line in self.examples if len(line) <= width()][:EXAMPLES]]
        lines.append(f"\n`{self.prog} --help-all` has all options, examples and the exit codes")
        return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"

    def format_all(self) -> str:
        return super().format_help()

    # ------------------------------------------------------------------------------------ errors

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: error: {message}\n`{self.prog} --help` explains its use\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        known = list(action.choices or ())
        if isinstance(action, argparse._SubParsersAction) and value not in known:
            meant = SYNONYMS.get(value)
            hint = f"; did you mean {meant}?" if meant in known else did_you_mean(value, known)
            self.error(f"unknown command '{value}'{hint}")
        super()._check_value(action, value)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        result, rest = self.parse_known_args(args, namespace)
        if rest:
            command = self._command(getattr(result, "command", None))
            unknown = "; ".join(command.stray(word) for word in rest if word.startswith("-"))
            command.error(unknown or f"too many arguments: {' '.join(rest)}")
        return result

    def _command(self, name: str | None) -> CommandParser:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and name in action.choices:
                command: CommandParser = action.choices[name]
                return command
        return self

    def stray(self, word: str) -> str:
        """The error text for an unknown option."""
        name = word.partition("=")[0]
        meant = self.synonyms.get(name)
        hint = f"; did you mean {meant}?" if meant else did_you_mean(name, sorted(self._option_string_actions))
        return f"unknown option {name}{hint}"


def _metavar(action: argparse.Action) -> str:
    if action.metavar is None:
        return f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper()
    return action.metavar if isinstance(action.metavar, str) else " ".join(action.metavar)


def _positional(action: argparse.Action) -> str:
    name = _metavar(action)
    return {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} [{name} ...]"}.get(str(action.nargs), name)


def names_of(action: argparse.Action) -> str:
    """The argument as it appears in the list, e.g. `-i, --input NAME=VALUE`."""
    if not action.option_strings:
        return _metavar(action)
    names = ", ".join(action.option_strings)
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return names
    return f"{names} [{_metavar(action)}]" if action.nargs == "?" else f"{names} {_metavar(action)}"


def _first_text(action: argparse.Action) -> str:
    """The help up to `; `, which separates the main text from details, and without the default if it is long."""
    text = (action.help or "").partition("; ")[0] % {"default": action.default}
    return text if len(text) <= width() - LEFT - 4 else text.partition(" (")[0]
