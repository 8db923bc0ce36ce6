"""The cache of remote repositories: files by content, and the directories in which the server sees them as models.

    <cache>/
        lock
        blobs/<sha256>                      files, read-only
        manifests/<repository>/<model>.json what a model consisted of when it was last published
        servers/0/                          of one server; further ones that share the cache have 1, 2, ...
            lock                            held while the server runs
            partial/<name>                  unfinished downloads
            trees/<n>/                      a model as published: hard links to blobs
            views/<repository>/<model> -> ../../trees/<n>

Invariant: a file whose link count is above one is in a tree, and so in use by a server; only others are evicted.
Nothing below `trees` is changed after it was published; a new tree replaces it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from glob import escape, glob
from pathlib import Path

import msgspec

from shmserve.system.files import new_file

ABSENT = "absent"
"""The tree of a model that the repository has, but that has not been downloaded."""
_SLOTS = 64
DROP_S = 10.0
"""How long a download waits for the room of models that were unloaded or replaced."""


class CacheFull(Exception):
    """The files that are in use leave too little room."""


class ManifestFile(msgspec.Struct, frozen=True):
    size: int
    tag: str
    sha256: str
    digests: Mapping[str, str] = {}


class Manifest(msgspec.Struct, frozen=True):
    """What a model consists of: path -> file. `at`: when it was published, as seconds since 1970."""

    address: str
    model: str
    files: dict[str, ManifestFile]
    at: float = 0.0


class CacheSlot:
    """A server's own part of the cache, from `acquire` to `close`. Used by the broker."""

    def __init__(self, folder: Path, lock: int) -> None:
        self.folder = folder
        self._lock = lock

    @classmethod
    def acquire(cls, root: Path, repositories: Collection[str]) -> CacheSlot:
        """The first free one, with an empty view for each repository. Raises OSError."""
        for place in (root / "blobs", root / "manifests", root / "servers"):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            if place.stat().st_uid != os.geteuid():
                raise OSError(f"{place.name} belongs to uid {place.stat().st_uid}")
        own: CacheSlot | None = None
        for number in range(_SLOTS):
            folder = root / "servers" / str(number)
            if own is not None and not folder.is_dir():
                break
            folder.mkdir(mode=0o700, exist_ok=True)
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            slot = cls(folder, lock)
            slot._clear()
            if own is None:
                own = slot
            else:  # of a server that was killed
                slot._unlock()
        if own is None:
            raise OSError(f"{_SLOTS} servers already use it")
        for name in ("partial", "trees", f"trees/{ABSENT}", "views", *(f"views/{key}" for key in repositories)):
            (own.folder / name).mkdir(mode=0o700, exist_ok=True)
        return own

    def view(self, repository: str) -> Path:
        """The directory in which a repository's models appear."""
        return self.folder / "views" / repository

    def close(self) -> None:
        self._clear()
        self._unlock()

    def _clear(self) -> None:
        for name in ("views", "trees"):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def _unlock(self) -> None:
        os.close(self._lock)


def is_absent(folder: Path) -> bool:
    """Whether the model in a view has not been downloaded."""
    return tree_of(folder) == ABSENT


def tree_of(folder: Path) -> str:
    """Name of the tree that a model in a view consists of; "" if the directory is another one."""
    try:
        target = os.readlink(folder)
    except OSError:
        return ""
    name = os.path.basename(target)
    return name if target == f"../../trees/{name}" else ""


