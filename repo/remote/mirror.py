"""Mirrors one remote repository: downloads what has changed of a model, and publishes it once it is complete.

Invariant: a model is published only if all its objects were the same after the download as before, with the sizes and
digests that the store reports. Until then, and whenever the store fails, what was published before stays.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from typing import NamedTuple

from shmserve.errors import InvalidRequest
from shmserve.repo.remote.address import RemoteAddress
from shmserve.repo.remote.cache import CacheFull, Manifest, ManifestFile, RemoteCache
from shmserve.repo.remote.credentials import Redactor
from shmserve.repo.remote.download import Download
from shmserve.repo.remote.stores import Changed, Missing, RemoteFile, Store, StoreError, is_safe, open_store

ATTEMPTS = 3
"""How often a model is downloaded that changes meanwhile."""

Emit = Callable[[Mapping[str, object]], None]


class MirrorOutcome(NamedTuple):
    """`state`: published, unchanged, absent (the repository does not have the model), unsettled (it is being changed),
    kept (an error; what was published stays), offline (published from the cache, as the store cannot be used) or
    failed. `tree`: what is published now; `old`: what was before.
    """

    model: str
    state: str
    text: str = ""
    tree: str = ""
    old: str = ""


class MirrorResources(NamedTuple):
    """What the mirrors of all repositories share. `wait(seconds)` pauses."""

    cache: RemoteCache
    redact: Redactor
    files: Executor
    pieces: Executor
    emit: Emit
    wait: Callable[[float], object]
    piece_bytes: int
    pause_s: float


class Mirror:
    """One repository. Used by several threads."""

    def __init__(
        self, address: RemoteAddress, resources: MirrorResources, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.address = address
        self.key = address.key
        self._resources = resources
        self._cache = resources.cache
        self._clock = clock
        self._guard = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._store: Store | None = None
        self._seen: dict[str, tuple[Sequence[RemoteFile], float]] = {}
        """Model -> a listing that differs from what is published, and since when it has been the same."""

    # ------------------------------------------------------------------------------------ listing

    def models(self) -> list[str]:
        """The models of the repository. Raises StoreError."""
        return [name for name in self._open().models() if is_safe(name) and not name.startswith((".", "__"))]

    def announce(self) -> None:
        """Shows all models of the repository, downloaded or not. Raises StoreError."""
        names = self.models()
        shown = self._cache.published(self.key)
        for name in set(names).difference(shown):
            self._cache.announce(self.key, name)
        for name in set(shown).difference(names):
            if not self._cache.current(self.key, name):
                self._cache.hide(self.key, name)

    def _open(self) -> Store:
        with self._guard:
            if self._store is None:
                try:
                    self._store = open_store(self.address, self._resources.redact)
                except InvalidRequest as error:
                    raise StoreError(error.message, final=True) from error
            return self._store

    # ------------------------------------------------------------------------------------ one model

    def sync(self, model: str, settle_s: float = 0.0) -> MirrorOutcome:
        """Makes the published model that of the repository. `settle_s`: for how long a change must have been seen."""
        if not is_safe(model) or "/" in model:
            return MirrorOutcome(model, "absent")
        with self._lock_of(model):
            try:
                try:
                    return self._sync(model, settle_s)
                except Missing:
                    if model in self.models():  # an object was removed between a listing and its download
                        raise StoreError("its objects were removed while they were downloaded") from None
                    return self._gone(model)
            except (StoreError, CacheFull) as error:
                return self._fallback(model, str(error))
            except OSError as error:
                return self._fallback(model, f"the cache cannot be written: {error.strerror or type(error).__name__}")

    def hide(self, model: str) -> MirrorOutcome:
        """Removes a model that the repository no longer has."""
        with self._lock_of(model):
            return self._gone(model)

    def release(self, model: str) -> MirrorOutcome:
        """Lets the files of a model that is not needed now be evicted."""
        with self._lock_of(model):
            old = self._cache.current(self.key, model)
            if old:
                self._cache.announce(self.key, model)
            return MirrorOutcome(model, "absent", old=old)

    def offline(self, model: str, text: str) -> MirrorOutcome:
        """What to serve of the model while the store cannot be used."""
        with self._lock_of(model):
            return self._fallback(model, text)

    def _lock_of(self, model: str) -> threading.Lock:
        with self._guard:
            return self._locks.setdefault(model, threading.Lock())

    def _sync(self, model: str, settle_s: float) -> MirrorOutcome:
        store = self._open()
        current = self._cache.current(self.key, model)
        manifest = self._cache.manifest(self.key, model)
        files, why = store.files(model), "a listing after the download differed"
        for _ in range(ATTEMPTS):
            if current and manifest is not None and _is_same(files, manifest, polled=settle_s > 0):
                self._seen.pop(model, None)
                return MirrorOutcome(model, "unchanged", tree=current)
            if settle_s and not self._is_settled(model, files, settle_s):
                return MirrorOutcome(model, "unsettled", tree=current)
            try:
                with ExitStack() as wanting:
                    tree = self._fetch(store, model, files, manifest, wanting)
                    now = store.files(model)
                    if now == files:
                        return self._publish(model, current, tree)
                    files = now
            except Changed as error:
                files, why = store.files(model), str(error)
            except FileNotFoundError:  # of a blob
                files, why = store.files(model), "another server evicted one of them from the cache"
            if settle_s:
                self._is_settled(model, files, settle_s)
                return MirrorOutcome(model, "unsettled", tree=current)
        raise StoreError(f"its objects kept changing while they were downloaded, {ATTEMPTS} times; at last: {why}")

    def _is_settled(self, model: str, files: Sequence[RemoteFile], settle_s: float) -> bool:
        seen = self._seen.get(model)
        if seen is None or seen[0] != files:
            self._seen[model] = (files, self._clock())
            return False
        return self._clock() - seen[1] >= settle_s

    def _publish(self, model: str, old: str, files: dict[str, ManifestFile]) -> MirrorOutcome:
        tree = self._cache.publish(self.key, Manifest(str(self.address), model, files, time.time()))
        self._seen.pop(model, None)
        return MirrorOutcome(model, "published", tree=tree, old=old)

    def _gone(self, model: str) -> MirrorOutcome:
        old = self._cache.current(self.key, model)
        self._cache.hide(self.key, model)
        self._seen.pop(model, None)
        return MirrorOutcome(model, "absent", old=old)

    def _fallback(self, model: str, text: str) -> MirrorOutcome:
        current = self._cache.current(self.key, model)
        if current:
            return MirrorOutcome(model, "kept", text, tree=current)
        manifest = self._cache.manifest(self.key, model)
        if manifest is not None and self._cache.is_complete(manifest):
            try:
                tree = self._cache.publish(self.key, manifest)
            except OSError as error:
                return MirrorOutcome(model, "failed", f"{text}; the cache cannot be read: {error.strerror}")
            return MirrorOutcome(model, "offline", text, tree=tree)
        return MirrorOutcome(model, "failed", text)

    # ------------------------------------------------------------------------------------ its files

    def _fetch(
        self, store: Store, model: str, files: Sequence[RemoteFile], manifest: Manifest | None, wanting: ExitStack
    ) -> dict[str, ManifestFile]:
        """Downloads what the cache lacks. None of the files can be evicted until `wanting` is closed."""
        known = {file.path: self._known(store, file, manifest) for file in files}
        want = wanting.enter_context(self._cache.wanting([sha256 for sha256 in known.values() if sha256]))
        # Only now can nothing of it be evicted any more.
        sizes = {file.path: file.size for file in files}
        kept = {path: sha256 for path, sha256 in known.items() if sha256 and self._cache.has(sha256, sizes[path])}
        missing = [file for file in files if file.path not in kept]
        progress = DownloadProgress(self._resources.emit, self.key, model, sum(max(file.size, 0) for file in missing))
        download = Download(
            self._cache,
            self._resources.pieces,
            want,
            progress.advance,
            self._resources.wait,
            self._resources.piece_bytes,
            self._resources.pause_s,
        )
        futures = {
            file.path: self._resources.files.submit(download.fetch, store, self.key, file)
            for file in sorted(missing, key=lambda file: -file.size)
        }
        errors = [error for future in futures.values() if (error := future.exception()) is not None]
        if errors:
            # An error that persists says more than that something has changed.
            raise next((error for error in errors if not isinstance(error, Changed)), errors[0])
        fetched = {path: future.result() for path, future in futures.items()}
        blobs = kept | fetched
        return {
            file.path: ManifestFile(
                self._cache.blob(blobs[file.path]).stat().st_size, file.tag, blobs[file.path], dict(file.digests)
            )
            for file in files
        }

    def _known(self, store: Store, file: RemoteFile, manifest: Manifest | None) -> str:
        """The SHA-256 of an object whose content the cache probably has; "" if it must be downloaded."""
        if "sha256" in file.digests:
            return file.digests["sha256"]
        if manifest is None:
            return ""
        known = manifest.files.get(file.path)
        if known is not None and file.tag and (known.tag, known.size) == (file.tag, file.size):
            return known.sha256
        for path, other in manifest.files.items():  # a new version that shares files with one before
            if store.same_content(file, RemoteFile(path, "", other.size, other.tag, other.digests)):
                return other.sha256
        return ""


class DownloadProgress:
    """Reports how much of a model has been downloaded: after each 50th of it, or EVERY_S."""

    EVERY_S = 0.25
    STEPS = 50

    def __init__(self, emit: Emit, repository: str, model: str, total: int) -> None:
        self._emit = emit
        self._about = {"event": "progress", "repository": repository, "model": model, "total": total}
        self._guard = threading.Lock()
        self._total = total
        self._done = self._told = 0
        self._at = time.monotonic()
        emit({**self._about, "done": 0})

    def advance(self, size: int) -> None:
        with self._guard:
            self._done += size
            now = time.monotonic()
            if now - self._at < self.EVERY_S and (self._done - self._told) * self.STEPS < self._total:
                return
            self._at, self._told = now, self._done
            done = self._done
        self._emit({**self._about, "done": done})


def _is_same(files: Sequence[RemoteFile], manifest: Manifest, polled: bool) -> bool:
    """Whether the listing is that of what was published. A file without a tag may have changed; a poll, which must not
    download it each time, compares its size."""
    listed = {file.path: (file.size, file.tag) for file in files}
    known = {path: (file.size, file.tag) for path, file in manifest.files.items()}
    return listed == known and (polled or all(file.tag for file in files))
