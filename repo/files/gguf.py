"""The header of a GGUF file, as far as it is needed before the engine loads the file."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from shmserve.errors import InvalidRequest

MAGIC = b"GGUF"
_FORMATS = {0: "B", 1: "b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "?", 10: "<Q", 11: "<q", 12: "<d"}
"""Type of a number -> its format."""
_STRING, _ARRAY = 8, 9
_ARCHITECTURE = "general.architecture"
_TEMPLATE = "tokenizer.chat_template"
_RECOMMENDED = "general.sampling."
_KEYS = 4096
_TEXT = 1 << 16


def trained_context(path: Path) -> int:
    """The context length for which the model was trained; 0 if the header does not contain it. Raises InvalidRequest
    for a file that is not a model."""
    architecture = ""
    lengths: dict[str, int] = {}
    for key, value in _header(path):
        if key == _ARCHITECTURE and isinstance(value, str):
            architecture = value
        elif key.endswith(".context_length") and isinstance(value, int):
            lengths[key] = value
        wanted = f"{architecture}.context_length"
        if wanted in lengths:
            return lengths[wanted]
    if not architecture:
        raise _unusable(path, "it does not name an architecture")
    return 0


def chat_template(path: Path) -> str:
    """The chat template; "" if the header contains none, or a very long one. Raises InvalidRequest like
    `trained_context`."""
    return next((value for key, value in _header(path) if key == _TEMPLATE and isinstance(value, str)), "")


def recommended_sampling(path: Path) -> dict[str, float]:
    """The sampling parameters that the authors recommend, under llama.cpp's names. Raises InvalidRequest like
    `trained_context`."""
    return {
        key.removeprefix(_RECOMMENDED): value
        for key, value in _header(path)
        if key.startswith(_RECOMMENDED) and isinstance(value, int | float)
    }


def _header(path: Path) -> Iterator[tuple[str, object]]:
    """The keys and their values, as `_value` reads them."""
    with path.open("rb") as file:
        try:
            yield from _pairs(file)
        except (struct.error, KeyError, ValueError) as error:
            reason = str(error) if type(error) is ValueError else "its header is damaged or cut off"
            raise _unusable(path, reason) from error


def _unusable(path: Path, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{path.name} is not a GGUF file that llama.cpp can run: {reason}")


def _pairs(file: BinaryIO) -> Iterator[tuple[str, object]]:
    if file.read(4) != MAGIC:
        raise ValueError("it does not begin with 'GGUF'")
    version, _, keys = struct.unpack("<IQQ", file.read(20))
    if not 2 <= version <= 3:
        raise ValueError(f"its version is {version}, and only 2 and 3 are supported")
    for _ in range(min(keys, _KEYS)):
        yield _text(file), _value(file)


def _text(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", file.read(8))
    if length > _TEXT:
        raise ValueError(f"it has a name of {length} bytes")
    return file.read(length).decode()


def _value(file: BinaryIO) -> object:
    """The value of a key; None for an array or a long text, which are skipped."""
    (kind,) = struct.unpack("<I", file.read(4))
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        _skip_array(file)
        return None
    form = _FORMATS[kind]
    return struct.unpack(form, file.read(struct.calcsize(form)))[0]


def _string(file: BinaryIO) -> str | None:
    (length,) = struct.unpack("<Q", file.read(8))
    if length <= _TEXT:
        return file.read(length).decode(errors="replace")
    _skip(file, length)
    return None


def _skip_array(file: BinaryIO) -> None:
    """Skips an array. Arrays of arrays are not supported, as in llama.cpp."""
    kind, count = struct.unpack("<IQ", file.read(12))
    if kind != _STRING:
        _skip(file, count * struct.calcsize(_FORMATS[kind]))
        return
    for _ in range(count):  # ends with an error where the file ends
        _string(file)


def _skip(file: BinaryIO, size: int) -> None:
    if size > os.fstat(file.fileno()).st_size:
        raise ValueError(f"it has a value of {size} bytes")
    file.seek(size, os.SEEK_CUR)
