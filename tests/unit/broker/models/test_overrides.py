"""Valid and invalid bodies of load calls. The oracle is the file tree: nothing is created outside of one new
directory."""

from __future__ import annotations

import json
import os
import resource
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shmserve.broker.models.overrides import (
    FILES,
    HEADER_BYTES,
    IN_MEMORY,
    LEVELS,
    LoadOverride,
    RestartBody,
    UnloadBody,
    Upload,
)
from shmserve.errors import InvalidRequest, ServeError, Unavailable
from shmserve.protocol.bodies import decode_body
from shmserve.session.uploads import of_load
from tests.support.cases import cases
from tests.support.hypothesis_profiles import examples

CONFIG = {"backend": "identity"}
LIMIT = 1 << 20


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with surrounding files that must stay unchanged."""
    (tmp_path / "beside").write_text("mine")
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


def tree(root: Path) -> dict[str, bytes | None]:
    """Everything below: files with their content, directories with None."""
    return {path.relative_to(root).as_posix(): None if path.is_dir() else path.read_bytes() for path in root.rglob("*")}


def unpack(place: Path, body: bytes, model: str = "m", limit: int = LIMIT, piece: int = 1000) -> LoadOverride | None:
    upload = Upload(place, limit)
    try:
        for start in range(0, len(body), piece):
            upload.add(body[start : start + piece])
        return upload.unpack(place, model)
    finally:
        upload.close()


def stored(place: Path, body: bytes, **more: Any) -> Path:
    """The directory with the uploaded files."""
    found = unpack(place, body, **more)
    assert found is not None
    assert found.folder is not None
    return found.folder


def files_in(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in tree(folder).items() if data is not None}


def body_of(files: Iterable[Any] | None = None, data: bytes = b"", config: Any = CONFIG, **more: Any) -> bytes:
    header = dict(more)
    if config is not None:
        header["config"] = config
    if files is not None:
        header["files"] = list(files)
    return json.dumps(header).encode() + b"\n" + data


def refused(place: Path, body: bytes, *texts: str, **more: Any) -> None:
    """Asserts that the call fails with an error for the caller and creates nothing."""
    before = tree(place.parent)
    with pytest.raises(InvalidRequest) as caught:
        unpack(place, body, **more)
    for text in texts:
        assert text in str(caught.value)
    assert str(place) not in str(caught.value)
    assert str(caught.value).isprintable()
    assert tree(place.parent) == before


def test_configurations_and_files(place: Path) -> None:
    assert unpack(place, b"") is unpack(place, b"{}\n") is None
    found = unpack(place, body_of())
    assert found is not None
    assert (found.folder, found.config.message.backend) == (None, "identity")  # type: ignore[attr-defined]
    assert unpack(place, body_of([])) == unpack(place, body_of().rstrip(b"\n")) == found
    assert tree(place) == {}
    files = {"1/model.onnx": b"weights\n", "1/empty": b"", "1/sub/deep/x": b"\0\n{}", "10/Ünï code": b"y" * 3000}
    files |= dict.fromkeys(("1/a", "1/ab", "1/a.b", "1/b/a", "11/a", "1/a b"), b"similar names do not conflict")
    given = of_load(CONFIG, files)
    sent = bytearray()
    while given.remaining:
        sent += given.take()
    places = set()
    for piece in (1, 7, 1 << 20):
        folder = stored(place, bytes(sent), piece=piece)
        assert folder.name == "m", "the name of a model is that of its directory"
        assert folder.parent.parent == place
        assert files_in(folder) == files
        assert {path.stat().st_mode & 0o7777 for path in folder.rglob("*") if path.is_file()} == {0o600}
        assert folder.parent.stat().st_mode & 0o777 == 0o700
        places.add(folder)
    assert len(places) == 3
    assert files_in(stored(place, body_of([["/1/model.py", 1]], b"x"))) == {"1/model.py": b"x"}, "the slash is ignored"
    # The maximum number of files, deeply nested, needs neither much time nor memory.
    deep = "/".join("a" * (LEVELS - 2))
    folder = stored(place, body_of([[f"1/{deep}/{number}", 1] for number in range(FILES)], b"x" * FILES), limit=1 << 30)
    assert len(list((folder / "1" / deep).iterdir())) == FILES


def test_a_large_body_is_not_kept_in_memory(place: Path) -> None:
    size = IN_MEMORY + 12345
    files = body_of([["1/a", size], ["1/b", 3]])
    upload = Upload(place, 2 * size)
    upload.add(files)
    count = len(os.listdir("/proc/self/fd"))
    for start in range(0, size, 65536):
        upload.add(bytes(min(65536, size - start)))
    assert len(os.listdir("/proc/self/fd")) == count + 1, "on disk"
    assert tree(place) == {}, "under no name that anybody could forget"
    upload.add(b"end")
    found = upload.unpack(place, "m")
    for _ in range(2):
        upload.close()
    assert len(os.listdir("/proc/self/fd")) == count
    assert found is not None
    assert found.folder is not None
    assert (found.folder / "1" / "a").stat().st_size == size
    assert (found.folder / "1" / "b").read_bytes() == b"end"


@pytest.mark.parametrize(
    "name",
    [
        *("../evil", "1/../../evil", "1/..", "..", "/etc/evil", "//evil", "1//x", "1/", "/", "", "./1/x", "1/."),
        *("1/.hidden", ".git/config", "model.onnx", "1\\x", "1/a\\..\\b", "1/a\0b", "1/a\nb", "1/\x7f"),
        *("1/\u202eevil", "1/" + "x" * 256, "1/" + "é" * 128, "x" * 256 + "/x", "/".join("a" * (LEVELS + 1))),
    ],
)
def test_names_outside_the_directory_are_refused(place: Path, name: str) -> None:
    refused(place, body_of([["1/good", 1], [name, 1]], b"ab"), "expected VERSION/NAME below the model's directory")


@cases("1/a 1/a", "1/a /1/a", "1/a 1/a/b", "1/a/b 1/a", "1/a/b/c 1/a", "1/a 2/b 1/a/b/c")
def test_conflicting_file_names_are_refused(names: str, place: Path) -> None:
    files = [[name, 1] for name in names.split()]
    last = names.split()[-1].removeprefix("/")
    refused(place, body_of(files, b"x" * len(files)), f"file '{last}'", "conflicts with another one")


@pytest.mark.parametrize(
    "line",
    [
        *(b"\n", b"\xff\n", b"[]\n", b"null\n", b'"x"\n', b"{\n", b'{"config": {}, "config: {}}\n', b"[" * 100_000),
        *(b'{"config": ' + b"[" * 100_000, b'{"config": {}, "fils": []}\n', b'{"files": [["1/\xff", 1]]}'),
        *(b'{"files": [["1/a", -1]]}\n', b'{"files": [["1/a", 1.5]]}\n', b'{"files": [["1/a", "1"]]}\n'),
        *(b'{"files": [["1/a", 99999999999999999999]]}\n', b'{"files": [["1/a", 1e400]]}\n', b'{"files": [["1/a"]]}\n'),
        *(b'{"files": [["1/\\ud800", 1]]}\n', b'{"files": {"1/a": 1}}\n', b'{"files": [[1, 1]]}\n'),
        body_of([[f"1/{number}", 0] for number in range(FILES + 1)]),
        body_of([["1/" + "a/" * 600, 0]]),
    ],
)
def test_an_invalid_first_line_is_refused(place: Path, line: bytes) -> None:
    refused(place, line, "the first line of the load call's body cannot be read", limit=1 << 22)


@cases(
    (body_of([["1/a", 1]], b"x", None), "has files but no config; give both"),
    (body_of([["1/a", 1]], b"x", {"backnd": "python"}), "backnd"),
    (body_of(None, b"", {"backnd": "python"}), "backnd"),
    (body_of(None, b"", []), "config override"),
    (b'{"config": null}\n', "config override"),
)
def test_an_invalid_configuration_is_refused(body: bytes, text: str, place: Path) -> None:
    refused(place, body, text)


@pytest.mark.parametrize("count", [0, 5, 7, 10_000])
def test_files_need_their_bytes(count: int, place: Path) -> None:
    refused(place, body_of([["1/a", 2], ["1/b", 4]], bytes(count)), "expected 6 bytes", f"received {count}")


def test_model_names_with_path_traversal_are_refused(place: Path) -> None:
    body = body_of([["1/x", 1]], b"a")
    for model in ("", "..", ".", "../evil", "a/b", "/etc", ".hidden", "a\0", "a\n", "x" * 129, "é"):
        refused(place, body, "model name must not contain path traversal", model=model)
    text = "Invalid stub name: contains invalid characters; found 'a\\b', expected 1 to 128 printable"
    refused(place, body, text, model="a\\b")


def test_too_many_bytes(place: Path) -> None:
    body = body_of(None, b"", {"backend": "x" * HEADER_BYTES})
    refused(place, body, f"is longer than {HEADER_BYTES} bytes", limit=1 << 30, piece=1 << 16)
    upload = Upload(place, LIMIT)
    for _ in range((LIMIT + HEADER_BYTES) // 65536):
        upload.add(bytes(65536))
    with pytest.raises(InvalidRequest, match=f"exceed the limit of {LIMIT} bytes \\(--limit override_bytes\\)"):
        upload.add(b"x")
    upload.close()
    assert tree(place) == {}


def test_a_disk_that_fails_during_or_at_the_end_of_an_upload(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the files already exist."""
    with monkeypatch.context() as patch, open("/dev/full", "wb", buffering=0) as full:
        patch.setattr(tempfile, "SpooledTemporaryFile", lambda *_, **__: full)
        upload = Upload(place, LIMIT)
        with pytest.raises(Unavailable, match="No space left on device"):
            upload.add(b"x")
        upload.close()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    most = 1 << 16
    body = body_of([["1/a", most], ["1/b", most + 1]], bytes(2 * most + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        with pytest.raises(Unavailable, match="File too large") as caught:
            unpack(place, body)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(place) not in str(caught.value)
    assert tree(place) == {}
    place.rmdir()
    with pytest.raises(Unavailable, match="No such file or directory"):
        unpack(place, body)


def test_existing_links_are_not_followed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link at the path of a file, made by a user who may write there, is not followed."""
    (place / "model-x" / "m" / "1").mkdir(parents=True)
    (place / "model-x" / "m" / "1" / "a").symlink_to(place.parent / "beside")
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: str(place / "model-x"))
    with pytest.raises(Unavailable, match="File exists"):
        unpack(place, body_of([["1/a", 1]], b"x"))
    assert tree(place.parent) == {"beside": b"mine", "place": None}


PARTS = st.sampled_from(
    ["1", "2", "a", "b", "..", ".", "", ".h", "é", "a\\b", "\0", "x" * 200, "\u202e", "\ud800", "~", "C:"]
)
NAMES = st.one_of(st.lists(PARTS, min_size=1, max_size=5).map("/".join), st.text(max_size=12))
MODELS = st.one_of(st.just("m"), st.text(max_size=5), NAMES)
SIZES = st.one_of(st.integers(0, 5), st.integers(-(2**70), 2**70))


def harmless_or_refused(body: bytes, model: str) -> None:
    with tempfile.TemporaryDirectory() as outer:
        root = Path(outer)
        place = root / "a" / "place"
        place.mkdir(parents=True)
        found = None
        with suppress(ServeError):
            found = unpack(place, body, model)
        if found is None or found.folder is None:
            assert tree(root) == {"a": None, "a/place": None}
        else:
            assert found.folder.parent.parent == place
            assert found.folder.resolve() == found.folder
            assert [path.name for path in place.iterdir()] == [found.folder.parent.name]
            assert list(root.iterdir()) == [root / "a"]
            assert list((root / "a").iterdir()) == [place]


@settings(max_examples=examples(80))
@given(st.lists(st.tuples(NAMES, SIZES), max_size=5), st.integers(-1, 1), MODELS)
def test_any_names(files: list[tuple[str, int]], more: int, model: str) -> None:
    size = sum(size for _, size in files if 0 < size < 100)
    harmless_or_refused(body_of(files, bytes(max(0, size + more))), model)


@settings(max_examples=examples(80))
@given(st.binary(max_size=40), st.integers(0, 60), st.integers(0, 10))
@example(b"[" * 2000, 11, 0)
@example(b'{"wait":' * 9999, 0, 0)
@example(b'{"x\xff":1}', 0, 0)
def test_any_bytes(junk: bytes, at: int, cut: int) -> None:
    good = body_of([["1/a", 3], ["2/b", 2]], b"abcde")
    harmless_or_refused(good[:at] + junk + good[at + cut :], "m")
    harmless_or_refused(junk, "m")
    for kind in (UnloadBody, RestartBody):
        with suppress(InvalidRequest):
            assert isinstance(decode_body(junk, kind), kind)
