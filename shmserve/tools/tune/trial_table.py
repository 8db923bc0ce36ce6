"""The table of measured settings, and the chosen one."""

from __future__ import annotations

from collections.abc import Sequence

from shmserve.terminal.console import BAD, GOOD, Column, Screen


def trials_text(
    screen: Screen, columns: Sequence[Column], rows: Sequence[Sequence[str]], chosen: str, target: str
) -> str:
    """`chosen`: the setting and what it reaches; "" if no setting holds `target`."""
    end = screen.styled(chosen, GOOD) if chosen else screen.styled(f"No setting holds {target}.", BAD)
    return f"{screen.table(columns, rows)}\n\n{end}"


def marks(problem: str, is_chosen: bool, is_present: bool) -> str:
    texts = (problem, "chosen" if is_chosen else "", "present" if is_present else "")
    return ", ".join(filter(None, texts))
