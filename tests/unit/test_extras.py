"""The command that installs an extra, from a source directory and from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

from shmserve.extras import install_command
from tests import ROOT


def test_in_a_source_directory(tmp_path: Path) -> None:
    (tmp_path / "setup.cfg").touch()
    (tmp_path / "shmserve").mkdir()
    package = tmp_path / "shmserve"
    assert install_command("gpu", package, "/usr") == "pip install -e '.[gpu]' in the source directory"
    own = install_command("gpu", package, str(tmp_path / ".venv"))
    assert own == ".venv/bin/pip install -e '.[gpu]' in the source directory"


def test_as_an_installed_package(tmp_path: Path) -> None:
    assert install_command("gpu", tmp_path / "shmserve") == "pip install 'shmserve[gpu]'"


def test_all_texts_use_it() -> None:
    """No text names a package of an index for what was not published, and every extra exists."""
    extras = set(re.findall(r"^(\w+) =$", (ROOT / "setup.cfg").read_text().split("[options.extras_require]")[1], re.M))
    for folder in ("shmserve", "workers", "repo", "clients"):
        for file in (ROOT / folder).rglob("*.py"):
            source = file.read_text()
            if file != ROOT / "shmserve" / "extras.py":
                assert "pip install 'shmserve[" not in source, file
            assert set(re.findall(r"install_command\(\"(\w+)\"", source)) <= extras


def test_pages_install_from_the_source_directory() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        assert "pip install 'shmserve[" not in page.read_text(), page