class RemoteCache:
    """The cache, for the process that mirrors repositories. Used by several threads. `limit`: in bytes."""

    def __init__(self, slot: Path, limit: int) -> None:
        self._root = slot.parent.parent
        self._slot = slot
        self._limit = limit
        self._guard = threading.Condition()
        """Notified when a tree has been removed."""
        self._reserved = 0
        self._wanted: dict[str, int] = {}
        """Blob -> how many unpublished models will link it."""
        trees = [int(name) for name in os.listdir(slot / "trees") if name.isdigit()]
        self._last_tree = max(trees, default=0)

    # ------------------------------------------------------------------------------------ files

    def blob(self, sha256: str) -> Path:
        return self._root / "blobs" / sha256

    def partial(self, name: str) -> Path:
        return self._slot / "partial" / name

    def has(self, sha256: str, size: int) -> bool:
        try:
            return self.blob(sha256).stat().st_size == size
        except OSError:
            return False

    @contextlib.contextmanager
    def wanting(self, blobs: Collection[str]) -> Iterator[Callable[[str], None]]:
        """Protects these blobs from eviction, and those for which what it yields is called, by any thread."""
        names: list[str] = []

        def want(sha256: str) -> None:
            with self._guard:
                names.append(sha256)
                self._wanted[sha256] = self._wanted.get(sha256, 0) + 1

        try:
            for name in blobs:
                want(name)
            yield want
        finally:
            with self._guard:
                for name in names:
                    self._wanted[name] -= 1
                    if not self._wanted[name]:
                        del self._wanted[name]

    @contextlib.contextmanager
    def room(self, size: int) -> Iterator[Callable[[int], None]]:
        """Reserves room, and evicts what is needed for it. What it yields reserves more of it. Raises CacheFull."""
        reserved = 0

        def reserve(more: int) -> None:
            nonlocal reserved
            with self._guard:
                end = time.monotonic() + DROP_S
                while True:
                    try:
                        with self._locked():
                            self._evict(more)
                        break
                    except CacheFull:
                        remaining = end - time.monotonic()
                        if remaining <= 0 or not self._has_retired():
                            raise
                        self._guard.wait(remaining)
                self._reserved += more
            reserved += more

        try:
            reserve(size)
            yield reserve
        finally:
            with self._guard:
                self._reserved -= reserved

    def _evict(self, size: int) -> None:
        """Removes the least recently used files until there is room."""
        total, unused = self._reserved, []
        with os.scandir(self._root / "blobs") as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    state = entry.stat(follow_symlinks=False)
                    total += state.st_size
                    if state.st_nlink == 1 and entry.name not in self._wanted:
                        unused.append((state.st_atime_ns, entry.path, state.st_size))
        if total + size > self._limit:
            for _, path, bytes_ in sorted(unused):
                os.unlink(path)
                total -= bytes_
                if total + size <= self._limit:
                    break
        if total + size > self._limit:
            raise CacheFull(
                f"{size} bytes do not fit into the cache: its limit is {self._limit} bytes, of which models that are "
                f"loaded or being downloaded use {total}; raise --remote-cache-size, or unload models"
            )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keeps other servers from evicting files within the block."""
        lock = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def adopt(self, partial: Path, sha256: str) -> None:
        """Makes a complete, verified download a blob."""
        os.chmod(partial, 0o444)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, self.blob(sha256))

    # ------------------------------------------------------------------------------------ models

    def current(self, repository: str, model: str) -> str:
        """Name of the published tree; "" if there is none."""
        name = tree_of(self._slot / "views" / repository / model)
        return "" if name == ABSENT else name

    def published(self, repository: str) -> list[str]:
        """The models of the view, also those that are absent."""
        return sorted(os.listdir(self._slot / "views" / repository))

    def publish(self, repository: str, manifest: Manifest) -> str:
        """Replaces the model by these files, all of which are in the cache. Returns the name of the new tree. Raises
        FileNotFoundError if another server has evicted a file.
        """
        with self._guard:
            self._last_tree += 1
            name = str(self._last_tree)
        tree = self._slot / "trees" / name
        try:
            tree.mkdir(mode=0o700)
            for path, file in manifest.files.items():
                target = tree / path
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                blob = self.blob(file.sha256)
                os.link(blob, target)
                state = target.stat()
                os.utime(target, ns=(time.time_ns(), state.st_mtime_ns))
        except BaseException:
            shutil.rmtree(tree, ignore_errors=True)
            raise
        self._save(repository, manifest)
        self._show(repository, manifest.model, name)
        return name

    def announce(self, repository: str, model: str) -> None:
        """Shows the model as absent."""
        self._show(repository, model, ABSENT)

    def _show(self, repository: str, model: str, tree: str) -> None:
        view = self._slot / "views" / repository
        link = self._slot / f"link-{threading.get_ident()}"
        link.unlink(missing_ok=True)
        link.symlink_to(f"../../trees/{tree}")
        os.replace(link, view / model)

    def hide(self, repository: str, model: str) -> None:
        """Removes the model, which the repository no longer has."""
        (self._slot / "views" / repository / model).unlink(missing_ok=True)
        self._manifest_path(repository, model).unlink(missing_ok=True)

    def drop(self, tree: str) -> None:
        """Removes a tree that no loaded model consists of."""
        if tree.isdigit():
            shutil.rmtree(self._slot / "trees" / tree, ignore_errors=True)
            with self._guard:
                self._guard.notify_all()

    def _has_retired(self) -> bool:
        """Whether there are trees that are not published any more. The server will drop them."""
        shown = {tree_of(Path(link)) for link in glob(f"{escape(str(self._slot))}/views/*/*")}
        return not shown.issuperset({*os.listdir(self._slot / "trees")} - {ABSENT})

    def manifest(self, repository: str, model: str) -> Manifest | None:
        """What the model consisted of when it was last published; None if that is not known."""
        try:
            return msgspec.json.decode(self._manifest_path(repository, model).read_bytes(), type=Manifest)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None

    def known(self, repository: str) -> list[str]:
        """The models that were published once and are complete in the cache."""
        names = sorted(path.stem for path in (self._root / "manifests" / repository).glob("*.json"))
        manifests = [(name, self.manifest(repository, name)) for name in names]
        return [name for name, manifest in manifests if manifest is not None and self.is_complete(manifest)]

    def is_complete(self, manifest: Manifest) -> bool:
        return all(self.has(file.sha256, file.size) for file in manifest.files.values())

    def _manifest_path(self, repository: str, model: str) -> Path:
        return self._root / "manifests" / repository / f"{model}.json"

    def _save(self, repository: str, manifest: Manifest) -> None:
        place = self._manifest_path(repository, manifest.model)
        place.parent.mkdir(mode=0o700, exist_ok=True)
        with new_file(place) as part:
            part.write_bytes(msgspec.json.encode(manifest))
