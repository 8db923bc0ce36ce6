"""Bodies of operations: bytes and files, read piece by piece as they are sent.

Invariant: no value or file is copied into memory as a whole.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from typing import Any

from shmserve.errors import InvalidRequest
from shmserve.protocol.messages import FIELD_BYTES
from shmserve.session.arguments import check_seconds

_BARE_NAME = re.compile(r'("(?:[^"\\]|\\.)*(?:"|\Z))|([A-Za-z_]\w*)(?=\s*:)', re.DOTALL)
"""A JSON string, or an unquoted field name, which Triton accepts in a JSON configuration."""


class _Bytes:
    """A value in the caller's memory."""

    __slots__ = ("_view", "size")

    def __init__(self, name: str, value: Any) -> None:
        try:
            self._view = memoryview(value).cast("B")
        except TypeError as error:
            raise InvalidRequest(f"file '{name}' must be bytes, or the path of a file: {error}") from error
        self.size = self._view.nbytes

    def read(self, offset: int, size: int) -> bytes:
        return bytes(self._view[offset : offset + size])

    def close(self) -> None:
        self._view.release()


class _File:
    """A file, opened when its first piece is sent. It must not change after the call."""

    __slots__ = ("_descriptor", "_name", "_path", "size")

    def __init__(self, name: str, path: os.PathLike[str]) -> None:
        self._name = name
        self._path = os.fspath(path)
        self._descriptor = -1
        try:
            status = os.stat(self._path)
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from error
        if not stat.S_ISREG(status.st_mode):
            raise InvalidRequest(f"file '{name}' cannot be read from {self._path}: not a regular file")
        self.size = status.st_size

    def read(self, offset: int, size: int) -> bytes:
        try:
            if self._descriptor < 0:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                size_now = os.fstat(self._descriptor).st_size
                if size_now != self.size:
                    raise self._changed(size_now)
            data = os.pread(self._descriptor, size, offset)
        except OSError as error:
            raise self._unreadable(error) from error
        if len(data) < size:
            raise self._changed(offset + len(data))
        if offset + size == self.size:
            self.close()
        return data

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _changed(self, size_now: int) -> InvalidRequest:
        return InvalidRequest(
            f"file '{self._name}' changed while it was sent: it had {self.size} bytes and now has {size_now}"
        )

    def _unreadable(self, error: Exception) -> InvalidRequest:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return InvalidRequest(f"file '{self._name}' cannot be read from {self._path}: {reason}")


class Body:
    """A body, read once in pieces of up to FIELD_BYTES."""

    __slots__ = ("_at", "_parts", "remaining")

    def __init__(self, parts: Sequence[_Bytes | _File] = ()) -> None:
        self._parts = list(parts)[::-1]
        """In reverse order: the next part is the last."""
        self._at = 0
        self.remaining = sum(part.size for part in parts)

    def take(self) -> bytes:
        """The next piece; b"" at the end, and for an empty body."""
        size = min(FIELD_BYTES, self.remaining)
        pieces = []
        while size:
            part = self._parts[-1]
            length = min(size, part.size - self._at)
            if length:
                pieces.append(part.read(self._at, length))
            self._at += length
            self.remaining -= length
            size -= length
            if self._at == part.size:
                part.close()
                self._parts.pop()
                self._at = 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """Closes all parts that were not sent."""
        for part in self._parts:
            part.close()
        self._parts.clear()
        self.remaining = 0


def of_bytes(data: bytes) -> Body:
    """A body that is already encoded, e.g. by another client."""
    return Body([_Bytes("", data)])


def of_json(value: Mapping[str, Any]) -> Body:
    return Body([_Bytes("", json.dumps(value).encode())])


UNLOAD_MARGIN_S = 2.0
"""Extra time that a client waits, beyond the server's limit, for the end of an unload."""


def of_unload(unload_dependents: bool, wait: bool, force: bool, timeout: float | None) -> Body:
    """The body of `unload`. The server enforces the timeout."""
    options: dict[str, Any] = {"unload_dependents": unload_dependents, "wait": wait}
    if force:
        options["force"] = True
    if timeout is not None:
        check_seconds("timeout", timeout)
        if timeout < math.inf:
            options["timeout"] = float(timeout)
    return of_json(options)


def of_load(
    config: Mapping[str, Any] | str | None, files: Mapping[str, Any] | None, versions: Sequence[int] = ()
) -> Body:
    """The body of `load`: empty, or a line of JSON followed by the concatenated bytes of the files."""
    if config is None and files:
        raise InvalidRequest("files= needs config=: a model sent with the request is not read from the repository")
    header: dict[str, Any] = {} if config is None else {"config": _config(config)}
    if versions:
        header["versions"] = list(versions)
    if not header:
        return Body()
    parts: list[_Bytes | _File] = []
    if files:
        parts = [_part(name, value) for name, value in files.items()]
        header["files"] = [[name, part.size] for name, part in zip(files, parts, strict=True)]
    try:
        line = json.dumps(header, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"config cannot be written as JSON: {error}") from error
    return Body([_Bytes("", line), *parts])


def of_traffic(
    shares: Mapping[int, int] | None, aliases: Mapping[str, int | None] | None, shadow: Mapping[int, int] | None = None
) -> Body:
    """The body of `set_traffic`. JSON keys are always text."""
    return of_json(
        {"shares": _with_text_keys(shares), "aliases": dict(aliases or {}), "shadow": _with_text_keys(shadow)}
    )


def _with_text_keys(shares: Mapping[int, int] | None) -> dict[str, int] | None:
    return None if shares is None else {str(version): share for version, share in shares.items()}


def of_service(out_of_service: bool) -> Body:
    """The body of `set_service`."""
    return of_json({"out_of_service": out_of_service})


def recorded(do: str, recording: int, models: Sequence[str]) -> Body:
    """The body of `record`."""
    return of_json({"do": do, "recording": recording, "models": list(models)})


def loading(
    config: Mapping[str, Any] | str | None,
    files: Mapping[str, Any] | None,
    previous: bool,
    versions: Sequence[int] = (),
) -> tuple[str, Body]:
    """The name of the operation, `load` or `rollback`, and its body."""
    if not previous:
        return "load", of_load(config, files, versions)
    if config is not None or files or versions:
        text = "previous= restores what was served before; it cannot be combined with config=, files= or versions="
        raise InvalidRequest(text)
    return "rollback", Body()


def _config(config: Mapping[str, Any] | str) -> dict[str, Any]:
    if isinstance(config, str):
        text = config
        try:
            config = json.loads(text)
        except ValueError as error:
            try:
                config = json.loads(_BARE_NAME.sub(lambda match: match[1] or f'"{match[2]}"', text))
            except ValueError:
                raise InvalidRequest(f"config is not JSON: {error}") from error
    if not isinstance(config, Mapping):
        raise InvalidRequest(f"config must be a mapping, or the JSON of one, not {type(config).__name__}")
    return dict(config)


def _part(name: Any, value: Any) -> _Bytes | _File:
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"a file name must be a path in the model directory, such as '1/model.onnx', not {name!r}")
    return _File(name, value) if isinstance(value, os.PathLike) else _Bytes(name, value)
