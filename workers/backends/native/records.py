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

from shmserve.dtypes import BY_NUMBER, from_numpy, to_numpy
from shmserve.errors import InvalidRequest, ModelFailed
from shmserve.protocol.messages import Options
from shmserve.shm.strings import decode_bytes, encode_bytes
from shmserve.shm.views import address_of
from shmserve.workers.batch.gather import StoredInput
from shmserve.workers.model_calls.answer import triton_number
from shmserve.workers.model_calls.calls import WINDOW
from shmserve.workers.model_calls.pending import CallInput, CallResponse

if TYPE_CHECKING:
    from shmserve.protocol.messages import Value
    from shmserve.workers.batch.gather import GatherGroup
    from shmserve.workers.gpu.shared import DevicePiece
    from shmserve.workers.model_calls.answer import Request

Array = np.ndarray[Any, np.dtype[Any]]
_NO_TEXT = (0, 0)
_STRING, _INT, _BOOL, _DOUBLE, _BYTES = range(5)
_WORD = (1 << 64) - 1
_BUFFER_WORDS = 3
_DTYPES = dict(enumerate(BY_NUMBER))
CPU, PINNED, GPU = range(3)
"""Kinds of memory by their number in the interface."""
UNKNOWN_OUTPUT = _WORD
FINAL = 1
"""The flag of the last response."""
RESCHEDULE = 2
"""The flag of a release: the request is to run again."""


class NativeEvent(IntEnum):
    """What the backend did. SENT: a response. FINISHED: there are no more. RELEASED: its inputs are no longer read.
    LOST: nothing is left that could answer it. DROPPED: a response will not be sent. STATE: its sequence's new one."""

    SENT = 1
    FINISHED = 2
    RELEASED = 3
    LOST = 4
    DROPPED = 5
    STATE = 6


