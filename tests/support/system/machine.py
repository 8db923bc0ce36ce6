"""A separate machine to test a service on: a real systemd in namespaces, over the file system of the real machine.

Invariant: nothing of the real machine changes. The root is an overlay in memory, mounted in a private namespace;
network, processes, shared memory and control groups are separate; all of it ends with the first process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SYSTEMD = Path("/lib/systemd/systemd")
BOOT_S = 60
COMMAND_S = 240
TOOLS = ("unshare", "nsenter", "setpriv", "systemctl", "journalctl", "mount", "pivot_root", "make")
ROOM = "1g"

BOOT = """
set -eu
base=$1 told=$2 site=$3
mount --make-rprivate /
mount -t tmpfs -o size={room},mode=755 machine "$base"
mkdir "$base/upper" "$base/work" "$base/root"
mount -t overlay -o "lowerdir=/,upperdir=$base/upper,workdir=$base/work" machine "$base/root"
cd "$base/root"
mkdir -p opt/dependencies
mount --bind -o ro "$site" opt/dependencies
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 devices dev
for name in null zero full random urandom tty; do : > dev/$name; mount --bind /dev/$name dev/$name; done
mkdir dev/shm dev/pts
mount -t devpts -o newinstance,ptmxmode=666,mode=620 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
mount -t tmpfs -o mode=1777 memory dev/shm
mount -t tmpfs -o mode=755 run run
: > run/told
mount --bind "$told" run/told
: > etc/fstab
mkdir -p run/systemd/system run/outside
for unit in timers.target paths.target; do ln -s /dev/null run/systemd/system/$unit; done
pivot_root . run/outside
mount --make-rprivate /run/outside
umount -l /run/outside
mount --make-rshared /
echo mounted
exec env -i container=test NOTIFY_SOCKET=/run/told PATH=/usr/sbin:/usr/bin:/sbin:/bin \
  {systemd} --system --unit=basic.target --log-target=journal --show-status=no
"""


class CannotBoot(Exception):
    """No machine can be booted here, for this reason."""


def why_not() -> str:
    """Why no machine can be booted here; "" if it may be possible."""
    if os.geteuid() != 0:
        return "only root can make the namespaces"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or not SYSTEMD.exists():
        return f"not there: {', '.join(missing) or SYSTEMD}"
    if _cgroups() is None:
        return "cgroup v2 is not mounted"
    return "" if python() else f"no Python {sys.version_info[0]}.{sys.version_info[1]} that a service could run"


def python() -> Path | None:
    """An interpreter of this version that every user can access, so that this environment's packages fit."""
    name = "python{}.{}".format(*sys.version_info)
    found = [Path(place, name).resolve() for place in ("/usr/bin", "/usr/local/bin")]
    return next((path for path in found if path.exists() and all(p.stat().st_mode & 1 for p in path.parents)), None)


def _cgroups() -> Path | None:
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(place)
    return None


class Machine:
    """`site` is a directory that the machine sees as /opt/dependencies."""

    def __init__(self, base: Path, site: Path) -> None:
        cgroups = _cgroups()
        assert cgroups is not None
        self._cgroup = cgroups / f"shmserve-test-{os.getpid()}"
        self._base, self._site = base / "machine", site
        self._base.mkdir()
        self._told = base / "told"
        self._process: subprocess.Popen[str] | None = None
        self.first = 0
        """The pid of its systemd, outside of its namespace."""

    def __enter__(self) -> Machine:
        try:
            self._boot()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _boot(self) -> None:
        try:
            self._cgroup.mkdir()
        except OSError as error:
            raise CannotBoot(f"no control group can be made: {error.strerror}") from None
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
            told.bind(str(self._told))
            told.settimeout(BOOT_S)
            namespaces = ("--mount", "--pid", "--fork", "--uts", "--ipc", "--net", "--cgroup", "--kill-child=KILL")
            script = BOOT.format(room=ROOM, systemd=SYSTEMD)
            inside = ("bash", "-c", script, "boot", str(self._base), str(self._told), str(self._site))
            join = 'echo $$ > "$1/cgroup.procs"; shift; exec "$@"'
            self._process = subprocess.Popen(
                ["bash", "-c", join, "join", str(self._cgroup), *DIES_WITH_US, "unshare", *namespaces, *inside],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            assert self._process.stdout is not None
            said = ""
            for line in self._process.stdout:
                said += line
                if line == "mounted\n":
                    break
            else:
                raise CannotBoot(said.strip() or "the namespaces cannot be made")
            pid = self._process.pid
            self.first = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
            while "READY=1" not in told.recv(65536).decode().split("\n"):
                continue

    def _end(self) -> None:
        if self._process is not None:
            if self.first:  # which ends all others
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.first, signal.SIGKILL)
            else:
                self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.read()  # returns when the last process of the machine has closed it
            self._process.stdout.close()
        if self._cgroup.exists():
            for folder, _, _ in os.walk(self._cgroup, topdown=False):
                os.rmdir(folder)

    # ------------------------------------------------------------------------------------------ what runs in it

    def command(self, *words: str | Path) -> list[str]:
        """The command line to run in the machine, with a time limit."""
        return ["nsenter", "--all", f"--target={self.first}", "timeout", str(COMMAND_S), *map(str, words)]

    def run(self, *words: str | Path, code: int | None = 0, stdin: str = "") -> str:
        """Runs a command and returns its output. `code` None: any exit code."""
        ended = subprocess.run(
            self.command(*words), input=stdin, capture_output=True, text=True, env=CLEAN, check=False
        )
        assert code is None or ended.returncode == code, f"{words} -> {ended.returncode}: {ended.stdout}{ended.stderr}"
        return ended.stdout + ended.stderr

    @contextlib.contextmanager
    def start(self, *words: str | Path) -> Iterator[subprocess.Popen[str]]:
        """A process in the machine that runs beside the test: lines in, lines out."""
        with subprocess.Popen(
            self.command(*words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=CLEAN
        ) as process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    # Its child, which is in the machine: the parent ends when the child has ended.
                    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(int(pid), signal.SIGKILL)

    def path(self, name: str) -> Path:
        """The path of a file of the machine, outside of it."""
        return Path(f"/proc/{self.first}/root{name}")


DIES_WITH_US = ("setpriv", "--pdeathsig=KILL")
CLEAN = {
    "PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C",
    "SYSTEMD_PAGER": "",
    "SYSTEMD_COLORS": "0",
}
