"""Generations: the files of a loaded version, preserved as they were when it was loaded.

    <place>/generation-xxxx/
        pins.json            the look of each file that is not a copy
        m/                   the model's directory, as its workers see it
            labels.txt       small files are copies, or reflinks
            1/model.py
            1/model.onnx -> /proc/<broker>/fd/<n>

A large file is a link to a descriptor of this process. Replacing the original by a rename has no effect. A file that
was written to in place no longer has the size and time in `pins.json`, which workers check before and after loading.

What repository agents check is a generation of copies only, which has all versions and no links to the repository: what
they have verified is what workers load.

A generation is removed when its last reference is dropped.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import shutil
import stat
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from shmserve.errors import InvalidRequest, Unavailable
from shmserve.repo.config.outline import escaped_name
from shmserve.repo.storage.snapshot import Look, Snapshot, is_of_version, look_of, walk

FILE_BYTES = 1 << 20
TOTAL_BYTES = 64 << 20
"""Total size of copied files. Larger files, and those beyond the total, are linked."""
MEMBERS = 4096
"""Maximum number of files and directories mirrored individually; the others, deepest last, are reached by links to the
repository.
"""
DESCRIPTORS = 256
"""Maximum number of descriptors per generation."""
ALL_DESCRIPTORS = 4096
"""Maximum number of descriptors of all generations, which are also at most a quarter of the process's limit. Without a
descriptor, a link leads to the file's path.
"""
PINS = "pins.json"
_COPY_BYTES = 1 << 20
_FICLONE = 0x40049409
_FULL = (errno.ENOSPC, errno.EDQUOT)


class FilesChanged(Exception):
    """A file has changed since the snapshot."""


class Sizes(NamedTuple):
    file_bytes: int = FILE_BYTES
    total_bytes: int = TOTAL_BYTES


DEFAULT = Sizes()


class Generation:
    """A generation. `folder` is the model's directory for workers. `pins`: path of the file with the looks of linked
    files; "": none.
    """

    def __init__(self, folder: Path, pins: str = "") -> None:
        self.folder = folder
        self.pins = pins


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


class Generations:
    """Creates generations, each in its own directory below `place`."""

    def __init__(self, place: Path, sizes: Sizes = DEFAULT, discard: Callable[[Path], None] = _remove) -> None:
        """`discard` removes a directory; it is called in any thread."""
        self._discard = discard
        self.place = place
        self._sizes = sizes
        self._existing: weakref.WeakValueDictionary[tuple[object, ...], Generation] = weakref.WeakValueDictionary()
        self._used = 0
        """Number of descriptors in use."""
        self._lock = threading.Lock()

    def keep(
        self, folder: Path, version: int, snapshot: Snapshot, environment: str = "", strict: bool = True
    ) -> Generation:
        """The existing or a new generation of these files. `environment` is the path of the model's interpreter, which
        is not copied. Raises FilesChanged; if not `strict`, takes the files as they are now.
        """
        key = (folder, version, snapshot.of_version(version), snapshot.of_configuration())
        generation = self._existing.get(key)
        if generation is None:
            with suppress(ValueError):
                environment = str(Path(environment).relative_to(folder))
            try:
                generation = self._make(folder, version, snapshot, environment, strict, self._sizes)
            except FileNotFoundError as error:
                raise FilesChanged(folder.name) from error
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                generation = self._make(folder, version, snapshot, environment, strict, Sizes(0, 0))
            self._existing[key] = generation
        return generation

    def copy(self, folder: Path, digest: str, stopping: Callable[[], bool] = lambda: False) -> Generation:
        """The existing or a new generation with copies of all files, hidden ones included. `digest` identifies the
        files; "": they are copied in any case. `stopping`: whether to give up. Raises FilesChanged, a ServeError for
        what cannot be copied, and OSError.
        """
        key = (folder, digest)
        generation = self._existing.get(key) if digest else None
        if generation is None:
            home = Path(tempfile.mkdtemp(prefix="generation-", dir=self.place))
            try:
                _FullCopy(folder, home / folder.name, stopping).run()
            except BaseException as error:
                self._discard(home)
                if isinstance(error, FileNotFoundError):
                    raise FilesChanged(folder.name) from error
                raise
            generation = self._existing[key] = Generation(home / folder.name)
            self._remove_with(generation, home, [])
        return generation

    def adopt(self, folder: Path) -> Generation:
        """A generation of files that came with a load call: `folder` is the only entry of a directory that the server
        owns.
        """
        generation = Generation(folder)
        self._remove_with(generation, folder.parent, [])
        return generation

    def _make(
        self, folder: Path, version: int, snapshot: Snapshot, environment: str, strict: bool, sizes: Sizes
    ) -> Generation:
        home = Path(tempfile.mkdtemp(prefix="generation-", dir=self.place))
        with self._lock:
            limit = min(ALL_DESCRIPTORS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
            room = max(min(DESCRIPTORS, limit - self._used), 0)
            self._used += room
        mirror = _Mirror(folder, home / folder.name, snapshot, version, environment, sizes, room, strict)
        try:
            pins = mirror.run()
            if pins:
                (home / PINS).write_text(json.dumps(pins))
        except BaseException:
            self._release(home, mirror.descriptors, room)
            raise
        with self._lock:
            self._used -= room - len(mirror.descriptors)
        generation = Generation(home / folder.name, str(home / PINS) if pins else "")
        self._remove_with(generation, home, mirror.descriptors)
        return generation

    def _remove_with(self, generation: Generation, home: Path, descriptors: list[int]) -> None:
        weakref.finalize(generation, self._release, home, descriptors, len(descriptors)).atexit = False

    def _release(self, home: Path, descriptors: list[int], room: int) -> None:
        for descriptor in descriptors:
            os.close(descriptor)
        with self._lock:
            self._used -= room
        self._discard(home)


class _Mirror:
    """Mirrors one directory into another."""

    def __init__(
        self,
        source: Path,
        target: Path,
        snapshot: Snapshot,
        version: int,
        environment: str,
        sizes: Sizes,
        room: int,
        strict: bool,
    ) -> None:
        self._source = source
        self._target = target
        self._files = {
            path: look
            for path, look in snapshot.files.items()
            if is_of_version(path, version) and not path.startswith(f"{environment}/")
        }
        self._environment = environment
        self._sizes = sizes
        self._room = room
        self._strict = strict
        self._clones = sizes.total_bytes > 0
        self.descriptors: list[int] = []

    def run(self) -> Mapping[str, Look]:
        """The looks of the files that are reached by links."""
        members = self._members()
        large, linked = self._not_copied(members)
        pins = {path: look for path, look in self._files.items() if not path.endswith("/")}
        self._make_folder("", members)
        for path in members:
            if path.endswith("/"):
                self._make_folder(path, members)
                continue
            del pins[path]
            look = self._file(path, path in large, path in linked)
            if look is not None:
                pins[path] = look
        return pins

    def _members(self) -> dict[str, None]:
        """The entries that are mirrored individually; those nearer to the top take precedence."""
        members: dict[str, None] = {}
        for path in sorted(self._files, key=lambda path: (path.rstrip("/").count("/"), path)):
            parent = path.rstrip("/").rpartition("/")[0]
            is_reached = not parent or f"{parent}/" in members
            if is_reached and path.rstrip("/") != self._environment and len(members) < MEMBERS:
                members[path] = None
        if self._environment in self._files:  # an archive, which is unpacked once while its file stays the same
            members[self._environment] = None
        return members

    def _not_copied(self, members: Mapping[str, None]) -> tuple[set[str], set[str]]:
        """The files that are too large to copy, and the files that must be links."""
        remaining = self._sizes.total_bytes
        large, linked = set(), {self._environment}
        for path in members:
            size = self._files[path][0]
            if size > min(remaining, self._sizes.file_bytes):
                large.add(path)
            else:
                remaining -= size
        # ONNX Runtime reads external data only from the model's real directory. So a model is linked if any of its data
        # is; and a link that leads out of the model's directory stays such a link.
        root = os.path.realpath(self._source)
        for model in [path for path in members if path.endswith(".onnx")]:
            folder = model.rpartition("/")[0]
            data = {path for path in members if path.startswith(f"{folder}/") and path != model}
            outside = {path for path in data if not os.path.realpath(self._source / path).startswith(f"{root}/")}
            if outside or not large.isdisjoint(data):
                linked |= {model, *outside, *(data & large)}
        return large, linked

    def _make_folder(self, folder: str, members: Mapping[str, None]) -> None:
        """Creates a folder. Entries that are not mirrored become links: hidden files, other versions, dangling
        links."""
        os.mkdir(self._target / folder, 0o700)
        for entry in os.scandir(self._source / folder):
            path = folder + entry.name
            if path not in members and f"{path}/" not in members and entry.name != "__pycache__":
                os.symlink(os.path.abspath(entry.path), self._target / path)

    def _file(self, path: str, large: bool, linked: bool) -> Look | None:
        """Mirrors a file; returns its look if it is a link, None if it is a copy or not a regular file."""
        source = os.path.abspath(self._source / path)
        target = source
        try:
            # Not opened: opening a FIFO would wake up a process that waits for the model to read from it.
            if not stat.S_ISREG(os.stat(source).st_mode):
                os.symlink(source, self._target / path)
                return None
            # Non-blocking, in case it was just replaced by a FIFO.
            descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # no permission, or no descriptor left
            os.symlink(source, self._target / path)
            return self._files[path]
        kept = False
        try:
            state = os.fstat(descriptor)
            self._still_is(path, state)
            small = not (large or linked or _is_native(descriptor, path, state))
            if small or (not linked and self._clones):
                if self._copy(descriptor, path, state, small):
                    self._still_is(path, os.fstat(descriptor))
                    return None
            kept = len(self.descriptors) < self._room
            if kept:
                self.descriptors.append(descriptor)
                target = f"/proc/{os.getpid()}/fd/{descriptor}"
            os.symlink(target, self._target / path)
            return look_of(state)
        finally:
            if not kept:
                os.close(descriptor)

    def _still_is(self, path: str, state: os.stat_result) -> None:
        if self._strict and look_of(state) != self._files[path]:
            raise FilesChanged(path)

    def _copy(self, source: int, path: str, state: os.stat_result, small: bool) -> bool:
        """Creates a reflink, which costs nothing whatever the size; else copies the file if it is small."""
        target = _new_file(self._target / path, state)
        with os.fdopen(target, "wb") as file:
            self._clones = self._clones and _clone(source, target)
            if not self._clones:
                if not small:
                    os.unlink(self._target / path)
                    return False
                while piece := os.read(source, _COPY_BYTES):
                    file.write(piece)
                file.flush()
            os.utime(target, ns=(state.st_atime_ns, state.st_mtime_ns))
        return True


class _FullCopy:
    """Copies a directory. A reflink counts as a copy: later writes to the source, also those through a mapping, do not
    reach it.
    """

    def __init__(self, source: Path, target: Path, stopping: Callable[[], bool]) -> None:
        self._source = source
        self._target = target
        self._stopping = stopping
        self._clones = True
        self._runs_programs = not os.statvfs(target.parent).f_flag & os.ST_NOEXEC

    def run(self) -> None:
        entries = list(walk(self._source, hidden=True))
        remaining = sum(look[0] for _, look, _ in entries)
        for path, look, _ in entries:
            if not path or path.endswith("/"):
                os.mkdir(self._target / path, 0o700)
            else:
                self._file(path, look, remaining)
            remaining -= look[0]

    def _file(self, path: str, look: Look, remaining: int) -> None:
        """Copies a file. `remaining`: bytes of this and the following files."""
        source = self._source / path
        if not stat.S_ISREG(os.stat(source).st_mode):  # not opened, as in _Mirror
            raise InvalidRequest(f"'{escaped_name(path)}' is not a regular file; its repository agents cannot check it")
        try:
            descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise InvalidRequest(f"'{escaped_name(path)}' cannot be read: {error.strerror}") from None
        try:
            state = os.fstat(descriptor)
            if not self._runs_programs and _is_native(descriptor, path, state):
                text = f"'{escaped_name(path)}' is a program or library, which cannot run from the runtime directory"
                raise InvalidRequest(f"{text}: it is mounted noexec; choose another (--runtime-dir)")
            self._content(descriptor, _new_file(self._target / path, state), state, remaining)
            if look_of(state) != look or look_of(os.fstat(descriptor)) != look:
                raise FilesChanged(path)
        finally:
            os.close(descriptor)

    def _content(self, source: int, target: int, state: os.stat_result, remaining: int) -> None:
        with os.fdopen(target, "wb") as file:
            if self._clones and not (state.st_size == 0 or _clone(source, target)):
                self._clones = False
                room = os.fstatvfs(target)
                if remaining > room.f_bavail * room.f_frsize:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if not self._clones:
                while piece := os.read(source, _COPY_BYTES):
                    if self._stopping():
                        raise Unavailable("the server is stopping")
                    file.write(piece)
            file.flush()
            os.utime(target, ns=(state.st_atime_ns, state.st_mtime_ns))


def _new_file(path: Path, original: os.stat_result) -> int:
    mode = 0o700 if original.st_mode & stat.S_IXUSR else 0o600
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)


def _clone(source: int, target: int) -> bool:
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:  # another file system, or one without reflinks
        return False
    return True


def _is_native(descriptor: int, path: str, state: os.stat_result) -> bool:
    """Programs and libraries must be linked: the runtime directory may be mounted noexec."""
    head = os.pread(descriptor, 4, 0)
    if head == b"\x7fELF":
        return True
    return bool(state.st_mode & stat.S_IXUSR) and head[:2] == b"#!" and not path.endswith(".py")
