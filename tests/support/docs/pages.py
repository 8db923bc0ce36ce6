"""The code blocks of the pages in docs/, for tests that run what a page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from shmserve.testing import Server
from tests import ROOT

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"^`([\w./]+\.(?:py|pbtxt))`[^\n]*(?:\n[^\n`]+)*\n\n```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def blocks(text: str, language: str | None = None) -> list[str]:
    """The blocks of a text, or those in one language ("" for those without)."""
    return [found[2] for found in _BLOCK.finditer(text + "\n") if language in (None, found[1])]


def commands(name: str) -> list[str]:
    """The lines of all shell blocks of a page."""
    return [line for block in blocks(page(name), "sh") for line in block.splitlines()]


def write_files(text: str, folder: Path) -> list[str]:
    """Writes the files that a page names above their blocks. Returns their names."""
    files = dict(_FILE.findall(text))
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return list(files)


def run_program(server: Server, program: str) -> str:
    """The output of a Python program that finds the server through its environment."""
    environment = os.environ | {"SHMSERVE_RUNTIME_DIR": str(server.runtime_dir)}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
