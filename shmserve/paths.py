"""The location of the runtime directory, determined in the same way by servers and clients.

Invariant: only `make_runtime_dir` creates a directory.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from pathlib import Path

from shmserve.errors import Denied

LANE = "lane.sock"
"""The lane's socket in the runtime directory."""
BROKER = "broker.sock"
"""The ZeroMQ socket in the runtime directory."""
SOCKET_PATH_BYTES = 107
"""Maximum length of the path of a Unix socket."""
SERVICE = Path("/run/shmserve")
"""Runtime directory of the system service."""


def default_runtime_dir() -> Path:
    """$SHMSERVE_RUNTIME_DIR, else /run/shmserve for a system service, else $XDG_RUNTIME_DIR/shmserve, else temporary.

    Clients use /run/shmserve if they may enter it, servers if they may write to it (`server_runtime_dir`).
    """
    return _runtime_dir(os.X_OK)


def client_runtime_dir() -> Path:
    """Like `default_runtime_dir`. Raises Denied for a directory below the temporary one that belongs to another user,
    who may have created it to intercept tensors."""
    directory = default_runtime_dir()
    if directory.parent == Path(tempfile.gettempdir()):
        try:
            owner = directory.stat(follow_symlinks=False).st_uid
        except FileNotFoundError:
            return directory
        if owner != os.geteuid():
            raise Denied(
                f"runtime directory {directory} belongs to uid {owner}, not to you; choose another with runtime_dir="
            )
    return directory


def server_runtime_dir() -> Path:
    """Like `default_runtime_dir`, for a server that is started manually: /run/shmserve only if it may write there."""
    return _runtime_dir(os.W_OK)


def cache_dir(runtime_dir: Path) -> Path:
    return cache_home() or runtime_dir


def cache_home() -> Path | None:
    """The service manager's first cache directory, else one in the user's; None if the user has none."""
    service = os.environ.get("CACHE_DIRECTORY", "").partition(":")[0]
    user = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    own = user / "shmserve" if user.is_absolute() else None
    return Path(service) if service else own


def make_runtime_dir(path: Path) -> None:
    """Creates the directory, accessible only to its owner. Raises PermissionError if another user owns it or everyone
    may write to it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.geteuid():
        raise PermissionError(
            f"runtime directory {path} belongs to uid {status.st_uid}; choose another with --runtime-dir"
        )
    if stat.S_IMODE(status.st_mode) & stat.S_IWOTH:
        raise PermissionError(f"runtime directory {path} is writable by everyone; chmod it, or choose another")


def python() -> list[str]:
    """The command for another process of this interpreter. It imports from the current directory only if this one
    does."""
    safe = sys.version_info >= (3, 11) and _working_dir() not in sys.path and "" not in sys.path
    return [sys.executable, "-P"] if safe else [sys.executable]


def temporary_dir(longest: int) -> str:
    """The directory for temporary directories with sockets, whose paths may have SOCKET_PATH_BYTES: /tmp if the path of
    the default one has more than `longest` bytes."""
    place = tempfile.gettempdir()
    return place if len(os.fsencode(place)) <= longest else "/tmp"


def _working_dir() -> str | None:
    """The current directory; None if it has been deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _runtime_dir(service_access: int) -> Path:
    """`service_access`: what this process must be able to do with /run/shmserve to use it."""
    named = os.environ.get("SHMSERVE_RUNTIME_DIR")
    if named:
        return Path(named)
    if SERVICE.is_dir() and os.access(SERVICE, service_access):
        return SERVICE
    session = os.environ.get("XDG_RUNTIME_DIR")
    if session:
        return Path(session) / "shmserve"
    return Path(tempfile.gettempdir()) / f"shmserve-{os.geteuid()}"
