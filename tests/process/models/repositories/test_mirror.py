"""Mirroring with a real S3 server and real web servers: cuts, changes, half-written models, eviction, bad names."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from shmserve.repo.remote.cache import is_absent
from tests.support.http_endpoint import web_server
from tests.support.repo.mirrored import PIECE, data_of, mirrored
from tests.support.repo.object_store import CREDENTIALS, ObjectStore, Proxy, object_store

pytest.importorskip("moto")
pytest.importorskip("s3fs")
pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_store() as store:
        yield store


class Remote:
    """A repository with model `m`, behind a proxy."""

    def __init__(self, store: ObjectStore, proxy: Proxy, name: str) -> None:
        self.proxy = proxy
        self.url = proxy.url.replace("/repo", f"/{name}")
        self._store, self._name = store, name
        self.put("m/config.pbtxt", b"name")

    def put(self, path: str, data: bytes | str) -> None:
        self._store.put(f"{self._name}/{path}", data)

    def delete(self, path: str) -> None:
        self._store.delete(f"{self._name}/{path}")


@pytest.fixture
def remote(store: ObjectStore, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with Proxy(store.port) as proxy:
        yield Remote(store, proxy, hashlib.sha256(request.node.name.encode()).hexdigest()[:12])


def test_only_the_piece_of_a_lost_connection_is_downloaded_again(remote: Remote, tmp_path: Path) -> None:
    data = data_of(5 * PIECE + 7)
    remote.put("m/1/model.bin", data)
    seen: set[str] = set()

    def cut_first(method: str, path: str) -> str:
        if "model.bin" not in path:
            return "pass"
        wanted = remote.proxy.ranges("model.bin")[-1]
        if wanted in seen:
            return "pass"
        seen.add(wanted)
        return "cut"

    remote.proxy.rule = cut_first
    with mirrored(remote.url, tmp_path) as mirror:
        outcome = mirror.sync()
        assert (outcome.state, outcome.old) == ("published", "")
        assert mirror.files() == {"config.pbtxt": b"name", "1/model.bin": data}
        assert len(seen) == 6
        assert mirror.sync().state == "unchanged"
        assert not list(mirror.cache.partial("").iterdir())


def test_downloaded_pieces_survive_a_failure_unless_they_are_damaged(remote: Remote, tmp_path: Path) -> None:
    data = data_of(4 * PIECE)
    remote.put("m/1/model.bin", data)
    last = f"bytes={3 * PIECE}-{4 * PIECE - 1}"

    def refuse_last(method: str, path: str) -> str:
        return "refuse" if "model.bin" in path and remote.proxy.requests[-1][2].get("range") == last else "pass"

    remote.proxy.rule = refuse_last
    with mirrored(remote.url, tmp_path) as mirror:
        outcome = mirror.sync()
        assert outcome.state == "failed"
        assert not mirror.folder().exists()
    partial_files = [path for path in (tmp_path / "servers/0/partial").iterdir() if path.suffix != ".pieces"]
    (part,) = [path for path in partial_files if path.stat().st_size == len(data)]
    with part.open("r+b") as file:  # as after a crash of the machine: the journal was written, the piece was not
        file.seek(PIECE + 3)
        file.write(bytes([data[PIECE + 3] ^ 255]))
    remote.proxy.reset()
    with mirrored(remote.url, tmp_path) as mirror:
        assert mirror.sync().state == "published"
        assert mirror.files()["1/model.bin"] == data
        assert sorted(remote.proxy.ranges("model.bin")) == [f"bytes={PIECE}-{2 * PIECE - 1}", last]


def test_corrupted_downloads_are_never_served(remote: Remote, tmp_path: Path) -> None:
    remote.put("m/1/model.bin", data_of(2 * PIECE))
    remote.proxy.rule = lambda method, path: "flip" if "model.bin" in path else "pass"
    with mirrored(remote.url, tmp_path) as mirror:
        outcome = mirror.sync()
        assert outcome.state == "failed"
        assert "kept changing while they were downloaded, 3 times; at last: 1/model.bin: the MD5 of" in outcome.text
        assert not mirror.folder().exists()
        remote.proxy.reset()
        assert mirror.sync().state == "published"


def test_an_object_changed_during_its_download_is_downloaded_again(remote: Remote, tmp_path: Path) -> None:
    """The download never mixes both: after the first piece of the old object, all of the new one is downloaded."""
    old, new = data_of(3 * PIECE), data_of(3 * PIECE)
    remote.put("m/1/model.bin", old)
    changed: list[str] = []

    def change(method: str, path: str) -> str:
        if "model.bin" in path and len(remote.proxy.ranges("model.bin")) == 2 and not changed:
            changed.append(path)
            remote.put("m/1/model.bin", new)
        return "pass"

    remote.proxy.rule = change
    with mirrored(remote.url, tmp_path) as mirror:
        assert mirror.sync().state == "published"
        assert changed
        assert mirror.files()["1/model.bin"] == new
        before = mirror.folder().resolve()

        def keep_changing(method: str, path: str) -> str:
            if "model.bin" in path:
                remote.put("m/1/model.bin", data_of(3 * PIECE))
            return "pass"

        remote.put("m/1/model.bin", old)
        remote.proxy.rule = keep_changing
        outcome = mirror.sync()
        assert (outcome.state, outcome.tree) == ("kept", before.name)
        assert mirror.files()["1/model.bin"] == new


def test_an_unreachable_store_keeps_the_cached_files(remote: Remote, tmp_path: Path) -> None:
    remote.put("m/1/model.bin", b"one")
    with mirrored(remote.url, tmp_path) as mirror:
        assert mirror.sync().state == "published"
        remote.proxy.close()
        outcome = mirror.sync()
        assert (outcome.state, mirror.files()["1/model.bin"]) == ("kept", b"one")
    with mirrored(remote.url, tmp_path) as mirror:
        assert mirror.cache.known(mirror.key) == ["m"]
        assert mirror.sync().state == "offline"
        assert mirror.files()["1/model.bin"] == b"one"
        assert mirror.sync("other").state == "failed"
    for blob in (tmp_path / "blobs").iterdir():
        blob.unlink()
    with mirrored(remote.url, tmp_path) as mirror:
        assert mirror.cache.known(mirror.key) == []
        assert mirror.sync().state == "failed"
    remote.proxy.listen()
    with mirrored(remote.url, tmp_path) as mirror:
        assert mirror.sync().state == "published"
        for path in ("config.pbtxt", "1/model.bin"):
            remote.delete(f"m/{path}")
        # The repository is completely empty. This does not count as a listing, since the repository may have been
        # moved.
        assert mirror.sync().state == "kept"
        remote.put("n/config.pbtxt", "")
        assert mirror.sync().state == "absent"
        assert not mirror.folder().exists()


def test_the_least_recently_used_files_are_evicted(remote: Remote, tmp_path: Path) -> None:
    contents = {name: data_of(1000) for name in "abcd"}
    for name, data in contents.items():
        remote.put(f"{name}/1/model.bin", data)
    blob = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    with mirrored(remote.url, tmp_path, limit=3500) as mirror:
        for name in "abc":
            assert mirror.sync(name).state == "published"
        full = mirror.sync("d")
        assert full.state == "failed"
        assert "limit is 3500 bytes" in full.text
        assert "--remote-cache-size" in full.text
        for name in "ab":
            tree = mirror.ask({"do": "release", "model": name}, "retired")["tree"]
            assert is_absent(mirror.folder(name))
            mirror.cache.drop(tree)
        os.utime(mirror.cache.blob(blob["a"]), (2_000_000_000, 0))
        os.utime(mirror.cache.blob(blob["b"]), (1_000_000_000, 0))
        assert mirror.sync("d").state == "published"
        assert mirror.blobs() == {blob["a"], blob["c"], blob["d"]}
        remote.proxy.requests.clear()
        assert mirror.sync("a").state == "published"
        assert not remote.proxy.ranges("/a/"), "what the cache has is not downloaded"


class _Files(SimpleHTTPRequestHandler):
    """Python's web server: listings in HTML, and no ranges. `gets`: the paths of its GET requests, and the content
    codings that the client accepts."""

    gets: list[tuple[str, str]] = []

    def do_GET(self) -> None:
        self.gets.append((self.path, self.headers["Accept-Encoding"]))
        super().do_GET()

    def log_message(self, *_: Any) -> None:
        pass


class _Json(_Files):
    """Listings as in nginx's `autoindex_format json`. Each first response is cut."""

    cut: set[str] = set()

    def list_directory(self, path: str | os.PathLike[str]) -> Any:
        entries = [
            {"name": entry.name, "type": "directory" if entry.is_dir() else "file"} for entry in Path(path).iterdir()
        ]
        body = json.dumps(entries).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        return None

    def copyfile(self, source: Any, outputfile: Any) -> None:
        if self.path in self.cut:
            super().copyfile(source, outputfile)
        else:
            self.cut.add(self.path)
            outputfile.write(source.read(10))


