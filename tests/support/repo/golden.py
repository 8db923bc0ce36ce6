"""Golden files: expected texts that SHMSERVE_REWRITE=1 writes."""

from __future__ import annotations

import os
from pathlib import Path


def assert_golden(file: Path, found: list[str]) -> None:
    """Compare the lines of the file with `found`, or write them."""
    if os.environ.get("SHMSERVE_REWRITE"):
        file.write_text("".join(f"{line}\n" for line in found))
    assert found == file.read_text().splitlines()
