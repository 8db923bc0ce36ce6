"""Every scenario file against the core. SHMSERVE_REWRITE=1 writes the results to the files, so that one can review the
diff."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.core.scenarios.files import play

FOLDER = ROOT / "tests" / "scenarios"
FILES = sorted(FOLDER.glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    expected, found = play(path)
    if os.environ.get("SHMSERVE_REWRITE") == "1":
        path.write_text(found)
        return
    assert found.splitlines() == expected.splitlines()
