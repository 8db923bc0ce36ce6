"""docs/operations.md quotes texts, codes and settings as they are in the source."""

from __future__ import annotations

import ast
import re

from shmserve.errors import BY_CODE
from tests import ROOT

PAGE = (ROOT / "docs" / "operations.md").read_text()
SERVICE = (ROOT / "systemd" / "shmserve.service").read_text()


def string_constants() -> str:
    """All string constants of the source; values in f-strings are written {}."""
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


def test_quoted_texts_are_in_the_source() -> None:
    source = string_constants()
    quoted = rows("Text")
    assert len(quoted) > 10
    assert not [text for text in quoted if text not in source]


def test_codes_settings_and_paths_are_those_of_the_source() -> None:
    client = {"CANCELLED", "UNKNOWN", "ALREADY_EXISTS"}  # not relevant to operators
    assert set(rows("Code")) == set(BY_CODE) - client
    numbers = "WatchdogSec=30 RestartSec=1 StartLimitBurst=10 StartLimitIntervalSec=300 RestartPreventExitStatus=2"
    for setting in (*numbers.split(), "LimitNOFILE=65536"):
        assert f"\n{setting}\n" in SERVICE
    made = (ROOT / "Makefile").read_text() + (ROOT / "systemd" / "tmpfiles.d" / "shmserve.conf").read_text()
    places = "/opt/shmserve /usr/lib/systemd/system /etc/shmserve /srv/shmserve/models /usr/local/bin/shmserve"
    assert [place for place in places.split() if place not in PAGE or place not in made] == []
