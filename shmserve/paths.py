"""Where the runtime directory is: the one rule that server and clients share.

The rule of the file: no directory is made or changed here by only asking for its name.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from pathlib import Path

from shmserve.errors import Denied

LANE = "lane.sock"
"""The unix lane inside the runtime directory."""
BROKER = "broker.sock"
"""The ZeroMQ socket inside the runtime directory."""
SERVICE = Path("/run/shmserve")
"""Where the system service lives."""


def default_runtime_dir() -> Path:
    """$SHMSERVE_RUNTIME_DIR, else /run/shmserve for a system service, else $XDG_RUNTIME_DIR/shmserve, else temporary.

    A client takes /run/shmserve when it is there; a server when it may write there (`server_runtime_dir`).
    """
    named = os.environ.get("SHMSERVE_RUNTIME_DIR")
    if named:
        return Path(named)
    if SERVICE.is_dir() and os.access(SERVICE, os.X_OK):
        return SERVICE
    return _of_user()


def client_runtime_dir() -> Path:
    """The same, but not a directory in the temporary one that somebody else has made there to catch our tensors."""
    found = default_runtime_dir()
    if found.parent == Path(tempfile.gettempdir()):
        try:
            owner = found.stat(follow_symlinks=False).st_uid
        except FileNotFoundError:
            return found
        if owner != os.geteuid():
            raise Denied(f"runtime directory {found} belongs to uid {owner}, not to you; name one by runtime_dir=")
    return found


def server_runtime_dir() -> Path:
    """The same for a server that is started by hand: the service's directory only if it may write in it."""
    named = os.environ.get("SHMSERVE_RUNTIME_DIR")
    if named:
        return Path(named)
    if SERVICE.is_dir() and os.access(SERVICE, os.W_OK):
        return SERVICE
    return _of_user()


def environments_dir(runtime_dir: Path) -> Path:
    """Where archives of interpreters are unpacked to, if nobody says where: in the first directory that a service
    manager gives for caches, else in the user's, else in the runtime directory."""
    given = os.environ.get("CACHE_DIRECTORY", "").partition(":")[0]
    user = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    own = user / "shmserve" if user.is_absolute() else runtime_dir
    return (Path(given) if given else own) / "environments"


def make_runtime_dir(path: Path) -> None:
    """Makes it, for its owner alone. One that somebody else owns, or that others may write in, is refused."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid != os.geteuid():
        raise PermissionError(f"runtime directory {path} belongs to uid {found.st_uid}; name another by --runtime-dir")
    if stat.S_IMODE(found.st_mode) & stat.S_IWOTH:
        raise PermissionError(f"runtime directory {path} may be written by everyone; chmod it, or name another")


def python() -> list[str]:
    """The command of another interpreter like this one. It can import from the current directory only if we can."""
    safe = sys.version_info >= (3, 11) and os.getcwd() not in sys.path and "" not in sys.path
    return [sys.executable, "-P"] if safe else [sys.executable]


def _of_user() -> Path:
    session = os.environ.get("XDG_RUNTIME_DIR")
    if session:
        return Path(session) / "shmserve"
    return Path(tempfile.gettempdir()) / f"shmserve-{os.geteuid()}"
