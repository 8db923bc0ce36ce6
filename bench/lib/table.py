"""Rows of results, an anonymous description of the machine, and the page and JSON saved in bench/results.

Invariant: results contain no name of a host or user and no path.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shmserve.terminal import tables
from shmserve.version import version_of

RESULTS = Path(__file__).parents[1] / "results"
PACKAGES = ("numpy", "onnxruntime", "pyzmq", "msgspec", "uvloop")


@dataclass(frozen=True)
class Row:
    """One line of the table. `bound` is the limit for `value`, if there is one."""

    measure: str
    value: float | None
    unit: str
    at_least: float | None = None
    at_most: float | None = None
    beside: str = ""
    failed: str = ""
    skipped: str = ""
    """Why it was not measured."""
    others: float = 0.0
    """Cores used by processes outside the measure."""

    @property
    def verdict(self) -> str:
        if self.skipped:
            return "skipped"
        if self.failed or self.value is None:
            return "FAILED"
        if self.at_least is None and self.at_most is None:
            return "-"
        low = self.at_least is not None and self.value < self.at_least
        high = self.at_most is not None and self.value > self.at_most
        return "missed" if low or high else "ok"

    @property
    def bound(self) -> str:
        if self.at_least is not None:
            return f"at least {number(self.at_least)}"
        return f"at most {number(self.at_most)}" if self.at_most is not None else "-"


def failed_row(measure: str, error: Exception) -> Row:
    """The row of a measure that raised an error: its type, and the first line of its text."""
    return Row(measure, None, "", failed=f"{type(error).__name__}: {error}".splitlines()[0][:300])


def number(value: float | None) -> str:
    if value is None:
        return "-"
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) >= 10 else f"{value:.2f}"


def micros(value: float) -> str:
    return f"{value:,.0f} us" if value >= 10 else f"{value:.1f} us"


HEAD = ("measure", "value", "to reach", "", "beside it")


def cells(row: Row) -> tuple[str, ...]:
    value = "-" if row.value is None else f"{number(row.value)} {row.unit}".strip()
    return (row.measure, value, row.bound, row.verdict, row.failed or row.skipped or row.beside)


def plain(rows: list[Row]) -> str:
    """The table for a terminal."""
    return tables.table(HEAD, [cells(row) for row in rows])


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)


def machine() -> dict[str, str]:
    model, virtual = "unknown", False
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = value.strip()
        elif key.strip() == "flags":
            virtual = " hypervisor" in value
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cores": str(os.cpu_count()),
        "cpu": model + (" (virtual machine)" if virtual else ""),
        "memory": f"{memory:.0f} GiB",
        "kernel": "Linux " + ".".join(platform.release().split(".")[:2]),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "packages": ", ".join(f"{name} {version}" for name in PACKAGES if (version := version_of(name))),
    }


def host_kind() -> str:
    """Part of the file name: enough to distinguish machines, but not to identify them."""
    facts = machine()
    family = next(
        (name for name in ("epyc", "xeon", "ryzen", "core", "neoverse") if name in facts["cpu"].lower()), "cpu"
    )
    return f"{facts['cores']}-core-{family}" + ("-vm" if "virtual" in facts["cpu"] else "")


def save(rows: list[Row], command: str, notes: dict[str, Any], kind: str = "") -> Path:
    """Saves the results. `kind` is a suffix of the file name for results other than of all measures."""
    RESULTS.mkdir(exist_ok=True)
    return write(RESULTS / f"{_today()}-{host_kind()}{kind}", rows, command, notes)


def write(stem: Path, rows: list[Row], command: str, notes: dict[str, Any], about: str = "performance") -> Path:
    """Writes `stem`.md and `stem`.json. `about`: the page of docs/ that describes the lines."""
    today, facts = _today(), machine()
    page = [
        f"# Measured on {today}",
        "",
        f"Made by `{command}`. What each line means and how it is taken: docs/{about}.md.",
        "",
        *(f"- {key}: {value}" for key, value in {**facts, **{k: str(v) for k, v in notes.items()}}.items()),
        "",
        markdown(HEAD, map(cells, rows)),
        "",
    ]
    path = stem.with_name(f"{stem.name}.md")
    path.write_text("\n".join(page))
    record = {
        "date": today,
        "command": command,
        "machine": facts,
        "settings": notes,
        "rows": [{**asdict(row), "verdict": row.verdict} for row in rows],
    }
    stem.with_name(f"{stem.name}.json").write_text(json.dumps(record, indent=1) + "\n")
    return path


def _today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())
