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
from shmserve.repo.remote.cache import Cache, Slot
from shmserve.repo.remote.credentials import Redactor
from shmserve.repo.remote.mirror import Mirror, Workshop
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


@pytest.fixture
def pools() -> Iterator[list[ThreadPoolExecutor]]:
    pools = [ThreadPoolExecutor(1), ThreadPoolExecutor(1)]
    yield pools
    for pool in pools:
        pool.shutdown()


def test_a_model_that_is_being_written_is_left_alone(
    tmp_path: Path, pools: list[ThreadPoolExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore({"config.pbtxt": "old", "1/model": "one"})
    monkeypatch.setattr(mirror_module, "open_store", lambda address, redact: store)
    slot = Slot.acquire(tmp_path, [ADDRESS.key])
    cache = Cache(slot.folder, 1 << 20)
    now = [0.0]
    events: list[object] = []
    shop = Workshop(cache, Redactor(), pools[0], pools[1], events.append, lambda seconds: None, 1 << 20, 0.0)
    mirror = Mirror(ADDRESS, shop, lambda: now[0])
    model = slot.view(ADDRESS.key) / "m"
    assert mirror.sync("m").state == "published"

    def at(seconds: float) -> str:
        now[0] = seconds
        return mirror.sync("m", settle_s=5.0).state

    store.objects["config.pbtxt"] = "new, and its model comes later"
    assert [at(1.0), at(5.0)] == ["unsettled", "unsettled"]
    store.objects["1/model"] = "two"
    assert [at(7.0), at(11.0)] == ["unsettled", "unsettled"]
    assert (model / "config.pbtxt").read_text() == "old"
    now[0] = 12.0
    outcome = mirror.sync("m", settle_s=5.0)
    assert (outcome.state, outcome.tree, outcome.old) == ("published", "2", "1")
    assert (model / "1/model").read_text() == "two"
    # The replaced files stay until the server reports that they are unused.
    assert (slot.folder / "trees/1/1/model").read_text() == "one"
    cache.drop("1")
    assert not (slot.folder / "trees/1").exists()
    assert at(13.0) == "unchanged"
    slot.close()


def test_a_model_that_is_larger_than_the_cache(
    tmp_path: Path, pools: list[ThreadPoolExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's own files are not evicted for its other files, so the error names the cause at once."""
    store = MemoryStore({f"1/{number}": str(number) * 1000 for number in range(6)})
    monkeypatch.setattr(mirror_module, "open_store", lambda address, redact: store)
    slot = Slot.acquire(tmp_path, [ADDRESS.key])
    cache = Cache(slot.folder, 4000)
    shop = Workshop(cache, Redactor(), pools[0], pools[1], lambda event: None, lambda seconds: None, 1 << 20, 0.0)
    mirror = Mirror(ADDRESS, shop)
    outcome = mirror.sync("m")
    assert outcome.state == "failed"
    assert "1000 bytes do not fit into the cache: its limit is 4000 bytes" in outcome.text
    assert "raise --remote-cache-size" in outcome.text
    assert store.reads == [f"1/{number}" for number in range(4)]
    # They are protected only until the download has ended.
    store.objects = {"1/other": "x" * 4000}
    assert mirror.sync("m").state == "published"
    slot.close()


def test_a_file_that_another_server_evicts_during_the_download(
    tmp_path: Path, pools: list[ThreadPoolExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore({"1/model": "one"})
    monkeypatch.setattr(mirror_module, "open_store", lambda address, redact: store)
    slot = Slot.acquire(tmp_path, [ADDRESS.key])
    cache = Cache(slot.folder, 1 << 20)
    shop = Workshop(cache, Redactor(), pools[0], pools[1], lambda event: None, lambda seconds: None, 1 << 20, 0.0)
    adopt = cache.adopt

    def adopt_and_lose(partial: Path, sha256: str) -> None:
        adopt(partial, sha256)
        cache.blob(sha256).unlink()

    monkeypatch.setattr(cache, "adopt", adopt_and_lose)
    outcome = Mirror(ADDRESS, shop).sync("m")
    assert outcome.state == "failed"
    assert outcome.text.endswith("3 times; at last: another server evicted one of them from the cache")
    slot.close()


KILLED = """
import os, sys
from pathlib import Path
from shmserve.repo.remote.cache import Slot

slot = Slot.acquire(Path(sys.argv[1]), ["b"])
(slot.folder / "trees/7").mkdir()
print(slot.folder, end="", flush=True)
os._exit(1)
"""


def test_servers_share_a_cache(tmp_path: Path) -> None:
    """Each server has its own views; the next server removes those of a killed one."""
    first = Slot.acquire(tmp_path, ["a"])
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, check=False)
    second = Path(killed.stdout)
    assert (first.folder.name, second.name) == ("0", "1")
    assert (second / "trees/7").exists()
    first.close()
    assert not (first.folder / "views").exists()
    third = Slot.acquire(tmp_path, ["c"])
    assert third.folder.name == "0"
    assert [path.name for path in (third.folder / "views").iterdir()] == ["c"]
    assert not (second / "trees").exists()
    third.close()
