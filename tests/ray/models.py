"""The models of these tests. Each response names its process, which identifies the node."""

from __future__ import annotations

from pathlib import Path

from tests.support import load
from tests.support.living import group

PID = "os.getpid()"


def write_times(
    root: Path, name: str, factor: float = 2.0, seconds: float = load.WORK_S, more: str = "", load_seconds: float = 0.0
) -> None:
    """y[0] = factor * x, y[1] = pid."""
    load.write_times(root, name, PID, factor, seconds, group(1) + more, f"select.select([], [], [], {load_seconds})")
