"""docs/operations.md: what it quotes is what the server says. The oracles are the source and the table of errors."""

from __future__ import annotations

import ast
import re

import pytest

from shmserve.errors import BY_CODE
from tests import ROOT

PAGE = (ROOT / "docs" / "operations.md").read_text()
SERVICE = (ROOT / "systemd" / "shmserve.service").read_text()
INSTALLS = (
    "/opt/shmserve",
    "/usr/lib/systemd/system",
    "/etc/shmserve",
    "/srv/shmserve/models",
    "/usr/local/bin/shmserve",
)
NUMBERS = (
    "WatchdogSec=30",
    "RestartSec=1",
    "StartLimitBurst=10",
    "StartLimitIntervalSec=300",
    "RestartPreventExitStatus=2",
    "LimitNOFILE=65536",
)


def spoken() -> str:
    """All constant text of the source, each f-string as one text with a mark for what is filled in."""
    texts = []
    for folder in ("shmserve", "workers", "repo", "clients"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values]
                    texts.append("".join(parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
    return "\n".join(texts)


def rows(header: str) -> list[str]:
    """The quoted words of the first column of the table with that header."""
    table = PAGE.partition(f"| {header} |")[2].partition("\n\n")[0]
    return [word for line in table.splitlines()[2:] for word in re.findall(r"`([^`]*)`", line.split("|")[1])]


def test_every_quoted_text_is_said() -> None:
    said = spoken()
    quoted = rows("Text")
    assert len(quoted) > 10
    assert not [text for text in quoted if text not in said]


def test_every_code_has_its_row() -> None:
    client = {"CANCELLED", "UNKNOWN", "ALREADY_EXISTS"}
    """Those that no operator sees."""
    assert set(rows("Code")) == set(BY_CODE) - client


@pytest.mark.parametrize("setting", NUMBERS)
def test_the_numbers_are_those_of_the_unit(setting: str) -> None:
    assert f"\n{setting}\n" in SERVICE


@pytest.mark.parametrize("place", INSTALLS)
def test_the_places_are_those_of_make(place: str) -> None:
    made = (ROOT / "Makefile").read_text() + (ROOT / "systemd" / "tmpfiles.d" / "shmserve.conf").read_text()
    assert place in PAGE
    assert place in made
