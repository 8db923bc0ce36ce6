"""Downloads and the application of changes, with stores, executors and a clock that the test controls."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from shmserve.repo.remote import mirror as mirror_module
from shmserve.repo.remote.address import parse_address
from shmserve.repo.remote.cache import CacheSlot, RemoteCache
from shmserve.repo.remote.credentials import Redactor
from shmserve.repo.remote.download import Download
from shmserve.repo.remote.mirror import Mirror, MirrorResources
from shmserve.repo.remote.stores import Missing, NoRanges, RemoteFile, Store, StoreError
from tests.support.cases import cases
from tests.support.patience import PATIENCE_S

ADDRESS = parse_address("s3://bucket/models")


class MemoryStore(Store):
    """`objects`: path in model `m` -> content, which is also the tag."""

    def __init__(self, objects: dict[str, str]) -> None:
        self.objects = objects
        self.reads: list[str] = []

    def models(self) -> list[str]:
        return ["m"] if self.objects else []

    def files(self, model: str) -> list[RemoteFile]:
        if not self.objects:
            raise Missing(model)
        return [RemoteFile(path, path, len(text), text) for path, text in sorted(self.objects.items())]

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        self.reads.append(file.path)
        return self.objects[file.key].encode()[start:end]

    def stream(self, file: RemoteFile, write: Callable[[bytes], None]) -> None:
        raise AssertionError


class Mirrored:
    """A mirror of a store in memory, its cache, and the time."""

    def __init__(self, store: MemoryStore, slot: CacheSlot, pools: tuple[Executor, Executor], limit: int) -> None:
        self.now, self.store, self.slot = 0.0, store, slot
        self.cache = RemoteCache(slot.folder, limit)
        resources = MirrorResources(self.cache, Redactor(), *pools, lambda _: None, lambda seconds: None, 1 << 20, 0.0)
        self.mirror = Mirror(ADDRESS, resources, lambda: self.now)


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[CacheSlot]:
    slot = CacheSlot.acquire(tmp_path, [ADDRESS.key])
    yield slot
    slot.close()


@pytest.fixture
def mirrored(slot: CacheSlot, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Mirrored]]:
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:

        def make(limit: int = 1 << 20, **objects: str) -> Mirrored:
            store = MemoryStore({path.replace("_", "/"): text for path, text in objects.items()})
            monkeypatch.setattr(mirror_module, "open_store", lambda address, redact: store)
            return Mirrored(store, slot, (first, second), limit)

        yield make


def test_a_model_that_is_being_written_is_left_alone(mirrored: Callable[..., Mirrored]) -> None:
    this = mirrored(config="old", **{"1_model": "one"})
    model = this.slot.view(ADDRESS.key) / "m"
    assert this.mirror.sync("m").state == "published"

    def at(seconds: float) -> str:
        this.now = seconds
        return this.mirror.sync("m", settle_s=5.0).state

    this.store.objects["config"] = "new, and its model comes later"
    assert [at(1.0), at(5.0)] == ["unsettled", "unsettled"]
    this.store.objects["1/model"] = "two"
    assert [at(7.0), at(11.0)] == ["unsettled", "unsettled"]
    assert (model / "config").read_text() == "old"
    this.now = 12.0
    outcome = this.mirror.sync("m", settle_s=5.0)
    assert (outcome.state, outcome.tree, outcome.old) == ("published", "2", "1")
    assert (model / "1/model").read_text() == "two"
    # The replaced files stay until the server reports that they are unused.
    assert (this.slot.folder / "trees/1/1/model").read_text() == "one"
    this.cache.drop("1")
    assert not (this.slot.folder / "trees/1").exists()
    assert at(13.0) == "unchanged"


def test_a_file_without_a_tag_is_compared_by_its_size_in_polls(mirrored: Callable[..., Mirrored]) -> None:
    this = mirrored(config="")
    states = [this.mirror.sync("m", settle_s).state for settle_s in (0.0, 5.0, 0.0)]
    assert states == ["published", "unchanged", "published"]


def test_a_model_that_is_larger_than_the_cache(mirrored: Callable[..., Mirrored]) -> None:
    """The model's own files are not evicted for its other files, so the error names the cause at once."""
    this = mirrored(4000, **{f"1_{number}": str(number) * 1000 for number in range(6)})
    outcome = this.mirror.sync("m")
    assert outcome.state == "failed"
    assert "1000 bytes do not fit into the cache: its limit is 4000 bytes" in outcome.text
    assert "raise --remote-cache-size" in outcome.text
    assert this.store.reads == [f"1/{number}" for number in range(4)]
    # They are protected only until the download has ended.
    this.store.objects = {"1/other": "x" * 4000}
    assert this.mirror.sync("m").state == "published"


