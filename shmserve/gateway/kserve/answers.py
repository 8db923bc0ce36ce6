"""A reply of the broker -> the JSON and the buffers to send. Invariant: tensors requested as binary data are passed on
in place, never joined or copied here."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from shmserve.errors import Internal, InvalidRequest
from shmserve.gateway.kserve import json_tensors
from shmserve.gateway.kserve.plans import RegionSlice, RequestPlan
from shmserve.gateway.limits.turns import SLICE_BYTES, SlicedWork
from shmserve.protocol.messages import Part, Reply, Tensor

Buffer = json_tensors.Buffer
JsonPieces = Mapping[str, list[Buffer]]
"""Output -> the pieces of its JSON, without the brackets of the list."""
PLACE = msgspec.Raw(b'"%b"' % secrets.token_hex(16).encode())
"""Stands for the pieces of an output while the JSON around them is encoded. It is random, so that no text of a client
can equal it."""


class OutputTarget(Protocol):
    """A shared memory region of the client."""

    def write(self, place: RegionSlice, parts: Sequence[Buffer]) -> None: ...


Targets = Mapping[str, OutputTarget]
"""Output -> the region that it is written to, instead of being sent."""


class Held(Struct):
    """A reply with outputs in shared memory: the buffers of each tensor, in order. The memory is returned when the last
    view of a buffer is dropped."""

    reply: Reply | Part
    buffers: list[list[Buffer]]


class _Size(Struct):
    binary_data_size: int


class _ResponseOutput(Struct, omit_defaults=True):
    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: _Size | None = None
    data: msgspec.Raw | None = None


class _Response(Struct, omit_defaults=True):
    model_name: str
    model_version: str
    outputs: list[_ResponseOutput]
    id: str = ""
    parameters: dict[str, Any] | None = None


_encode = msgspec.json.Encoder().encode


def response(
    model: str,
    plan: RequestPlan,
    answer: Reply | Held,
    targets: Targets | None = None,
    pieces: JsonPieces | None = None,
) -> tuple[int | None, list[Buffer]]:
    """The length of the JSON if binary data follows it, else None; and the buffers to send. `pieces`: outputs that have
    already been encoded as JSON."""
    reply, buffers = _parts(answer)
    outputs: list[_ResponseOutput] = []
    behind: list[Buffer] = []
    large: list[list[Buffer]] = []
    binary = False
    for index, tensor in enumerate(reply.outputs):
        parts: list[Buffer] = [_inline(tensor.data)] if buffers is None else buffers[index]
        if targets is not None and tensor.name in targets:
            write_output(plan, targets, tensor.name, parts)
            # The output has no parameters that name its region: clients take any parameters for those of binary data.
            outputs.append(_ResponseOutput(tensor.name, tensor.dtype, tensor.shape))
        elif plan.is_binary(tensor.name):
            binary = True
            behind += parts
            outputs.append(_ResponseOutput(tensor.name, tensor.dtype, tensor.shape, _Size(size_of(parts))))
        else:
            if pieces is None:
                data = json_tensors.to_json(tensor.name, tensor.dtype, tensor.shape, joined(parts))
            else:
                data = PLACE
                large.append([b"[", *pieces[tensor.name], b"]"])
            outputs.append(_ResponseOutput(tensor.name, tensor.dtype, tensor.shape, None, data))
    text = _encode(_Response(model, str(reply.version), outputs, plan.options.id, reply.parameters or None))
    if large:
        document = spliced(text, large)
        return (size_of(document) if binary else None), [*document, *behind]
    return (len(text) if binary else None), [text, *behind]


def spliced(text: bytes, large: list[list[Buffer]]) -> list[Buffer]:
    """The JSON `text` with the pieces of `large` in the place of each `PLACE`."""
    first, *rest = text.split(bytes(PLACE))
    parts: list[Buffer] = [first]
    for pieces, after in zip(large, rest, strict=True):
        parts += pieces
        parts.append(after)
    return parts


def size_of(parts: Sequence[Buffer]) -> int:
    return sum([len(part) for part in parts])


def _parts(answer: Reply | Held) -> tuple[Reply | Part, list[list[Buffer]] | None]:
    if type(answer) is Held:
        return answer.reply, answer.buffers
    assert isinstance(answer, Reply)
    return answer, None


def large_as_json(plan: RequestPlan, answer: Held) -> list[tuple[Tensor, list[Buffer]]]:
    """The outputs to be sent as JSON, if they are large in total. Those that a message contains never are."""
    outputs = [
        (tensor, parts)
        for tensor, parts in zip(answer.reply.outputs, answer.buffers, strict=True)
        if not (plan.is_binary(tensor.name) or tensor.name in plan.places)
    ]
    return outputs if sum([size_of(parts) for _, parts in outputs]) > SLICE_BYTES else []


def pieces_in_slices(
    outputs: list[tuple[Tensor, list[Buffer]]], hold: Callable[[int], None]
) -> SlicedWork[dict[str, list[Buffer]]]:
    """`hold` is called with the size of each piece of JSON, and may raise to abort."""
    pieces = {}
    for tensor, parts in outputs:
        pieces[tensor.name] = yield from json_tensors.to_json_in_slices(
            tensor.name, tensor.dtype, tensor.shape, parts, hold
        )
    return pieces


def write_output(plan: RequestPlan, targets: Targets, name: str, parts: list[Buffer]) -> None:
    """Writes an output to its shared memory region."""
    place, size = plan.places[name], size_of(parts)
    if size > place.size:
        raise InvalidRequest(
            f"shared memory size specified with the request for output '{name}' ({place.size} bytes) should be at "
            f"least {size} bytes to hold the results"
        )
    targets[name].write(place, parts)


def _inline(data: Any) -> bytes:
    if type(data) is not bytes:
        raise Internal("an output is neither in its message nor in shared memory")
    return data


def joined(parts: Sequence[Buffer]) -> bytes:
    return parts[0] if len(parts) == 1 and type(parts[0]) is bytes else b"".join(parts)
