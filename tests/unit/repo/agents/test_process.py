"""The output of one agent process."""

from __future__ import annotations

import os

from shmserve.repo.agents.process import _Output


def test_a_read_ends_while_the_process_continues_to_print() -> None:
    """Otherwise its time limit is not enforced."""
    printed, end = os.pipe()
    os.set_blocking(printed, False)
    lines: list[str] = []

    def line(text: str) -> None:
        lines.append(text)
        os.write(end, b"again\n")

    try:
        output = _Output(line)
        os.write(end, b"first\n")
        assert output.read(printed)
        assert lines == ["first"]
        assert output.read(printed)
        assert lines == ["first", "again"]
    finally:
        os.close(printed)
        os.close(end)
