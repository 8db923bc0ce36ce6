"""A flag of `shmserve serve`, and perhaps of `shmserve gateway`. The table of flags is in table.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

ENVIRONMENT = "SHMSERVE_"
UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


class Flag(NamedTuple):
    """A flag, its parser and its documentation.

    - `kind`: selects the reader of the value.
    - `shown`: the default as shown to users, if it is not a value.
    - `triton`: Triton's default, if it differs, and the reason.
    - `compatible`: the default with --triton-compatible.
    - `replaced_by`: the replacement of a deprecated flag; `setting`: the replacement's setting.
    - `private`: for programs that start the server; not documented.
    - `note`: what happens instead, for a flag without effect.
    - `refused`: why the flag cannot be set to true.
    """

    name: str
    kind: str
    metavar: str
    help: str
    default: Any = None
    repeatable: bool = False
    choices: tuple[str, ...] = ()
    minimum: int = 0
    maximum: int = 2**63 - 1
    alias: str = ""
    shown: str = ""
    triton: str = ""
    compatible: Any = None
    replaced_by: str = ""
    setting: str = ""
    private: bool = False
    note: str = ""
    refused: str = ""

    @property
    def dest(self) -> str:
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        return ENVIRONMENT + self.dest.upper()

    @property
    def unset(self) -> Any:
        """The value of the flag if it is not set and has no default."""
        return [] if self.repeatable else None

    @property
    def help_text(self) -> str:
        if self.replaced_by:
            return f"deprecated: {self.help}"
        return f"{self.help}; repeatable" if self.repeatable else self.help

    @property
    def default_text(self) -> str:
        """The default as shown to users; empty if there is none."""
        if self.shown or self.default in (None, [], ""):
            return self.shown
        if isinstance(self.default, bool):
            return str(self.default).lower()
        if self.kind == "bytes" and self.default:
            return bytes_text(self.default)
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)


def nearest_name(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The known name that `name` probably stands for; "" if there is none."""
    from difflib import get_close_matches  # takes longer to import than the settings

    return next(iter(get_close_matches(name, list(known), 1, cutoff)), "")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean ...?`, or "" if no known name is similar."""
    near = nearest_name(name, known)
    return f"; did you mean {near}?" if near else ""


def bytes_text(size: int) -> str:
    """A number of bytes in the largest unit in which it is whole."""
    unit = next(unit for unit in ("GiB", "MiB", "KiB", "") if not size % UNITS[unit.upper()])
    return f"{size // UNITS[unit.upper()]} {unit}".rstrip()
