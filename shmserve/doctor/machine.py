"""The machine as the checks see it, and the findings that they report."""

from __future__ import annotations

import os
import platform
import resource
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from msgspec import Struct, field

from shmserve.version import version_of

OK, INFO, WARNING, ERROR = "ok", "info", "warning", "error"
"""States of a finding. info: no action needed. warning: the server runs, with restrictions. error: the server does not
start."""
UNLIMITED = sys.maxsize


class Finding(Struct, frozen=True):
    """`found` and `needed` include units. `fix`: a command or a setting; "" if no action is needed."""

    check: str
    state: str
    found: str
    needed: str = ""
    fix: str = ""


def _limit(which: int) -> int:
    """The hard limit, up to which the server can raise its soft limit."""
    hard = resource.getrlimit(which)[1]
    return UNLIMITED if hard == resource.RLIM_INFINITY else hard


def _is_free(port: int) -> bool:
    """Whether this port of 127.0.0.1 is free. Uses SO_REUSEADDR like the gateway, so that closed connections do not
    count."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
            listener.listen(1)
        except OSError:
            return False
        return True


class Machine(Struct, frozen=True):
    """Fields that are functions query the kernel or this interpreter. Tests replace these functions and `root`."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    python: tuple[int, int] = sys.version_info[:2]
    implementation: str = platform.python_implementation()
    release: str = platform.release()
    cores: tuple[int, ...] = field(default_factory=lambda: tuple(sorted(os.sched_getaffinity(0))))
    descriptors: Callable[[], int] = lambda: _limit(resource.RLIMIT_NOFILE)
    processes: Callable[[], int] = lambda: _limit(resource.RLIMIT_NPROC)
    version: Callable[[str], str] = version_of
    has_module: Callable[[str], bool] = lambda name: find_spec(name) is not None
    is_free: Callable[[int], bool] = _is_free
    runtime_dir: Path | None = None
    """That of the server in question; None: the default one."""
    ports_of: Callable[[Path], Mapping[str, int] | None] = lambda path: None
    """The ports of the server in a runtime directory, by endpoint; None: no server runs there."""

    def path(self, name: str) -> Path:
        """The path of a file below `root`; `name` has no leading slash."""
        return self.root / name

    def read(self, name: str) -> str:
        """The text of a file; "" if it cannot be read."""
        with suppress(OSError):
            return self.path(name).read_text()
        return ""


def mib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size >> 20} MiB"
