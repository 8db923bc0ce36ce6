"""The code blocks of the pages in docs/, for tests that run what a page shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from shmserve.testing import Server
from tests import ROOT
from tests.support.docs.page_runner import blocks_of


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def blocks(text: str, language: str | None = None) -> list[str]:
    """The blocks of a text, or those in one language ("" for those without)."""
    return [block.text for block in blocks_of(text) if language in (None, block.language)]


def commands(name: str) -> list[str]:
    """The lines of all shell blocks of a page."""
    return [line for block in blocks(page(name), "sh") for line in block.splitlines()]


def write_files(text: str, folder: Path) -> list[str]:
    """Writes the files that a page names above their blocks. Returns their names."""
    files = [block for block in blocks_of(text) if block.file]
    for block in files:
        path = folder / block.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text)
    return [block.file for block in files]


def run_program(server: Server, program: str) -> str:
    """The output of a Python program that finds the server through its environment."""
    environment = os.environ | {"SHMSERVE_RUNTIME_DIR": str(server.runtime_dir)}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
