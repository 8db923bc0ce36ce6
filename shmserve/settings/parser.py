"""Makes argparse arguments of flags, in the groups of the table."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from shmserve.settings.flag import Flag
from shmserve.settings.values import Reader


def add_flags(
    parser: argparse.ArgumentParser,
    groups: Mapping[str, Sequence[Flag]],
    readers: Mapping[str, Reader],
    with_defaults: bool,
) -> None:
    """`with_defaults`: flags that are not set have their defaults; otherwise they are missing in the namespace."""
    for title, flags in groups.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            more: dict[str, Any] = {"action": "append"} if flag.repeatable else {}
            if flag.kind == "boolean":
                more = {"nargs": "?", "const": True}
            if with_defaults:
                more["default"] = flag.unset if flag.default is None else flag.default
            group.add_argument(
                f"--{flag.name}",
                *([f"--{flag.alias}"] if flag.alias else []),
                dest=flag.dest,
                type=checked(partial(readers[flag.kind], flag)),
                metavar=flag.metavar or "BOOL",
                help=argparse.SUPPRESS if flag.private else _help(flag),
                **more,
            )


def checked(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """The reader as an argparse type, which keeps the text of its errors."""

    def checked_value(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked_value


def _help(flag: Flag) -> str:
    text = flag.help_text
    if flag.default_text:
        text += f" ({'' if flag.default_text.startswith('required') else 'default: '}{flag.default_text})"
    return text.replace("%", "%%")
