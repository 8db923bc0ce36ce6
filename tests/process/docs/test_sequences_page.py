"""The page on sequences: its model is made, checked and served, and its program says what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shmserve.testing import Server
from tests import ROOT

PAGE = (ROOT / "docs" / "sequences.md").read_text()
FILE = re.compile(r"^`(models/[^`]+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
pytestmark = pytest.mark.process


def run(folder: Path, *words: str, **environment: str) -> str:
    ended = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_the_page(tmp_path: Path) -> None:
    files = dict(FILE.findall(PAGE))
    assert list(files) == ["models/mean/config.pbtxt", "models/mean/1/model.py"]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    commands = [line for kind, text in FENCE.findall(PAGE) if kind == "sh" for line in text.splitlines()]
    assert commands == ["shmserve check models", "shmserve serve --model-repository models"]
    assert "1 ok" in run(tmp_path, "-m", "shmserve.clients.cli.main", "check", "models")
    (program,) = [text for kind, text in FENCE.findall(PAGE) if kind == "python" and "shmserve.Client" in text]
    (expected,) = [text for kind, text in FENCE.findall(PAGE) if kind == "text"]
    with Server(tmp_path / "models", "--exit-on-error", "true") as server:
        assert run(tmp_path, "-c", program, SHMSERVE_RUNTIME_DIR=str(server.runtime_dir)) == expected