def files(root: Path, kind: type[_Files]) -> AbstractContextManager[str]:
    return web_server(partial(kind, directory=str(root)))


@pytest.mark.parametrize("kind", [_Files, _Json])
def test_models_are_mirrored_from_a_web_server(tmp_path: Path, kind: type[_Files]) -> None:
    model = tmp_path / "www/repo/a model"
    (model / "1").mkdir(parents=True)
    data = data_of(3 * PIECE)
    (model / "1/mödel.bin").write_bytes(data)
    (model / "config.pbtxt").write_bytes(b"x" * 20)
    (model / ".hidden").write_bytes(b"x")
    _Json.cut.clear()
    with files(tmp_path / "www", kind) as url, mirrored(f"{url}/repo", tmp_path / "cache") as mirror:
        mirror.ask({"do": "list"}, "listed")
        assert [path.name for path in mirror.folder("").iterdir()] == ["a model"]
        assert is_absent(mirror.folder("a model"))
        outcome = mirror.sync("a model")
        assert outcome.state == "published", outcome
        assert mirror.files("a model") == {"config.pbtxt": b"x" * 20, "1/mödel.bin": data}
        kind.gets.clear()
        assert mirror.sync("a model").state == "unchanged"
        assert kind.gets == [("/repo/a%20model/", "identity"), ("/repo/a%20model/1/", "identity")]
        (model / "config.pbtxt").write_bytes(b"yy")
        assert mirror.sync("a model").state == "published"
        assert mirror.files("a model")["config.pbtxt"] == b"yy"
        assert mirror.sync("other").state == "absent"


