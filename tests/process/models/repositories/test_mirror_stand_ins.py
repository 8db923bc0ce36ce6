"""Mirroring from fakes of the APIs of Hugging Face, Google Cloud Storage and Azure, through the real clients."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from shmserve.repo.remote.download import PIECE_BYTES
from tests.support.cases import cases
from tests.support.commands import COMMAND
from tests.support.http_endpoint import web_server
from tests.support.patience import PATIENCE_S
from tests.support.repo.mirrored import PIECE, data_of, mirrored

pytestmark = pytest.mark.process


class _StandIn(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    content_type = "application/json"
    files: ClassVar[dict[str, bytes]] = {}
    damaged: ClassVar[set[str]] = set()
    """Names of `files` that are sent as zeros."""

    spans: ClassVar[list[str]] = []
    """The ranges that were asked for."""
    remaining: ClassVar[int] = 1 << 30
    """How many ranges are sent before the server closes connections."""

    def listed(self, query: dict[str, list[str]]) -> tuple[list[str], list[str]]:
        """The files that a query asks for, and the folders at its delimiter."""
        prefix, delimiter = (query.get(name, [""])[0] for name in ("prefix", "delimiter"))
        names = sorted(name for name in self.files if name.startswith(prefix))
        inside = [name for name in names if not (delimiter and delimiter in name.removeprefix(prefix))]
        folders = {prefix + name.removeprefix(prefix).split("/")[0] + "/" for name in names if name not in inside}
        return inside, sorted(folders)

    def send_range(self, data: bytes, damaged: bool) -> None:
        self.spans.append(self.headers.get("Range", ""))
        if len(self.spans) > self.remaining:
            self.close_connection = True
            return
        span = self.headers.get("Range") or self.headers.get("x-ms-range")
        first, _, last = (span or f"bytes=0-{len(data) - 1}").removeprefix("bytes=").partition("-")
        piece = data[int(first) : int(last) + 1]
        span = f"bytes {first}-{int(first) + len(piece) - 1}/{len(data)}" if span else ""
        self.send(bytes(len(piece)) if damaged else piece, 206 if span else 200, Content_Range=span)

    def send(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Type", self.content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"x"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def mirror_changes(kind: type[_StandIn], url: str, cache: Path, large: str = "MD5", small: str = "MD5") -> str:
    """A model's content is compared with the store's hashes, and a change is followed. Returns the text of an error."""
    data = data_of(3 * PIECE)
    kind.files = {"served/m/config.pbtxt": b"name", "served/m/1/model.bin": data, "served/n/config.pbtxt": b""}
    with mirrored(url, cache) as mirror:
        for name, value in (("1/model.bin", large), ("config.pbtxt", small)):
            kind.damaged = {f"served/m/{name}"}
            outcome = mirror.sync()
            assert outcome.state == "failed"
            assert f"{name}: the {value} of what was downloaded is not the store's" in outcome.text
        kind.damaged = set()
        assert mirror.sync().state == "published"
        assert mirror.files() == {"config.pbtxt": b"name", "1/model.bin": data}
        assert mirror.sync().state == "unchanged"
        kind.files["served/m/config.pbtxt"] = b"other"
        assert mirror.sync().state == "published"
        assert mirror.files()["config.pbtxt"] == b"other"
        assert mirror.sync("zz").state == "absent"
    return outcome.text


class _Hub(_StandIn):
    """The required part of the hub's API, with the repository `owner/models`: one small file, one in LFS."""

    tokens: ClassVar[set[str]] = set()

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        self.tokens.add(self.headers.get("Authorization", ""))
        if path.startswith("/owner/models/resolve/main/"):
            name = path.removeprefix("/owner/models/resolve/main/")
            if name in self.files:
                self.send_range(self.files[name], name in self.damaged)
            else:
                self.send(b"{}", 404)
        elif path.startswith("/api/models/owner/models/tree/main"):
            below = path.removeprefix("/api/models/owner/models/tree/main").strip("/")
            self.send(json.dumps(self._tree(below, "recursive=true" in self.path.lower())).encode())
        elif path.startswith("/api/models/owner/models"):
            self.send(json.dumps({"id": "owner/models", "sha": "0" * 40, "siblings": []}).encode())
        else:
            self.send(b"{}", 404)

    do_HEAD = do_GET

    def _tree(self, below: str, deep: bool) -> list[dict[str, Any]]:
        entries: dict[str, dict[str, Any]] = {}
        for name, data in self.files.items():
            rest = name.removeprefix(f"{below}/").split("/") if below else name.split("/")
            if below and not name.startswith(f"{below}/"):
                continue
            for depth in range(1, len(rest) if deep else 2):
                if depth < len(rest):
                    folder = "/".join([*([below] if below else []), *rest[:depth]])
                    entries[folder] = {"type": "directory", "oid": "1" * 40, "size": 0, "path": folder}
            if deep or len(rest) == 1:
                git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
                entries[name] = {"type": "file", "oid": git, "size": len(data), "path": name}
                if name.endswith(".bin"):
                    lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 100}
                    entries[name] |= {"lfs": lfs, "oid": "2" * 40}
        return list(entries.values())


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Hub]]:
    pytest.importorskip("huggingface_hub")
    _Hub.files, _Hub.damaged = {}, set()
    _Hub.spans, _Hub.remaining = [], 1 << 30
    with web_server(_Hub) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        yield _Hub


