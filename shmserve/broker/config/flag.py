"""A flag of `shmserve serve`. The tables of flags are in flags.py, triton_flags.py and shmserve/gateway_options.py."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

ENVIRONMENT = "SHMSERVE_"
UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


class Flag(Struct, frozen=True):
    """A flag, its parser and its documentation.

    - `kind`: selects the parser in flags.from_text.
    - `triton`: Triton's default, if it differs, and the reason.
    - `compatible`: the default with --triton-compatible.
    - `replaced_by`: the replacement of a deprecated flag; `setting`: the replacement's setting.
    - `private`: for programs that start the server; not documented.
    - `gateway`: the option of `shmserve gateway` that receives the value.
    - `note`: what happens instead, for a flag without effect.
    - `refused`: why the flag cannot be set to true.
    """

    name: str
    kind: str
    group: str
    help: str
    default: Any = None
    metavar: str = ""
    repeatable: bool = False
    choices: tuple[str, ...] = ()
    minimum: int = 0
    maximum: int | None = None
    alias: str = ""
    shown: str = ""
    triton: str = ""
    replaced_by: str = ""
    private: bool = False
    gateway: str = ""
    compatible: Any = None
    setting: str = ""
    note: str = ""
    refused: str = ""

    @property
    def dest(self) -> str:
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        return ENVIRONMENT + self.dest.upper()

    @property
    def default_text(self) -> str:
        """The default as shown to users; empty if there is none."""
        if self.shown or self.default in (None, [], ""):
            return self.shown
        if isinstance(self.default, bool):
            return str(self.default).lower()
        if self.kind == "bytes" and self.default:
            unit = next(unit for unit in ("GiB", "MiB", "KiB", "") if not self.default % UNITS[unit.upper()])
            return f"{self.default // UNITS[unit.upper()]} {unit}".rstrip()
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)
