"""The pieces of a download, with an executor and a store that the test controls."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from shmserve.repo.remote.cache import Cache, Slot
from shmserve.repo.remote.download import Download
from shmserve.repo.remote.stores import RemoteFile, Store, StoreError

PATIENCE_S = 60.0


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


class Zeros(Store):
    def __init__(self) -> None:
        pass

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        return bytes(end - start)


def test_an_error_ends_the_other_pieces(tmp_path: Path) -> None:
    """Pieces that have not begun are cancelled at once; running ones are waited for."""
    slot = Slot.acquire(tmp_path, ["key"])
    pieces = Pieces(3)
    download = Download(
        Cache(slot.folder, 1 << 20), pieces, lambda sha256: None, lambda size: None, lambda seconds: None, 1000
    )
    with ThreadPoolExecutor(1) as pool:
        fetch = pool.submit(download.fetch, Zeros(), "key", RemoteFile("1/model", "key", 4000, "tag"))
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
