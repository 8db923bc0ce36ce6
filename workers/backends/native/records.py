"""Requests and events as arrays of 64-bit words, the form in which Python and the shim exchange them (`request.c`,
`response.c`)."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from shmserve.dtypes import to_numpy
from shmserve.errors import ModelFailed
from shmserve.shm.strings import decode_bytes, encode_bytes
from shmserve.workers.backends.native.library import TYPES

if TYPE_CHECKING:
    from shmserve.protocol.messages import Options, Value
    from shmserve.workers.model_calls.answer import Request

Array = np.ndarray[Any, np.dtype[Any]]
_NO_TEXT = (0, 0)
_STRING, _INT, _BOOL, _DOUBLE, _BYTES = range(5)
_WORD = (1 << 64) - 1
UNKNOWN_OUTPUT = _WORD
FINAL = 1
"""The flag of the last response."""
RESCHEDULE = 2
"""The flag of a release: the request is to run again."""


class Event(IntEnum):
    """What the backend did. SENT: a response. FINISHED: there are no more. RELEASED: its inputs are no longer read.
    LOST: nothing is left that could answer it. DROPPED: a response will not be sent. STATE: its sequence's new one."""

    SENT = 1
    FINISHED = 2
    RELEASED = 3
    LOST = 4
    DROPPED = 5
    STATE = 6


class RequestWriter:
    """Writes the requests of one model. `inputs` and `outputs` are the names in the order of the shim's tables."""

    def __init__(self, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        self._outputs = {name: index for index, name in enumerate(outputs)}
        self._all = (len(outputs), *range(len(outputs)), 0)
        self._plain = (0, 0, 0, *_NO_TEXT, *_NO_TEXT, *self._all)

    def write(self, words: array[int], token: int, request: Request, kept: list[Any]) -> None:
        """Appends a request. `kept` gets what must live until the backend has released it."""
        work, arrays = request.work, request.arrays
        options = work.options
        begin = len(words)
        words.extend((0, 0, 0, token))
        if options is None and work.outputs is None:
            words.extend(self._plain)
        else:
            words.extend(_options_of(options))
            words.extend(self._wanted(request) if work.outputs is not None else self._all)
        inputs = 0
        for index, given in enumerate(arrays):
            if given is None:
                continue
            inputs += 1
            data = given if given.dtype != object else np.frombuffer(encode_bytes(given), np.uint8)
            if not data.flags.c_contiguous:
                data = np.ascontiguousarray(data)
            kept.append(data)
            words.extend((index, given.ndim, *given.shape))
            size = data.nbytes
            words.extend((1, data.__array_interface__["data"][0], size) if size else (0,))
        parameters = options.parameters if options is not None else {}
        for name, value in parameters.items():
            words.extend(_parameter_of(name, value))
        words[begin] = len(words) - begin
        words[begin + 1] = inputs
        words[begin + 2] = len(parameters)

    def _wanted(self, request: Request) -> Sequence[int]:
        """Returns the outputs that the request wants, and those whose place it has chosen. Unknown ones are refused
        when the response is placed."""
        wanted = [
            (self._outputs[one.name], one.place) for one in request.work.outputs or () if one.name in self._outputs
        ]
        placed = [index for index, place in wanted if place is not None]
        return (len(wanted), *(index for index, _ in wanted), len(placed), *placed)


def _options_of(options: Options | None) -> Sequence[int]:
    if options is None:
        return (0, 0, 0, *_NO_TEXT, *_NO_TEXT)
    sequence = options.sequence
    number, text = (sequence, "") if isinstance(sequence, int) else (0, sequence)
    flags = options.sequence_start + 2 * options.sequence_end
    return (flags, options.queue_timeout_us, number, *_text(text), *_text(options.id))


def _text(text: str) -> Sequence[int]:
    data = text.encode()
    count = len(data) // 8 + 1
    return (len(data), *struct.unpack(f"={count}Q", data.ljust(8 * count, b"\0")))


def _parameter_of(name: str, value: Value) -> Sequence[int]:
    if isinstance(value, str):
        return (_STRING, *_text(name), *_text(value))
    if isinstance(value, bool):
        return (_BOOL, *_text(name), value)
    if isinstance(value, int):
        return (_INT, *_text(name), value & _WORD)
    return (_DOUBLE, *_text(name), *struct.unpack("=Q", struct.pack("=d", value)))


class SentTensor(Struct, gc=False):
    """An output or state as the backend made it. `data` None: it was written where it will be read."""

    index: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | None

    def array(self) -> Array:
        if self.dtype == "BYTES":
            return decode_bytes(self.data, self.shape, f"output '{self.name}'")
        try:
            return np.frombuffer(self.data or b"", to_numpy(self.dtype)).reshape(self.shape)
        except (KeyError, ValueError):
            raise ModelFailed(
                f"output '{self.name}' has {len(self.data or b'')} bytes, which is not {self.dtype or 'a type'} "
                f"{list(self.shape)}"
            ) from None


class SentResponse(Struct, gc=False):
    """`error` is 0, or the code plus one."""

    number: int
    error: int
    text: str
    outputs: list[SentTensor]
    parameters: dict[str, Value]


class EventReader:
    """Reads the words of events, in order."""

    def __init__(self, address: int, count: int) -> None:
        self._words: tuple[int, ...] = struct.unpack(f"={count}Q", ctypes.string_at(address, 8 * count))
        self._at = 0

    @property
    def more(self) -> bool:
        return self._at < len(self._words)

    def word(self) -> int:
        self._at += 1
        return self._words[self._at - 1]

    def event(self) -> tuple[int, int, int]:
        """Returns kind, token and flags."""
        at = self._at
        self._at = at + 3
        kind, token, flags = self._words[at : at + 3]
        return kind, token, flags

    def response(self) -> SentResponse:
        number, error = self.word(), self.word()
        text = self._text() if error else ""
        outputs = []
        for _ in range(self.word()):
            index, dtype, shape, place, size = self._tensor()
            name = self._text()
            data = None if self.word() else ctypes.string_at(place, size)
            outputs.append(SentTensor(index, name, dtype, shape, data))
        return SentResponse(number, error, text, outputs, dict([self._parameter() for _ in range(self.word())]))

    def state(self, names: Sequence[str]) -> SentTensor:
        index, dtype, shape, place, size = self._tensor()
        return SentTensor(index, names[index], dtype, shape, ctypes.string_at(place, size))

    def _tensor(self) -> tuple[int, str, tuple[int, ...], int, int]:
        at = self._at
        index, dtype, place, size, rank = self._words[at : at + 5]
        self._at = at + 5 + rank
        return index, TYPES[dtype] if dtype < len(TYPES) else "", self._words[at + 5 : self._at], place, size

    def _text(self) -> str:
        address, size = self.word(), self.word()
        return ctypes.string_at(address, size).decode(errors="backslashreplace")

    def _parameter(self) -> tuple[str, Value]:
        name, kind, word = self._text(), self.word(), self.word()
        if kind in (_STRING, _BYTES):
            return name, ctypes.string_at(word, self.word()).decode(errors="backslashreplace")
        if kind == _DOUBLE:
            return name, float(struct.unpack("=d", struct.pack("=Q", word))[0])
        return name, bool(word) if kind == _BOOL else ctypes.c_int64(word).value
