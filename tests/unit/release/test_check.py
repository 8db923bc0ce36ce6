"""Obstacles to a release, in a repository that the test creates."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from deploy.release.check import NAMED, main, problems
from tests import ROOT

SETUP = """[metadata]
name = shmserve
version = 1.2.3
url = https://example.org/shmserve
project_urls =
    Changes = https://example.org/shmserve/changes
"""
CHANGES = """# Changelog

## Unreleased

## 1.2.3 - 2026-11-23

### Added

- A line.
"""


def git(root: Path, *words: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", *identity, *words], cwd=root, check=True, capture_output=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "setup.cfg").write_text(SETUP)
    (tmp_path / "CHANGELOG.md").write_text(CHANGES)
    for name, lines in NAMED.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("\n".join(line.format("1.2.3") for line in lines))
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message=release")
    return tmp_path


def test_versions_tags_and_changes_of_the_checkout(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert problems(root, "1.2.3") == []
    git(root, "tag", "v1.2.3")
    assert problems(root, "1.2.3") == []
    for version in ("1.2", "v1.2.3", "1.2.3-rc1", "../1", ""):
        assert problems(root, version) == [f"'{version}' is not a version such as 1.2.3 or 1.2.3rc1"]
    assert problems(root, "1.3.0") == [
        "setup.cfg: version is 1.2.3, not 1.3.0",
        *(f"{name}: no line '{line.format('1.3.0').strip()}'" for name, lines in NAMED.items() for line in lines),
        "CHANGELOG.md: no section '## 1.3.0 - YYYY-MM-DD'",
    ]
    git(root, "commit", "--quiet", "--allow-empty", "--message=more")
    (root / "new").touch()
    changed, tagged = sorted(problems(root, "1.2.3"))
    assert changed == "git: the checkout has changes that are not committed"
    assert tagged.startswith("git: the tag v1.2.3 is at another commit, ")
    assert main([]) == 2
    assert "VERSION=X.Y.Z" in capsys.readouterr().err


def test_every_file_of_this_tree_names_the_version() -> None:
    assert [problem for problem in problems(ROOT, "0.1.0") if "no line" in problem] == []


def test_only_the_documented_problems_remain_in_this_tree() -> None:
    """What is missing is the first step of docs/releases.md, until the repository is public."""
    found = [problem for problem in problems(ROOT, "0.1.0") if problem.startswith("setup.cfg")]
    assert all("which PyPI shows" in problem for problem in found)
    assert not found or "Set `url` and `project_urls`" in (ROOT / "docs" / "releases.md").read_text()
