"""What a flag of `shmserve serve` is. The tables of them are flags.py and gateway_flags.py."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

ENVIRONMENT = "SHMSERVE_"
UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


class Flag(Struct, frozen=True):
    """`kind` selects the parser, in flags.from_text. `triton`: its default there, where ours differs, and why.
    `compatible`: the value that it has with --triton-compatible. `instead`: deprecated, what to say now; `setting`: as
    which setting of that flag. `private`: for programs that start us. `gateway`: the option of `shmserve gateway` that
    it is passed on as. `note`: it has no effect, and what happens instead. `refused`: why it cannot be true."""

    name: str
    kind: str
    group: str
    help: str
    default: Any = None
    metavar: str = ""
    repeatable: bool = False
    choices: tuple[str, ...] = ()
    least: int = 0
    alias: str = ""
    shown: str = ""
    triton: str = ""
    instead: str = ""
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
        """As people write it; empty if there is none."""
        if self.shown or self.default in (None, [], ""):
            return self.shown
        if isinstance(self.default, bool):
            return str(self.default).lower()
        if self.kind == "bytes":
            unit = next(unit for unit in ("GiB", "MiB", "KiB", "") if not self.default % UNITS[unit.upper()])
            return f"{self.default // UNITS[unit.upper()]} {unit}".rstrip()
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)
