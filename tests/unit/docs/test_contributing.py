"""The tables of CONTRIBUTING.md name the files that a change of their kind touches."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import ROOT

EXAMPLES = {
    "A backend": r"\bpaddle\b",
    "An endpoint": r"\bLogSettings\b|\bSET_LOG\b",
    "A field of `config.pbtxt`": r"\bmax_inflight_requests\b",
    "A model parameter": r"\bstay_loaded\b|\bSTAY_LOADED\b",
    "A metric": r"padded_elements",
    "A command": r"\badd_keygen\b|\"keygen\"",
    "A setting": r"\brepository[-_]poll[-_]secs\b",
}
"""Section -> what finds an existing member of its kind in the source."""
SECTIONS = dict(re.findall(r"(?ms)^### (.*?)\n(.*?)(?=^##|\Z)", (ROOT / "CONTRIBUTING.md").read_text()))
SOURCES = [
    path
    for folder in ("clients", "deploy", "repo", "shmserve", "workers")
    for path in sorted((ROOT / folder).glob("**/*"))
    if path.suffix in (".py", ".proto")
] + [ROOT / "setup.cfg"]


def named(section: str) -> list[str]:
    """The files and folders in the first column of a table, and in the text beside them."""
    return re.findall(r"`([a-z_]+(?:/[a-z_.]*)*\.?[a-z]*)`", SECTIONS[section])


def having(pattern: str) -> list[Path]:
    return [path.relative_to(ROOT) for path in SOURCES if re.search(pattern, path.read_text())]


def test_every_table_has_an_example() -> None:
    assert EXAMPLES.keys() == SECTIONS.keys()


@pytest.mark.parametrize("section", EXAMPLES)
def test_a_table_names_all_files_of_a_member_of_its_kind(section: str) -> None:
    files, found = named(section), having(EXAMPLES[section])
    assert len(found) > 1
    folders = tuple(name for name in files if name.endswith("/"))
    assert [path for path in map(str, found) if path not in files and not path.startswith(folders)] == []
