"""What all commands print with, and how they find the server."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from shmserve.clients.sync import Client


def client_of(options: argparse.Namespace) -> Client:
    return Client(options.url, runtime_dir=options.runtime_dir, timeout=options.timeout, name="shmserve cli")


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Columns as wide as they must be; numbers to the right."""
    cells = [list(head), *[[_cell(value) for value in row] for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    right = [bool(rows) and all(isinstance(row[column], (int, float)) for row in rows) for column in range(len(head))]
    for row in cells:
        parts = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        print("  ".join(parts).rstrip())


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    return "" if value is None else str(value)


def as_json(value: Any) -> None:
    print(json.dumps(value, indent=2))
