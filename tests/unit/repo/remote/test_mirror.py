"""When a change is applied, with a store in memory and a clock that the test sets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shmserve.repo.remote import mirror as mirror_module
from shmserve.repo.remote.address import parse_address
from shmserve.repo.remote.cache import CacheSlot, RemoteCache
from shmserve.repo.remote.credentials import Redactor
from shmserve.repo.remote.mirror import Mirror, MirrorResources
from shmserve.repo.remote.stores import Missing, RemoteFile, Store

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

    def __init__(self, store: MemoryStore, place: Path, limit: int) -> None:
        self.now = 0.0
        self.store = store
        self.slot = CacheSlot.acquire(place, [ADDRESS.key])
        self.cache = RemoteCache(self.slot.folder, limit)
        self.pools = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        resources = MirrorResources(
            self.cache, Redactor(), *self.pools, lambda event: None, lambda seconds: None, 1 << 20, 0.0
        )
        self.mirror = Mirror(ADDRESS, resources, lambda: self.now)

    def close(self) -> None:
        self.slot.close()
        for pool in self.pools:
            pool.shutdown()


@pytest.fixture
def mirrored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Mirrored]]:
    made: list[Mirrored] = []

    def make(limit: int = 1 << 20, **objects: str) -> Mirrored:
        store = MemoryStore({path.replace("_", "/"): text for path, text in objects.items()})
        monkeypatch.setattr(mirror_module, "open_store", lambda address, redact: store)
        made.append(Mirrored(store, tmp_path, limit))
        return made[-1]

    yield make
    for one in made:
        one.close()


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