class _Guarded(_Files):
    """Asks for a password, and redirects requests for files to another origin."""

    elsewhere = ""
    seen: list[str | None] = []

    def send_head(self) -> Any:
        self.seen.append(self.headers["Authorization"])
        if self.headers["Authorization"] is None:
            self.send_error(401)
        elif self.path.endswith("/"):
            return super().send_head()
        else:
            self.send_response(302)
            self.send_header("Location", self.elsewhere + self.path)
            self.send_header("Content-Length", "0")
            self.end_headers()
        return None


class _Elsewhere(_Files):
    seen: list[str | None] = []

    def send_head(self) -> Any:
        self.seen.append(self.headers["Authorization"])
        return super().send_head()


@pytest.mark.parametrize("entry", ["machine 127.0.0.1", "default"])
def test_credentials_are_sent_only_to_the_origin_of_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    (tmp_path / "www/repo/m").mkdir(parents=True)
    (tmp_path / "www/repo/m/config.pbtxt").write_bytes(b"x" * 20)
    (tmp_path / "netrc").write_text(f"{entry} login me password secret\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    _Guarded.seen.clear()
    _Elsewhere.seen.clear()
    with files(tmp_path / "www", _Elsewhere) as other:
        monkeypatch.setattr(_Guarded, "elsewhere", other)
        with files(tmp_path / "www", _Guarded) as url, mirrored(f"{url}/repo", tmp_path / "cache") as mirror:
            outcome = mirror.sync()
            assert outcome.state == "published", outcome
            assert mirror.files() == {"config.pbtxt": b"x" * 20}
    assert len(set(_Guarded.seen)) == 1
    assert None not in _Guarded.seen
    assert set(_Elsewhere.seen) == {None}


class _Without(_Files):
    """Sends no header of this name with a file."""

    hidden = ""

    def send_header(self, keyword: str, value: str) -> None:
        if keyword != self.hidden or self.path.endswith("/"):
            super().send_header(keyword, value)


def test_files_without_a_time_are_downloaded_by_each_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Without, "hidden", "Last-Modified")
    config = tmp_path / "www/repo/m/config.pbtxt"
    config.parent.mkdir(parents=True)
    with files(tmp_path / "www", _Without) as url, mirrored(f"{url}/repo", tmp_path / "cache") as mirror:
        for content in (b"one", b"two"):
            config.write_bytes(content)
            assert mirror.sync().state == "published"
            assert mirror.files() == {"config.pbtxt": content}


def test_bytes_of_unknown_length_are_counted_as_they_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Without, "hidden", "Content-Length")
    (tmp_path / "www/repo/m").mkdir(parents=True)
    file = tmp_path / "www/repo/m/weights"
    file.write_bytes(data_of(10 << 20))
    limit = 3 << 20
    with files(tmp_path / "www", _Without) as url, mirrored(f"{url}/repo", tmp_path / "cache", limit) as mirror:
        outcome = mirror.sync()
        assert outcome.state == "failed"
        assert f"its limit is {limit} bytes" in outcome.text
        assert mirror.blobs() == set()
        assert list(mirror.cache.partial("").iterdir()) == []
        file.write_bytes(data := data_of(5 * PIECE))
        assert mirror.sync().state == "published"
        assert mirror.files() == {"weights": data}