def test_a_file_that_another_server_evicts(mirrored: Callable[..., Mirrored], monkeypatch: pytest.MonkeyPatch) -> None:
    this = mirrored(**{"1_model": "one"})
    adopt = this.cache.adopt

    def adopt_and_lose(partial: Path, sha256: str) -> None:
        adopt(partial, sha256)
        this.cache.blob(sha256).unlink()

    monkeypatch.setattr(this.cache, "adopt", adopt_and_lose)
    outcome = this.mirror.sync("m")
    assert outcome.state == "failed"
    assert outcome.text.endswith("3 times; at last: another server evicted one of them from the cache")


KILLED = """
import os, sys
from pathlib import Path
from shmserve.repo.remote.cache import CacheSlot

slot = CacheSlot.acquire(Path(sys.argv[1]), ["b"])
(slot.folder / "trees/7").mkdir()
print(slot.folder, end="", flush=True)
os._exit(1)
"""


def test_servers_share_a_cache(tmp_path: Path) -> None:
    """Each server has its own views; the next server removes those of a killed one."""
    first = CacheSlot.acquire(tmp_path, ["a"])
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, check=False)
    second = Path(killed.stdout)
    assert (first.folder.name, second.name) == ("0", "1")
    assert (second / "trees/7").exists()
    first.close()
    assert not (first.folder / "views").exists()
    third = CacheSlot.acquire(tmp_path, ["c"])
    assert third.folder.name == "0"
    assert [path.name for path in (third.folder / "views").iterdir()] == ["c"]
    assert not (second / "trees").exists()
    third.close()


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


def download_of(slot: CacheSlot, pool: Executor, advance: Callable[[int], None] = lambda count: None) -> Download:
    return Download(RemoteCache(slot.folder, 1 << 20), pool, lambda _: None, advance, lambda _: None, 1000, 0.0)


def test_an_error_ends_the_other_pieces(slot: CacheSlot) -> None:
    """Pieces that have not begun are cancelled at once; running ones are waited for."""
    pieces = Pieces(3)
    file = RemoteFile("1/model", "key", 4000, "tag")
    with ThreadPoolExecutor(1) as pool:
        fetch = pool.submit(download_of(slot, pieces).fetch, Filled(b"a", 4000), "key", file)
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


@cases(("tag", b"a" * 1000 + b"b" * 1000), ("", b"b" * 2000))
def test_only_objects_with_a_tag_are_resumed(tag: str, content: bytes, slot: CacheSlot) -> None:
    file = RemoteFile("1/model", "key", 2000, tag)
    with ThreadPoolExecutor(1) as pool:
        download = download_of(slot, pool)
        with pytest.raises(StoreError, match="lost"):
            download.fetch(Filled(b"a", 1000), "key", file)
        found = download.fetch(Filled(b"b", 2000), "key", file)
    assert RemoteCache(slot.folder, 1 << 20).blob(found).read_bytes() == content


class Sends(Store):
    """Sends these bytes, whatever the size of the file is said to be."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        raise NoRanges("a store without ranges")

    def stream(self, file: RemoteFile, write: Callable[[bytes], object]) -> None:
        write(self._content)


@cases((b"abc", r"1/model: the connection ended after 3 of 4 bytes"), (b"abcde", r"1/model is longer than its 4 bytes"))
def test_an_object_of_another_size_is_not_kept(content: bytes, error: str, slot: CacheSlot) -> None:
    advances, file = [0], RemoteFile("1/model", "key", 4, "tag")
    with ThreadPoolExecutor(1) as pool:
        download = download_of(slot, pool, advances.append)
        with pytest.raises(StoreError, match=error):
            download.fetch(Sends(content), "key", file)
        assert (min(accumulate(advances)), sum(advances)) == (0, 0)
        assert download.fetch(Sends(b"abcd"), "key", file) == hashlib.sha256(b"abcd").hexdigest()
