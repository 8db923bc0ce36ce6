"""Files with many configurations, and golden files: expected texts that SHMSERVE_REWRITE=1 writes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path


def configurations(text: str) -> Iterator[tuple[int, str]]:
    """The configurations of a file: the line on which each begins, and its text.

    Each line that is not indented begins a configuration, which continues the lines before the first empty one. In the
    text of a configuration, every line has the number that it has in the file.
    """
    common = text.partition("\n\n")[0]
    for match in re.finditer(r"^[^\s#].*(?:\n .*)*", text, re.MULTILINE):
        if match.start() > len(common):
            before = text[: match.start()].count("\n")
            yield before + 1, common + "\n" * (before - common.count("\n")) + match[0]


def assert_golden(file: Path, found: list[str]) -> None:
    """Compare the lines of the file with `found`, or write them."""
    if os.environ.get("SHMSERVE_REWRITE"):
        file.write_text("".join(f"{line}\n" for line in found))
    assert found == file.read_text().splitlines()
