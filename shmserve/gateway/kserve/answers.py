"""A reply of the broker -> the JSON and the buffers to send. Invariant: tensors requested as binary data are passed on
in place, never joined or copied here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from shmserve.errors import Internal, InvalidRequest
from shmserve.gateway.kserve.json_tensors import to_json, to_json_in_slices
from shmserve.gateway.kserve.plans import RequestPlan
from shmserve.gateway.limits.turns import SlicedWork
from shmserve.protocol.messages import Part, Reply, Tensor

Buffer = bytes | bytearray | memoryview


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
    model: str, plan: RequestPlan, answer: Reply | Held, write: Callable[[str, list[Buffer]], None] | None = None,
    texts: Mapping[str, msgspec.Raw] | None = None,
) -> tuple[int | None, list[Buffer]]:  # fmt: skip
    """The length of the JSON if binary data follows it, else None; and the buffers to send. `write` writes an output to
    its shared memory region. `texts`: outputs that have already been encoded as JSON."""
    reply, buffers = _parts(answer)
    outputs: list[_ResponseOutput] = []
    behind: list[Buffer] = []
    binary = False
    for index, tensor in enumerate(reply.outputs):
        parts: list[Buffer] = [_inline(tensor.data)] if buffers is None else buffers[index]
        if write is not None and tensor.name in plan.places:
            check_room(plan, tensor.name, sum([len(part) for part in parts]))
            write(tensor.name, parts)
            # The output has no parameters that name its region: clients take any parameters for those of binary data.
            outputs.append(_ResponseOutput(tensor.name, tensor.dtype, tensor.shape))
        elif plan.is_binary(tensor.name):
            binary = True
            behind += parts
            size = _Size(sum([len(part) for part in parts]))
            outputs.append(_ResponseOutput(tensor.name, tensor.dtype, tensor.shape, size))
        else:
            if texts is None:
                data = to_json(tensor.name, tensor.dtype, tensor.shape, joined(parts))
            else:
                data = texts[tensor.name]
            outputs.append(_ResponseOutput(tensor.name, tensor.dtype, tensor.shape, None, data))
    text = _encode(_Response(model, str(reply.version), outputs, plan.options.id, reply.parameters or None))
    return (len(text) if binary else None), [text, *behind]


def _parts(answer: Reply | Held) -> tuple[Reply | Part, list[list[Buffer]] | None]:
    if type(answer) is Held:
        return answer.reply, answer.buffers
    assert isinstance(answer, Reply)
    return answer, None


def as_json(plan: RequestPlan, answer: Reply | Held) -> list[tuple[Tensor, list[Buffer]]]:
    """The outputs to be sent as JSON, if part of the reply is in shared memory and therefore may be large."""
    reply, buffers = _parts(answer)
    if buffers is None:
        return []
    wanted = [not (plan.is_binary(tensor.name) or tensor.name in plan.places) for tensor in reply.outputs]
    return [pair for pair, yes in zip(zip(reply.outputs, buffers, strict=True), wanted, strict=True) if yes]


def texts_in_slices(outputs: list[tuple[Tensor, list[Buffer]]]) -> SlicedWork[dict[str, msgspec.Raw]]:
    texts = {}
    for tensor, parts in outputs:
        texts[tensor.name] = yield from to_json_in_slices(tensor.name, tensor.dtype, tensor.shape, joined(parts))
    return texts


def check_room(plan: RequestPlan, name: str, size: int) -> None:
    place = plan.places[name]
    if size > place.size:
        raise InvalidRequest(
            f"shared memory size specified with the request for output '{name}' ({place.size} bytes) should be at "
            f"least {size} bytes to hold the results"
        )


def _inline(data: Any) -> bytes:
    if type(data) is not bytes:
        raise Internal("an output is neither in its message nor in shared memory")
    return data


def joined(parts: Sequence[Buffer]) -> bytes:
    return parts[0] if len(parts) == 1 and type(parts[0]) is bytes else b"".join(parts)