def test_hugging_face(hub: type[_Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The content is compared with git's hash, or with the SHA-256 of a large file."""
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    text = mirror_changes(hub, "hf://owner/models/served", tmp_path / "cache", "SHA-256", "git hash")
    assert hub.tokens >= {"Bearer hf_secretsecret"}
    assert "hf_secretsecret" not in text


def pull(*words: str | Path, code: int = 0) -> tuple[str, str]:
    """What the command prints. Its client reads the address of the hub once, so it runs in a process of its own."""
    command = [*COMMAND, "pull", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_pull_downloads_a_model(hub: type[_Hub], tmp_path: Path) -> None:
    data = data_of(3 * PIECE)
    hub.files = {"tiny.Q4_0.gguf": data, "README.md": b"x", "a/served/1/model.onnx": b"y", "a/served/config.pbtxt": b""}
    for url, name, files in (
        ("hf://owner/models/tiny.Q4_0.gguf", "tiny.Q4_0", {"1/model.gguf": data}),
        ("hf://owner/models", "tiny", {"1/model.gguf": data}),
        ("hf://owner/models/a/served", "served", {"1/model.onnx": b"y", "config.pbtxt": b""}),
    ):
        words = ("--name", name) if name == "tiny" else ()
        _, err = pull(url, "--repository", tmp_path / "models", *words)
        assert f"{name}: 100 % of" in err
        assert files_in(tmp_path / "models" / name) == files
    assert {path.name for path in (tmp_path / "models").iterdir()} == {"tiny.Q4_0", "tiny", "served"}


NETWORK = {"config.json": b"{}", "model.safetensors": b"w" * 9, "tokenizer.json": b"t"}
MODEL = {f"1/{name}": data for name, data in NETWORK.items()} | {"config.pbtxt": b'backend: "vllm"\n'}
"""What becomes of it."""


def test_a_network_is_a_model_of_vllm(hub: type[_Hub], tmp_path: Path) -> None:
    hub.files = {**NETWORK, "pytorch_model.bin": b"p", "onnx/model.onnx": b"o", "README.md": b"r"}
    words = ("hf://owner/models@main", "--repository", tmp_path / "pulled")
    _, err = pull(*words, "--max-size", "10", code=1)
    assert "the model has 28 bytes, more than the limit of 10 (--max-size)" in err
    pull(*words, "--max-size", "1KiB")
    assert files_in(tmp_path / "pulled" / "models") == MODEL
    with mirrored("hf://owner/models", tmp_path / "cache") as mirror:
        assert mirror.sync("models").state == "published"
        assert mirror.files("models") == MODEL
        assert mirror.sync("models").state == "unchanged"


@cases(
    ("hf://owner/models/b.gguf", "it has no file 'b.gguf'"),
    ("hf://owner/models", "name one of its files: x.gguf, y.gguf"),
    ("hf://owner/models/empty", "neither a configuration nor a version directory nor a GGUF file"),
    ("hf://owner/models/none", "no model 'none'"),
    ("hf://owner/models/x.gguf", "exists; remove it, or choose another --name"),
    ("hf://owner", "expected hf://OWNER/REPOSITORY"),
)
def test_what_pull_refuses(url: str, text: str, hub: type[_Hub], tmp_path: Path) -> None:
    hub.files = {"x.gguf": b"x", "y.gguf": b"y", "empty/README.md": b"z"}
    (tmp_path / "x").mkdir()
    _, err = pull(url, "--repository", tmp_path, code=1)
    assert text in err
    assert not (tmp_path / ".pull").exists()


@pytest.mark.parametrize("name", ["../x", "/tmp/x", ".hidden", "a/b"])
def test_pull_writes_into_the_repository_only(hub: type[_Hub], tmp_path: Path, name: str) -> None:
    hub.files = {"x.gguf": b"x"}
    _, err = pull("hf://owner/models/x.gguf", "--repository", tmp_path / "models", "--name", name, code=1)
    assert f"'{name}' cannot be the name of a model" in err
    assert not list(tmp_path.iterdir())


def test_a_killed_pull_is_resumed(hub: type[_Hub], tmp_path: Path) -> None:
    data = data_of(2 * PIECE_BYTES + 1)
    hub.files, hub.remaining = {"a.gguf": data}, 1
    words = ("hf://owner/models/a.gguf", "--repository", tmp_path)
    with subprocess.Popen([*COMMAND, "pull", *map(str, words)], stderr=subprocess.PIPE, text=True) as killed:
        assert killed.stderr is not None
        assert killed.stderr.readline() == "a: 0 % of 16.0 MiB\n"
        assert killed.stderr.readline().startswith("a: 49 % of 16.0 MiB, ")
        killed.kill()
    assert not (tmp_path / "a").exists()
    first = hub.spans[0]
    hub.spans, hub.remaining = [], 1 << 30
    out, err = pull(*words)
    assert err.startswith("a: 49 % of 16.0 MiB\n")
    assert "a: 100 %" in err
    assert first not in hub.spans
    assert files_in(tmp_path) == {"a/1/model.gguf": data}
    assert out.split("\n")[:2] == [str(tmp_path / "a"), f"shmserve serve --model-repository {tmp_path}"]


class _Google(_StandIn):
    """The required part of the JSON API of Google Cloud Storage, with the bucket `b`."""

    def do_GET(self) -> None:
        path, query = unquote(urlsplit(self.path).path), parse_qs(urlsplit(self.path).query)
        name = path.partition("/o/")[2]
        if path.endswith("/b/b/o"):
            self.send(json.dumps(self._list(query)).encode())
        elif name in self.files and "/download/" in path:
            self.send_range(self.files[name], name in self.damaged)
        else:
            self.send(b"{}", 404)

    def _list(self, query: dict[str, list[str]]) -> dict[str, Any]:
        inside, folders = self.listed(query)
        return {"items": [self._object(name) for name in inside], "prefixes": folders}

    def _object(self, name: str) -> dict[str, str]:
        data = self.files[name]
        md5 = base64.b64encode(hashlib.md5(data).digest()).decode()
        size, tag = str(len(data)), hashlib.sha256(data).hexdigest()
        return {"name": name, "bucket": "b", "size": size, "etag": tag, "generation": "1", "md5Hash": md5}


def test_google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gcsfs")
    monkeypatch.setenv("HOME", str(tmp_path))  # without credentials
    with web_server(_Google) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        mirror_changes(_Google, "gs://b/served", tmp_path / "cache")


_TIME = "Mon, 27 Jul 2009 12:28:53 GMT"
_BLOB = """<Blob><Name>{name}</Name><Properties><Creation-Time>{time}</Creation-Time>
<Last-Modified>{time}</Last-Modified><Etag>0x{tag}</Etag><Content-Length>{size}</Content-Length><Content-Type>application/octet-stream</Content-Type>
<Content-MD5>{md5}</Content-MD5><BlobType>BlockBlob</BlobType></Properties></Blob>"""
_LISTING = """<?xml version="1.0" encoding="utf-8"?><EnumerationResults ServiceEndpoint="http://x/" ContainerName="c">
<Blobs>{blobs}</Blobs><NextMarker/></EnumerationResults>"""


class _Azure(_StandIn):
    """The required part of the API of Azure Blob Storage, with the container `c` of the account `acc`."""

    content_type = "application/xml"

    def do_GET(self) -> None:
        path, query = unquote(urlsplit(self.path).path), parse_qs(urlsplit(self.path).query)
        name = path.removeprefix("/acc/c/")
        if query.get("comp") == ["list"]:
            inside, folders = self.listed(query)
            prefixes = [f"<BlobPrefix><Name>{folder}</Name></BlobPrefix>" for folder in folders]
            self.send(_LISTING.format(blobs="".join([*map(self._blob, inside), *prefixes])).encode())
        elif name in self.files:
            self.send_range(self.files[name], name in self.damaged)
        else:
            self.send(b"", 404, x_ms_error_code="BlobNotFound")

    do_HEAD = do_GET

    def _blob(self, name: str) -> str:
        data = self.files[name]
        md5, tag = base64.b64encode(hashlib.md5(data).digest()).decode(), hashlib.sha256(data).hexdigest()
        return _BLOB.format(name=name, time=_TIME, tag=tag, size=len(data), md5=md5)


def test_azure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("adlfs")
    key = base64.b64encode(b"a secret of Azure").decode()
    with web_server(_Azure) as url:
        account = f"DefaultEndpointsProtocol=http;AccountName=acc;AccountKey={key};BlobEndpoint={url}/acc;"
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", account)
        mirror_changes(_Azure, "as://acc/c/served", tmp_path / "cache")
