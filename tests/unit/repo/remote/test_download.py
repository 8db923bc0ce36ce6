"""The pieces of a download, with an executor and a store that the test controls."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from shmserve.repo.remote.cache import CacheSlot, RemoteCache
from shmserve.repo.remote.download import Download
from shmserve.repo.remote.stores import NoRanges, RemoteFile, Store, StoreError
from tests.support.cases import cases
from tests.support.patience import PATIENCE_S


class Pieces(Executor):
    """Runs nothing: the test completes the futures. `submitted` is set when there are as many as `count`."""

    def __init__(self, count: int) -> None:
        self.futures: list[Future[Any]] = []
        self.submitted = Event()
        self._count = count

    def submit(self, work: Callable[..., Any], /, *_: Any, **__: Any) -> Future[Any]:
        self.futures.append(Future())
        if len(self.futures) == self._count:
            self.submitted.set()
        return self.futures[-1]


class Filled(Store):
    """Each byte of an object is this one. Those from `end` on cannot be read."""

    def __init__(self, byte: bytes, end: int) -> None:
        self._byte = byte
        self._end = end

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        if end > self._end:
            raise StoreError("lost", final=True)
        return self._byte * (end - start)


def test_an_error_ends_the_other_pieces(tmp_path: Path) -> None:
    """Pieces that have not begun are cancelled at once; running ones are waited for."""
    slot = CacheSlot.acquire(tmp_path, ["key"])
    pieces = Pieces(3)
    download = Download(
        RemoteCache(slot.folder, 1 << 20), pieces, lambda _: None, lambda _: None, lambda _: None, 1000, 0.0
    )
    with ThreadPoolExecutor(1) as pool:
        fetch = pool.submit(download.fetch, Filled(b"a", 4000), "key", RemoteFile("1/model", "key", 4000, "tag"))
        assert pieces.submitted.wait(PATIENCE_S)
        running, failing, waiting = pieces.futures
        cancelled = Event()
        waiting.add_done_callback(lambda future: cancelled.set())
        running.set_running_or_notify_cancel()
        try:
            failing.set_exception(StoreError("the second piece"))
            assert cancelled.wait(PATIENCE_S)
            assert not fetch.done()
        finally:
            running.set_result(None)
        with pytest.raises(StoreError, match="the second piece"):
            fetch.result()
    slot.close()


@cases(("tag", b"a" * 1000 + b"b" * 1000), ("", b"b" * 2000))
def test_only_objects_with_a_tag_are_resumed(tag: str, content: bytes, tmp_path: Path) -> None:
    slot, file = CacheSlot.acquire(tmp_path, ["key"]), RemoteFile("1/model", "key", 2000, tag)
    cache = RemoteCache(slot.folder, 1 << 20)
    with ThreadPoolExecutor(1) as pool:
        download = Download(cache, pool, lambda _: None, lambda _: None, lambda _: None, 1000, 0.0)
        with pytest.raises(StoreError, match="lost"):
            download.fetch(Filled(b"a", 1000), "key", file)
        assert cache.blob(download.fetch(Filled(b"b", 2000), "key", file)).read_bytes() == content
    slot.close()


class Sends(Store):
    """Sends these bytes, whatever the size of the file is said to be."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        raise NoRanges("a store without ranges")

    def stream(self, file: RemoteFile, write: Callable[[bytes], object]) -> None:
        write(self._content)


@pytest.mark.parametrize(
    ("content", "error"),
    [(b"abc", r"1/model: the connection ended after 3 of 4 bytes"), (b"abcde", r"1/model is longer than its 4 bytes")],
)
def test_an_object_of_another_size_is_not_kept(tmp_path: Path, content: bytes, error: str) -> None:
    slot = CacheSlot.acquire(tmp_path, ["key"])
    cache, advances = RemoteCache(slot.folder, 1 << 20), [0]
    with ThreadPoolExecutor(1) as pool:
        download = Download(cache, pool, lambda _: None, advances.append, lambda _: None, 1000, 0.0)
        with pytest.raises(StoreError, match=error):
            download.fetch(Sends(content), "key", RemoteFile("1/model", "key", 4, "tag"))
        assert (min(accumulate(advances)), sum(advances)) == (0, 0)
        found = download.fetch(Sends(b"abcd"), "key", RemoteFile("1/model", "key", 4, "tag"))
        assert found == hashlib.sha256(b"abcd").hexdigest()
    slot.close()
