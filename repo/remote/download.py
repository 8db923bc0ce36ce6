"""Downloads an object into a file: in pieces, several at a time, resumed after a cut or a crash, and verified.

    <name>          the pieces, each at its place
    <name>.pieces   a line for each complete piece: its number, and the CRC of its content

Invariant: a piece is resumed only if its content in the file has the CRC of its line, so a crash at any time loses at
most pieces. The name depends on the object's tag, and an object without a tag is not resumed: pieces of two versions
never meet.
"""

from __future__ import annotations

import hashlib
import os
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, wait
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

from shmserve.repo.remote.cache import RemoteCache
from shmserve.repo.remote.stores import Changed, Missing, NoRanges, RemoteFile, Store, StoreError

PIECE_BYTES = 8 << 20
ATTEMPTS = 6
"""How often a piece is tried."""
PAUSE_S = 0.25
"""Pause before the second attempt. It doubles with each further one."""
_BLOCK = 1 << 20
_NAMES = {"sha256": "SHA-256", "md5": "MD5", "git": "git hash"}
T = TypeVar("T")


class Download:
    """`want(sha256)` protects a blob from eviction. `advance(bytes)` is called for each piece. `wait(seconds)` pauses.
    `pause_s`: before the second attempt.
    """

    def __init__(
        self,
        cache: RemoteCache,
        pieces: Executor,
        want: Callable[[str], None],
        advance: Callable[[int], None],
        wait: Callable[[float], object],
        piece_bytes: int,
        pause_s: float,
    ) -> None:
        self._cache = cache
        self._pieces = pieces
        self._want = want
        self._advance = advance
        self._wait = wait
        self._piece_bytes = piece_bytes
        self._pause_s = pause_s

    def fetch(self, store: Store, repository: str, file: RemoteFile) -> str:
        """Downloads the object into the cache, as a wanted blob; returns its SHA-256. Raises StoreError, CacheFull and
        OSError."""
        identity = f"{repository} {file.key} {file.tag} {file.size} {self._piece_bytes}"
        partial = self._cache.partial(hashlib.sha256(identity.encode()).hexdigest()[:32])
        journal = partial.with_name(f"{partial.name}.pieces")
        if not file.tag:  # pieces from an earlier download may be of another version
            _remove(partial, journal)
        with self._cache.room(max(file.size, 0)) as reserve:
            try:
                self._in_pieces(store, file, partial, journal, reserve)
                sha256 = _verify(partial, file, store)
            except BaseException as error:
                if file.size < 0 or isinstance(error, Changed):  # nothing of it is of use
                    _remove(partial, journal)
                raise
            self._want(sha256)  # first: the room for another file of the model may be made at any time
            self._cache.adopt(partial, sha256)
            journal.unlink(missing_ok=True)
        return sha256

    def _in_pieces(
        self, store: Store, file: RemoteFile, partial: Path, journal: Path, reserve: Callable[[int], None]
    ) -> None:
        if file.size == 0:
            partial.write_bytes(b"")
            return
        if file.size < 0:
            self._whole(store, file, partial, _Unannounced(reserve, self._piece_bytes).arrive)
            return
        with _PieceFile(partial, journal, file.size, self._piece_bytes) as target:
            self._advance(target.done_bytes)
            todo = target.missing()
            if not todo:
                return
            try:  # the first one alone: it shows whether the store can read pieces at all
                self._piece(store, file, target, todo[0])
            except NoRanges:
                pass
            else:
                self._all([self._pieces.submit(self._piece, store, file, target, number) for number in todo[1:]])
                return
        journal.unlink(missing_ok=True)
        self._whole(store, file, partial, lambda size: None)

    def _all(self, futures: list[Future[None]]) -> None:
        """Waits for all of them, so that no thread writes to the file afterwards. After an error, which is raised, only
        for those that run."""
        done, unfinished = wait(futures, return_when=FIRST_EXCEPTION)
        running = [future for future in unfinished if not future.cancel()]
        wait(running)
        for future in (*done, *running):
            future.result()

    def _piece(self, store: Store, file: RemoteFile, target: _PieceFile, number: int) -> None:
        start, end = target.span(number)
        data = self._trying(lambda: store.read(file, start, end))
        target.write(number, data)
        self._advance(len(data))

    def _whole(self, store: Store, file: RemoteFile, partial: Path, arrive: Callable[[int], None]) -> None:
        self._trying(lambda: self._stream(store, file, partial, arrive))

    def _stream(self, store: Store, file: RemoteFile, partial: Path, arrive: Callable[[int], None]) -> None:
        """`arrive(size)` is called before the file grows to that size."""
        written = 0

        def write(data: bytes) -> None:
            nonlocal written
            size = written + len(data)
            if 0 <= file.size < size:
                raise Changed(f"{file.path} is longer than its {file.size} bytes")
            arrive(size)
            target.write(data)
            written = size
            self._advance(len(data))

        try:
            with partial.open("wb") as target:
                store.stream(file, write)
        except BaseException:
            self._advance(-written)
            raise
        if 0 <= file.size != written:
            self._advance(-written)
            raise StoreError(f"{file.path}: the connection ended after {written} of {file.size} bytes")

    def _trying(self, work: Callable[[], T]) -> T:
        """Tries again after errors that may pass."""
        failed = 0
        while True:
            try:
                return work()
            except (Changed, Missing, NoRanges):
                raise
            except StoreError as error:
                failed += 1
                if error.final or failed == ATTEMPTS:
                    raise
            self._wait(self._pause_s * 2 ** (failed - 1))


