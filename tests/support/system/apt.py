"""Packages of Debian, for programs that tests need."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

TIMEOUT_S = 300
DEBIAN = Path("/etc/apt/sources.list.d/debian.sources")


def apt_get(*arguments: str, cwd: str | None = None) -> str:
    """Reads only Debian's own list, as apt refuses to work if any list of the machine is malformed."""
    lists = ("-o", f"Dir::Etc::SourceList={DEBIAN}", "-o", "Dir::Etc::SourceParts=/dev/null")
    return run("apt-get", *(lists if DEBIAN.is_file() else ()), *arguments, cwd=cwd)


def run(
    *command: str, cwd: str | None = None, env: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S
) -> str:
    """The output of a command. Raises SubprocessError, with the last line of its errors, if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=cwd, env=env)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"{command[0]} ended with status {done.returncode}"]
        raise subprocess.SubprocessError(lines[-1])
    return done.stdout
