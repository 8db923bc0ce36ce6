"""Unpacks archives of interpreters, once for all workers and servers that share a directory for them.

Invariants: nothing is written outside the archive's own directory, whatever the archive contains. An environment in use
is not removed, because each worker holds a lock on it until its process ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import posixpath
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from shmserve.errors import InvalidRequest, Unavailable
from shmserve.workers.process.log import log_message

MEMBERS = 1_000_000
BYTES = 64 << 30
"""Maximum size of an archive's contents, in bytes."""
READY, SOURCE, LOCK = "ready", "source", ".lock"
MAKING = ".making.lock"
"""Suffix of the lock held while an archive is unpacked. It is separate because workers hold the other lock until they
exit."""
RELOCATE = "bin/conda-unpack"
"""A program in archives made by conda-pack; it replaces the original prefix in files with the new one."""


def unpacked(archive: Path, cache: Path, find_python: Callable[[Path], str]) -> Path:
    """Returns the directory of the unpacked archive. Its lock survives exec, so it stays until this process exits."""
    look = archive.stat()
    mark = f"{archive.resolve()}\0{look.st_ino}\0{look.st_size}\0{look.st_mtime_ns}"
    _own(cache)
    home = cache / hashlib.sha256(mark.encode()).hexdigest()[:32]
    lock = os.open(home.with_suffix(LOCK), os.O_RDWR | os.O_CREAT, 0o600)
    os.set_inheritable(lock, True)
    fcntl.flock(lock, fcntl.LOCK_SH)
    root = home / "root"
    if (home / READY).exists():
        return root
    # Several workers may get here at once: the first one unpacks, the others wait.
    making = os.open(home.with_suffix(MAKING), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(making, fcntl.LOCK_EX)
        if not (home / READY).exists():
            _unpack(archive, cache, home, find_python)
    finally:
        os.close(making)
    return root


def _unpack(archive: Path, cache: Path, home: Path, find_python: Callable[[Path], str]) -> None:
    root = home / "root"
    _remove_older(cache, archive, home)
    shutil.rmtree(home, ignore_errors=True)  # left by a process that died while unpacking
    root.mkdir(mode=0o700, parents=True)
    (home / SOURCE).write_text(str(archive.resolve()))
    log_message("unpacking the archive of EXECUTION_ENV_PATH", "info")
    try:
        extract(archive, root)
        _relocate(root, find_python)
    except BaseException:
        shutil.rmtree(home, ignore_errors=True)
        raise
    (home / READY).touch()


def extract(archive: Path, root: Path) -> None:
    """Extracts regular files, directories and links within the archive; refuses anything else."""
    try:
        with tarfile.open(archive, "r:*") as members:
            _Extraction(members, root).run()
    except (tarfile.TarError, EOFError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the archive of EXECUTION_ENV_PATH cannot be read: {error}") from None
    except OSError as error:
        raise Unavailable(f"the archive of EXECUTION_ENV_PATH cannot be unpacked: {error.strerror or error}") from None


class _Extraction:
    def __init__(self, members: tarfile.TarFile, root: Path) -> None:
        self._members = members
        self._root = root
        self._files: set[str] = set()
        self._links: set[str] = set()
        self._folders = {"."}
        self._bytes = 0

    def run(self) -> None:
        for number, member in enumerate(self._members):
            name = posixpath.normpath(member.name)
            if number >= MEMBERS:
                raise InvalidRequest(f"the archive of EXECUTION_ENV_PATH has more than {MEMBERS} members")
            self._refuse_if(not _is_inside(name), name, "lies outside of it")
            if not member.isdir():
                self._make_folder(posixpath.dirname(name) or ".")
            self._one(member, name)

    def _one(self, member: tarfile.TarInfo, name: str) -> None:
        if member.isdir():
            self._make_folder(name)
        elif member.issym():
            target = posixpath.join(posixpath.dirname(name), member.linkname)
            self._refuse_if(not _is_inside(target), name, "is a link to what lies outside of it")
            os.symlink(member.linkname, self._root / name)
            self._links.add(name)
        elif member.islnk():
            target = posixpath.normpath(member.linkname)
            self._refuse_if(target not in self._files, name, "is a link to no file before it")
            os.link(self._root / target, self._root / name, follow_symlinks=False)
            self._files.add(name)
        else:
            self._refuse_if(not member.isreg(), name, "is neither a file nor a directory nor a link")
            self._write(member, name)

    def _make_folder(self, name: str) -> None:
        """Creates a folder and its parents. None of them is a link, so nothing is written through one."""
        if name in self._folders:
            return
        self._refuse_if(name in self._links or name in self._files, name, "is a link or a file, and has members")
        self._make_folder(posixpath.dirname(name) or ".")
        os.mkdir(self._root / name, 0o755)
        self._folders.add(name)

    def _write(self, member: tarfile.TarInfo, name: str) -> None:
        self._bytes += member.size
        if self._bytes > BYTES:
            raise InvalidRequest(f"the archive of EXECUTION_ENV_PATH holds more than {BYTES >> 30} GiB")
        source = self._members.extractfile(member)
        assert source is not None
        mode = 0o755 if member.mode & stat.S_IXUSR else 0o644
        descriptor = os.open(self._root / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with source, open(descriptor, "wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
        self._files.add(name)

    def _refuse_if(self, wrong: bool, name: str, why: str) -> None:
        if wrong:
            raise InvalidRequest(f"the archive of EXECUTION_ENV_PATH is rejected: member '{name[:200]}' {why}")


def _is_inside(name: str) -> bool:
    plain = posixpath.normpath(name)
    return not (posixpath.isabs(name) or plain == ".." or plain.startswith("../") or "\0" in name)


def _own(cache: Path) -> None:
    """Requires that no other user can write to the directory, because its contents are executed."""
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        log_message(f"{cache}: {error.strerror}")
        raise Unavailable(f"no archive can be unpacked: {error.strerror} (--cache-directory)") from None
    status = cache.stat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
        log_message(f"{cache} belongs to uid {status.st_uid} and has mode {stat.S_IMODE(status.st_mode):o}")
        raise Unavailable("archives are not unpacked where other users can write (--cache-directory)")


def _relocate(root: Path, find_python: Callable[[Path], str]) -> None:
    if not (root / RELOCATE).is_file():
        return
    done = subprocess.run(
        [find_python(root), str(root / RELOCATE)], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        log_message(f"{RELOCATE}: {done.stderr[-2000:]}")
        raise InvalidRequest(f"the archive of EXECUTION_ENV_PATH: its {RELOCATE} ended with {done.returncode}")


def _remove_older(cache: Path, archive: Path, home: Path) -> None:
    """Removes environments that no worker uses: those of earlier versions of the archive, and of archives that are
    gone, like the copies that repository agents check.
    """
    for source in cache.glob(f"*/{SOURCE}"):
        with suppress(OSError):
            original = Path(source.read_text())
            if source.parent == home or (original != archive.resolve() and original.exists()):
                continue
            lock = os.open(source.parent.with_suffix(LOCK), os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(source.parent)
            finally:
                os.close(lock)