class _Unannounced:
    """Reserves room for a file of unknown size while it arrives, in steps."""

    def __init__(self, reserve: Callable[[int], None], step: int) -> None:
        self._reserve = reserve
        self._step = step
        self._reserved = 0

    def arrive(self, size: int) -> None:
        while size > self._reserved:
            self._reserve(self._step)
            self._reserved += self._step


class _PieceFile:
    """The partial file and its journal."""

    def __init__(self, path: Path, journal: Path, size: int, piece_bytes: int) -> None:
        self._size = size
        self._piece_bytes = piece_bytes
        self._guard = threading.Lock()
        self._done: set[int] = set()
        with ExitStack() as opened:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            opened.callback(os.close, self._file)
            if os.fstat(self._file).st_size != size:
                os.ftruncate(self._file, size)
            self._resume(journal)
            self._journal = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            opened.callback(os.close, self._journal)
            self._opened = opened.pop_all()

    def __enter__(self) -> _PieceFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def _resume(self, journal: Path) -> None:
        with suppress(FileNotFoundError):
            for line in journal.read_text(errors="replace").split("\n")[:-1]:
                number, _, crc = line.partition(" ")
                if number.isdigit() and int(number) < self._count and f"{self._crc(int(number)):08x}" == crc:
                    self._done.add(int(number))

    def _crc(self, number: int) -> int:
        start, end = self.span(number)
        crc = 0
        while start < end:
            data = os.pread(self._file, min(_BLOCK, end - start), start)
            if not data:
                return -1
            crc = zlib.crc32(data, crc)
            start += len(data)
        return crc

    @property
    def _count(self) -> int:
        return -(-self._size // self._piece_bytes)

    def span(self, number: int) -> tuple[int, int]:
        start = number * self._piece_bytes
        return start, min(start + self._piece_bytes, self._size)

    @property
    def done_bytes(self) -> int:
        return sum(end - start for start, end in map(self.span, self._done))

    def missing(self) -> list[int]:
        return [number for number in range(self._count) if number not in self._done]

    def write(self, number: int, data: bytes) -> None:
        start, _ = self.span(number)
        view = memoryview(data)
        while view:
            written = os.pwrite(self._file, view, start)
            view, start = view[written:], start + written
        with self._guard:
            os.write(self._journal, f"{number} {zlib.crc32(data):08x}\n".encode())


def _remove(*files: Path) -> None:
    for file in files:
        file.unlink(missing_ok=True)


def _verify(path: Path, file: RemoteFile, store: Store) -> str:
    """The file's SHA-256. Raises Changed if it does not have the digests that the store knows."""
    size = path.stat().st_size
    computed = {"sha256": hashlib.sha256()}
    expected = store.digests(file)
    if "md5" in expected:
        computed["md5"] = hashlib.md5(usedforsecurity=False)
    if "git" in expected:
        computed["git"] = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with path.open("rb") as source:
        while data := source.read(_BLOCK):
            for digest in computed.values():
                digest.update(data)
    for name, value in expected.items():
        if name in computed and computed[name].hexdigest() != value:
            raise Changed(f"{file.path}: the {_NAMES[name]} of what was downloaded is not the store's")
    return computed["sha256"].hexdigest()
