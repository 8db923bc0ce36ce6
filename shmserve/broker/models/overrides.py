"""The body of a load call: a configuration, and files that replace the model's directory.

    {"config": {...}, "files": [["1/model.onnx", 5120]]} followed by the bytes of the files

Invariant: files are written only below a new directory of the server, under names that cannot escape it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct

from shmserve.errors import InvalidRequest, Unavailable
from shmserve.protocol.bodies import MALFORMED
from shmserve.repo.config.outline import escaped
from shmserve.repo.config.override import Override, parse_override
from shmserve.repo.files.safe_paths import MODEL_NAME, NAME_RULE
from shmserve.repo.rules.fields import BAD_STUB_NAME

HEADER_BYTES = 2 << 20
"""Limit of the first line: a configuration and the names of files."""
IN_MEMORY = 1 << 20
"""Size above which a body is spooled to a file until it is complete."""
FILES = 4096
VERSIONS = 64
"""Limit of versions in a load call."""
LEVELS = 32
"""Limit of path components in a file name."""
_COPY = 1 << 20
_NAME = 1024
_PART = 255
"""File systems' limit for a path component, in bytes."""


class UnloadBody(Struct, forbid_unknown_fields=True):
    unload_dependents: bool = False
    wait: bool = True
    force: bool = False
    timeout: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    """Seconds from the call until the caller gets an error that says what the unload waits for."""


class RestartBody(Struct, forbid_unknown_fields=True):
    instance: str = ""


class RollbackBody(Struct, forbid_unknown_fields=True):
    """Has no options."""


class UploadHeader(Struct, forbid_unknown_fields=True):
    config: msgspec.Raw = msgspec.Raw(b"")
    files: Annotated[
        list[tuple[Annotated[str, Meta(max_length=_NAME)], Annotated[int, Meta(ge=0, le=1 << 62)]]],
        Meta(max_length=FILES),
    ] = []
    versions: Annotated[list[Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]], Meta(max_length=VERSIONS)] = []
    """Versions to serve in place of those that the configuration selects."""


class LoadOverride(NamedTuple):
    """`folder`: the directory with the uploaded files; None: use the model's directory in the repository."""

    config: Override
    folder: Path | None


class Upload:
    """A body that arrives in pieces. The caller must always `close` it."""

    def __init__(self, place: Path, limit: int) -> None:
        self.versions: tuple[int, ...] = ()
        """Versions to serve in place of those that the configuration selects; set by `unpack`."""
        self._limit = limit
        self._size = 0
        self._file: IO[bytes] = tempfile.SpooledTemporaryFile(IN_MEMORY, dir=str(place))  # noqa: SIM115

    def add(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size > self._limit + HEADER_BYTES:
            raise InvalidRequest(
                f"the files of a load call exceed the limit of {self._limit} bytes (--limit override_bytes)"
            )
        try:
            self._file.write(piece)
        except OSError as error:
            raise _disk(error) from None

    @property
    def empty(self) -> bool:
        return not self._size

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the disk is full, but the data is no longer needed
            self._file.close()

    def unpack(self, place: Path, model: str) -> LoadOverride | None:
        """Writes the files below a new directory in `place`. None for an empty body. Runs in a thread."""
        if self.empty:
            return None
        try:
            return self._unpack(place, model)
        except OSError as error:
            raise _disk(error) from None

    def _unpack(self, place: Path, model: str) -> LoadOverride | None:
        self._file.seek(0)
        line = self._file.readline(HEADER_BYTES + 1)
        try:
            header = msgspec.json.decode(line, type=UploadHeader)
        except MALFORMED as error:
            text = "cannot be read" if len(line) <= HEADER_BYTES else f"is longer than {HEADER_BYTES} bytes"
            raise InvalidRequest(f"the first line of the load call's body {text}: {error}") from None
        self.versions = tuple(header.versions)
        config = bytes(header.config)
        if not config:
            if header.files:
                raise InvalidRequest("the load call has files but no config; give both")
            return None
        override = parse_override(config)
        if not header.files:
            return LoadOverride(override, None)
        sizes = _checked(model, header.files)
        expected = len(line) + sum(sizes.values())
        if expected != self._size:
            raise InvalidRequest(
                f"expected {expected - len(line)} bytes of files in the load call; received {self._size - len(line)}"
            )
        folder = Path(tempfile.mkdtemp(prefix="model-", dir=place))
        try:
            for name, size in sizes.items():
                _write(self._file, folder / model / name, size)
        except BaseException:
            shutil.rmtree(folder)
            raise
        return LoadOverride(override, folder / model)


_FROM_THE_MODEL = re.compile(r"/\d+/")
"""Triton concatenates its temporary directory and the name, so clients may also write `file:/1/model.py`."""


def _checked(model: str, files: list[tuple[str, int]]) -> Mapping[str, int]:
    """File name -> size. Checks the names of the model and the files, as they become paths."""
    if not MODEL_NAME.fullmatch(model):
        text = "model name must not contain path traversal characters"
        if MODEL_NAME.fullmatch(model.replace("\\", "")):
            text = BAD_STUB_NAME  # Triton's text for Python models; here no model may have a backslash
        raise InvalidRequest(f"{text}; found '{escaped(model)}', expected {NAME_RULE}")
    sizes: dict[str, int] = {}
    folders: set[str] = set()
    for path, size in files:
        name = path.removeprefix("/") if _FROM_THE_MODEL.match(path) else path
        parts = name.split("/")
        if not 1 < len(parts) <= LEVELS or not all(_harmless(part) for part in parts):
            raise InvalidRequest(
                f"file '{escaped(name, 100)}' of the load call: expected VERSION/NAME below the model's directory, "
                f"such as 1/model.onnx, of at most {LEVELS} parts, none of them empty, hidden, '..' or overlong"
            )
        above = {name[:at] for at, char in enumerate(name) if char == "/"}
        if name in sizes or name in folders or not above.isdisjoint(sizes):
            raise InvalidRequest(f"file '{escaped(name, 100)}' of the load call conflicts with another one")
        sizes[name] = size
        folders |= above
    return sizes


def _harmless(part: str) -> bool:
    return not part.startswith(".") and part.isprintable() and "\\" not in part and 0 < len(part.encode()) <= _PART


def _write(source: IO[bytes], path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as target:
        while size:
            piece = source.read(min(size, _COPY))
            target.write(piece)
            size -= len(piece)


def _disk(error: OSError) -> Unavailable:
    return Unavailable(f"cannot store the files of the load call: disk error: {error.strerror}")
