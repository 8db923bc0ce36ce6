"""The page on sequences: its model passes the check and is served, and its program prints what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from shmserve.clients.cli import main
from tests.support.docs import pages
from tests.support.shared_server import SharedServer

PAGE = pages.page("sequences")
pytestmark = pytest.mark.process


def test_the_page(tmp_path: Path, shared_server: SharedServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert pages.write_files(PAGE, tmp_path) == ["models/mean/config.pbtxt", "models/mean/1/model.py"]
    assert pages.commands("sequences") == ["shmserve check models", "shmserve serve --model-repository models"]
    assert main.main(["check", str(tmp_path / "models")]) == 0
    assert "1 ok" in capsys.readouterr().out
    (program,) = [block for block in pages.blocks(PAGE, "python") if "shmserve.Client" in block]
    (expected,) = pages.blocks(PAGE, "text")
    with shared_server.serving(tmp_path / "models") as server:
        assert pages.run_program(server, program) == expected
