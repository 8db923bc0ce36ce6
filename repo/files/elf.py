"""Reads the dynamic section of a shared library, without loading it: what it needs, defines and lacks."""

from __future__ import annotations

import struct
from pathlib import Path

from msgspec import Struct

from shmserve.errors import InvalidRequest

_HEADER = struct.Struct("<4sBB10xHH12xQ14xHH")
_SEGMENT = struct.Struct("<II5Q")
_ENTRY = struct.Struct("<qQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_LITTLE_64 = (b"\x7fELF", 2, 1)
_LIBRARY = 3
_LOAD, _DYNAMIC = 1, 2
NAMES_BYTES = 256 << 20
"""Maximum size of all names together. Names may overlap, so a small file can have any number of long ones."""
_NEEDED, _HASH, _STRINGS, _SYMBOLS, _SONAME, _RPATH, _RUNPATH, _GNU_HASH = 1, 4, 5, 6, 14, 15, 29, 0x6FFFFEF5


class SharedLibrary(Struct):
    """`needed`: the names of the libraries that it is linked with. `run_path`: where they are looked for first.
    `defined` and `undefined` are symbols."""

    machine: int
    soname: str
    needed: tuple[str, ...]
    run_path: tuple[str, ...]
    defined: frozenset[str]
    undefined: frozenset[str]


def read_library(path: Path) -> SharedLibrary:
    """Raises InvalidRequest if the file is not a shared library for a 64-bit Linux."""
    return shared_library(path.read_bytes(), path.name)


def shared_library(data: bytes, name: str) -> SharedLibrary:
    """Like `read_library`, for the content of a file."""
    try:
        return _Reader(data).read()
    except (struct.error, ValueError, IndexError, OverflowError) as error:
        raise InvalidRequest(f"'{name}' is not a shared library: {error}") from None


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._names_bytes = 0
        magic, size, order, kind, self._machine, at, entry, count = _HEADER.unpack_from(data)
        if (magic, size, order) != _LITTLE_64 or kind != _LIBRARY:
            raise ValueError("it has another format")
        segments = [_SEGMENT.unpack_from(data, at + index * entry) for index in range(count)]
        self._loaded = [segment for segment in segments if segment[0] == _LOAD]
        self._dynamic = [segment for segment in segments if segment[0] == _DYNAMIC]

    def read(self) -> SharedLibrary:
        if not self._dynamic:
            raise ValueError("it has no dynamic section")
        _, _, offset, _, _, size, _ = self._dynamic[0]
        if offset + size > len(self._data):
            raise ValueError("it is cut off")
        entries = list(_ENTRY.iter_unpack(self._data[offset : offset + size - size % _ENTRY.size]))
        value = dict(reversed(entries))
        strings = self._offset(value[_STRINGS]) if _STRINGS in value else 0
        symbols = [(self._text(strings + name), section) for name, section in self._symbols(value)]
        return SharedLibrary(
            self._machine,
            self._text(strings + value[_SONAME]) if _SONAME in value else "",
            tuple(self._text(strings + place) for tag, place in entries if tag == _NEEDED),
            tuple(
                folder
                for tag, place in entries
                if tag in (_RPATH, _RUNPATH)
                for folder in self._text(strings + place).split(":")
            ),
            frozenset(name for name, section in symbols if section),
            frozenset(name for name, section in symbols if not section),
        )

    def _symbols(self, value: dict[int, int]) -> list[tuple[int, int]]:
        """Returns the place of each symbol's name, and the section that defines it; 0: it is undefined."""
        if _SYMBOLS not in value:
            return []
        count = self._count(value)
        table = self._offset(value[_SYMBOLS])
        symbols = (_SYMBOL.unpack_from(self._data, table + index * _SYMBOL.size) for index in range(1, count))
        return [(name, section) for name, _, _, section, _, _ in symbols]

    def _count(self, value: dict[int, int]) -> int:
        """Returns the number of symbols. The newer hash table does not have it: the last chain has to be followed."""
        if _HASH in value:
            return self._word(self._offset(value[_HASH]) + 4)
        if _GNU_HASH not in value:
            return 0
        at = self._offset(value[_GNU_HASH])
        buckets, first, words = (self._word(at + place) for place in (0, 4, 8))
        start = at + 16 + 8 * words
        last = max((self._word(start + 4 * index) for index in range(buckets)), default=0)
        if last < first:
            return first
        chains = start + 4 * buckets
        while not self._word(chains + 4 * (last - first)) & 1:
            last += 1
        return last + 1

    def _word(self, at: int) -> int:
        value: int = struct.unpack_from("<I", self._data, at)[0]
        return value

    def _offset(self, address: int) -> int:
        """Returns where in the file an address of the loaded library is."""
        for _, _, offset, start, _, size, _ in self._loaded:
            if start <= address < start + size:
                return int(offset + address - start)
        raise ValueError("an address is in no segment")

    def _text(self, at: int) -> str:
        end = self._data.index(b"\0", at)
        self._names_bytes += end - at
        if self._names_bytes > NAMES_BYTES:
            raise ValueError(f"its names have more than {NAMES_BYTES} bytes")
        return self._data[at:end].decode(errors="backslashreplace")
