"""Splits encoded inference requests, and assembles encoded responses. Invariant: only the fields around the tensors are
processed, never the bytes of tensors.

Protobuf decodes these fields, once for all requests in which they are identical (`plans`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shmserve.errors import Internal, InvalidRequest
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.kserve.plans import INT64_MAX
from shmserve.gateway.kserve.status import encodable
from shmserve.gateway.limits.bounded_cache import BoundedCache
from shmserve.gateway.upstream.link import Piece
from shmserve.protocol.grpc.messages import message_class, unreadable
from shmserve.protocol.messages import INLINE_BYTES, Tensor, Value

FIELDS = 1024
"""Maximum number of fields in a request: inputs, outputs and parameters have their own, lower limits."""
_VARINT, _FIXED64, LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5
_ID, _RAW = 0x1A, 0x3A
_TAKEN = frozenset((_ID, _RAW))
_OTHERS = frozenset((0x0A, 0x12, 0x22, 0x2A, 0x32))
_CACHED = 4096
_REQUEST = "ModelInferRequest"
_TENSOR = message_class("inference.ModelInferResponse.InferOutputTensor")
_RESPONSE = message_class("inference.ModelInferResponse")
_STREAMED = message_class("inference.ModelStreamInferResponse")


class Taken:
    """A request in parts: the fields around its tensors without the id, the id, and the bytes of the tensors."""

    __slots__ = ("head", "id", "raw")

    def __init__(self, head: bytes, request_id: str, raw: list[Piece]) -> None:
        self.head = head
        self.id = request_id
        self.raw = raw


def take_apart(data: Buffer) -> Taken:
    """InvalidRequest: `data` is not an encoded request."""
    size = len(data)
    whole: Buffer = data if size <= INLINE_BYTES else memoryview(data)
    request_id = ""
    raw: list[Piece] = []
    runs: list[Buffer] = []
    begin = at = 0
    try:
        for _ in range(FIELDS):
            if at >= size:
                break
            tag, length = data[at], data[at + 1]
            start = at + 2
            if length > 127:
                length, start = number_at(data, at + 1)
            end = start + length
            if tag in _TAKEN:
                if at > begin:
                    runs.append(whole[begin:at])
                if tag == _RAW:
                    raw.append(whole[start:end])
                else:
                    request_id = bytes(data[start:end]).decode()
                begin = end
            elif tag not in _OTHERS:
                end = _end_of_unknown(data, at)
            at = end
    except (IndexError, UnicodeDecodeError):
        raise unreadable(_REQUEST) from None
    if at != size:
        if at < size:
            raise InvalidRequest(f"a request has more than {FIELDS} inputs, outputs and parameters")
        raise unreadable(_REQUEST)
    if size > begin:
        runs.append(whole[begin:])
    return Taken(bytes(runs[0]) if len(runs) == 1 else b"".join(runs), request_id, raw)


def tensor_at(first: Buffer) -> int | None:
    """Offset of the first large tensor in a request of which only `first` has arrived, or None."""
    at = 0
    try:
        for _ in range(FIELDS):
            length, start = number_at(first, at + 1)
            if first[at] == _RAW and length > INLINE_BYTES:
                return start
            at = start + length
    except (IndexError, InvalidRequest):
        return None
    return None


def number_at(data: Buffer, at: int) -> tuple[int, int]:
    """A varint, and the offset of its end. IndexError: it is truncated."""
    number = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
    raise unreadable(_REQUEST)


def field_at(data: Buffer, at: int) -> tuple[int, int, int]:
    """The tag of a field, and the start and the end of its value, which may lie beyond the end of `data`."""
    tag, start = number_at(data, at)
    kind = tag & 7
    if kind == LENGTH_DELIMITED:
        length, start = number_at(data, start)
        return tag, start, start + length
    if kind == _VARINT:
        return tag, start, number_at(data, start)[1]
    if kind == _FIXED64:
        return tag, start, start + 8
    if kind == _FIXED32:
        return tag, start, start + 4
    raise unreadable(_REQUEST)  # groups


def _end_of_unknown(data: Buffer, at: int) -> int:
    """The end of a field that is not in ModelInferRequest."""
    tag, _, end = field_at(data, at)
    if tag & 7 == LENGTH_DELIMITED and tag >> 3 in range(1, 8):  # a known field in a non-canonical encoding
        raise unreadable(_REQUEST)
    return end


# ---------------------------------------------------------------------------------------- responses


def _varint(number: int) -> bytes:
    if number < 128:
        return b"%c" % number
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def encoded_field(number: int, data: bytes) -> bytes:
    return b"%c%b%b" % (number << 3 | 2, _varint(len(data)), data)


def parameters_of(parameters: dict[str, Value]) -> bytes:
    """The encoded field `parameters` of a response."""
    response = _RESPONSE()
    for name, value in parameters.items():
        parameter = response.parameters[name]
        if type(value) is bool:
            parameter.bool_param = value
        elif type(value) is int:
            if value > INT64_MAX:
                parameter.uint64_param = value
            else:
                parameter.int64_param = value
        elif type(value) is str:
            parameter.string_param = value
        else:
            parameter.double_param = value
    encoded: bytes = response.SerializeToString()
    return encoded


FINAL = "triton_final_response"
IS_FINAL = parameters_of({FINAL: True})
NOT_FINAL = parameters_of({FINAL: False})


class ResponseEncoder:
    """Assembles responses; encoded names and tensor headers are cached."""

    def __init__(self) -> None:
        self._names: BoundedCache[tuple[str, int], bytes] = BoundedCache(_CACHED)
        self._tensors: BoundedCache[tuple[str, str, tuple[int, ...]], bytes] = BoundedCache(_CACHED)

    def infer(
        self,
        model: str,
        version: int,
        request_id: str,
        more: bytes,
        outputs: Sequence[Tensor],
        buffers: Sequence[Sequence[Buffer]] | None,
    ) -> list[Buffer]:
        """A ModelInferResponse. `buffers` None: each output is inline. `more`: encoded fields to add."""
        names = self._names.get((model, version))
        pieces: list[Buffer] = [self._named(model, version) if names is None else names]
        if request_id:
            pieces.append(encoded_field(3, request_id.encode()))
        if more:
            pieces.append(more)
        known = self._tensors
        for tensor in outputs:
            described = known.get((tensor.name, tensor.dtype, tensor.shape))
            pieces.append(self._described(tensor) if described is None else described)
        if buffers is not None:
            for parts in buffers:
                pieces.append(b"2" + _varint(sum([len(part) for part in parts])))
                pieces += parts
            return pieces
        for tensor in outputs:
            data: Any = tensor.data
            if type(data) is not bytes:
                raise Internal("an output is neither in its message nor in shared memory")
            size = len(data)
            pieces.append(b"2%c" % size if size < 128 else b"2" + _varint(size))
            pieces.append(data)
        return [b"".join(pieces)]

    def _named(self, model: str, version: int) -> bytes:
        encoded = encoded_field(1, model.encode()) + (encoded_field(2, str(version).encode()) if version else b"")
        self._names.put((model, version), encoded)
        return encoded

    def _described(self, tensor: Tensor) -> bytes:
        message = _TENSOR(name=tensor.name, datatype=tensor.dtype, shape=tensor.shape)
        encoded = encoded_field(5, message.SerializeToString())
        self._tensors.put((tensor.name, tensor.dtype, tensor.shape), encoded)
        return encoded


def streamed(answer: list[Buffer]) -> list[Buffer]:
    """Wraps a ModelInferResponse in a ModelStreamInferResponse."""
    size = sum([len(piece) for piece in answer])
    return [b"\x12" + _varint(size), *answer]


def stream_error(text: str, request_id: str) -> bytes:
    """A ModelStreamInferResponse with an error."""
    encoded: bytes = _STREAMED(
        error_message=encodable(text), infer_response={"id": request_id} if request_id else None
    ).SerializeToString()
    return encoded