class RequestWriter:
    """Writes the requests of one model. `outputs`: their names in the order of the shim's table."""

    def __init__(self, outputs: Sequence[str]) -> None:
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
        for index, tensor in enumerate(arrays):
            if tensor is None:
                continue
            inputs += 1
            shape, parts = tensor if isinstance(tensor, StoredInput) else (tensor.shape, (_encoded(tensor),))
            kept += parts
            words.extend((index, len(shape), *shape))
            buffers = [word for part in parts if part.nbytes for word in _buffer(part)]
            words.append(len(buffers) // _BUFFER_WORDS)
            words.extend(buffers)
        parameters = options.parameters if options is not None else {}
        for name, value in parameters.items():
            words.extend(parameter_words(name, value))
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


def alike_words(group: GatherGroup, inputs: int, kept: list[Any]) -> array[int]:
    """Describes the stacked inputs of requests that are alike. `kept` gets their memory."""
    words: array[int] = array("Q")
    for index in range(inputs):
        stacked = group.array(index)
        assert stacked is not None
        kept.append(stacked)
        size = stacked.nbytes // stacked.shape[0]
        words.extend((index, address_of(stacked), size, stacked.ndim, *stacked.shape))
    return words


def _options_of(options: Options | None) -> Sequence[int]:
    if options is None:
        return (0, 0, 0, *_NO_TEXT, *_NO_TEXT)
    sequence = options.sequence
    number, text = (sequence, "") if isinstance(sequence, int) else (0, sequence)
    flags = options.sequence_start + 2 * options.sequence_end
    return (flags, options.queue_timeout_us, number, *text_words(text), *text_words(options.id))


def text_words(text: str) -> Sequence[int]:
    data = text.encode()
    count = len(data) // 8 + 1
    return (len(data), *struct.unpack(f"={count}Q", data.ljust(8 * count, b"\0")))


def parameter_words(name: str, value: Value) -> Sequence[int]:
    if isinstance(value, str):
        return (_STRING, *text_words(name), *text_words(value))
    if isinstance(value, bool):
        return (_BOOL, *text_words(name), value)
    if isinstance(value, int):
        return (_INT, *text_words(name), value & _WORD)
    return (_DOUBLE, *text_words(name), *struct.unpack("=Q", struct.pack("=d", value)))


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


class NativeCall(Struct):
    """A request that the backend makes."""

    model: str
    version: int
    inputs: list[CallInput]
    outputs: list[str]
    options: Options


def reply_words(response: CallResponse, kept: list[Any]) -> array[int]:
    """Describes a response to a call. `kept` gets what must live until it is delivered."""
    words: array[int] = array("Q", (triton_number(response.code) + 1 if response.code else 0,))
    words.extend(text_words(response.text))
    words.append(len(response.outputs))
    for name, tensor in response.outputs:
        data = _encoded(tensor)
        kept.append(data)
        words.extend((*text_words(name), BY_NUMBER.index(from_numpy(tensor.dtype)), tensor.ndim, *tensor.shape))
        words.extend((address_of(data), data.nbytes))
    parameters = response.parameters or {}
    words.append(len(parameters))
    for name, value in parameters.items():
        words.extend(parameter_words(name, value))
    return words


def _buffer(part: Array | DevicePiece) -> tuple[int, int, int]:
    """Returns address, size and kind of memory."""
    if isinstance(part, np.ndarray):
        return address_of(part), part.nbytes, CPU
    return part.address, part.nbytes, GPU


def _encoded(array: Array) -> Array:
    """Returns the bytes of an array as the backend reads them."""
    if array.dtype == object:
        return np.frombuffer(encode_bytes(array), np.uint8)
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


class WordReader:
    """Reads the words of events or of a call, in order."""

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
        text = self.text() if error else ""
        outputs = []
        for _ in range(self.word()):
            index, dtype, shape, place, size = self._tensor()
            name = self.text()
            data = None if self.word() else ctypes.string_at(place, size)
            outputs.append(SentTensor(index, name, dtype, shape, data))
        return SentResponse(number, error, text, outputs, dict([self.parameter() for _ in range(self.word())]))

    def state(self, names: Sequence[str]) -> SentTensor:
        index, dtype, shape, place, size = self._tensor()
        return SentTensor(index, names[index], dtype, shape, ctypes.string_at(place, size))

    def call(self) -> NativeCall:
        model, version, name = self.text(), ctypes.c_int64(self.word()).value, self.text()
        flags, timeout_us, priority, number, text = (*(self.word() for _ in range(4)), self.text())
        inputs = []
        while self.word():
            inputs.append(self._input())
        outputs = []
        while self.word():
            outputs.append(self.text())
        parameters = dict([self.parameter() for _ in range(self.word())])
        options = Options(
            name, priority, timeout_us, text or number, bool(flags & 1), bool(flags & 2), parameters, window=WINDOW
        )
        return NativeCall(model, max(version, 0), inputs, outputs, options)

    def _input(self) -> CallInput:
        """Returns an input, as a view if it is in one part: the backend keeps it until it gets its request back."""
        name, dtype = self.text(), _DTYPES.get(self.word(), "")
        shape = tuple(self.word() for _ in range(self.word()))
        chunks = [(ctypes.c_char * size).from_address(place) for place, size in self._pairs() if size]
        data: Any = chunks[0] if len(chunks) == 1 else b"".join(chunk.raw for chunk in chunks)
        if dtype == "BYTES":
            return CallInput(name, decode_bytes(bytes(data), shape, f"input '{name}'"))
        try:
            return CallInput(name, np.frombuffer(data, to_numpy(dtype)).reshape(shape))
        except (KeyError, ValueError) as error:
            raise InvalidRequest(
                f"input '{name}' cannot be {dtype or 'of an invalid type'} {list(shape)}: {error}"
            ) from None

    def _pairs(self) -> list[tuple[int, int]]:
        return [(self.word(), self.word()) for _ in range(self.word())]

    def _tensor(self) -> tuple[int, str, tuple[int, ...], int, int]:
        at = self._at
        index, dtype, place, size, rank = self._words[at : at + 5]
        self._at = at + 5 + rank
        return index, _DTYPES.get(dtype, ""), self._words[at + 5 : self._at], place, size

    def text(self) -> str:
        address, size = self.word(), self.word()
        return ctypes.string_at(address, size).decode(errors="backslashreplace")

    def parameter(self) -> tuple[str, Value]:
        name, kind, word = self.text(), self.word(), self.word()
        if kind in (_STRING, _BYTES):
            return name, ctypes.string_at(word, self.word()).decode(errors="backslashreplace")
        if kind == _DOUBLE:
            return name, float(struct.unpack("=d", struct.pack("=Q", word))[0])
        return name, bool(word) if kind == _BOOL else ctypes.c_int64(word).value
