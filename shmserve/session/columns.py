"""Several requests of one form in one message, and their replies."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from shmserve.dtypes import ITEM_BYTES
from shmserve.protocol.messages import CHUNK_BYTES, Columns, Infer, InferBatch, Reply, Tensor, TensorForm

MIN_REQUESTS = 12
"""Minimum number of requests. For sender, broker and worker together, an InferBatch of 8 costs as much as 8 messages,
and one of 16 costs an eighth less."""


def in_batches(messages: list[Any], limit: int) -> list[Any]:
    """Replaces MIN_REQUESTS or more consecutive requests of one form by InferBatches of up to `limit`. Keeps the order.

    Every request pays for this check, so requests with a single input are compared without a call."""
    if len(messages) < MIN_REQUESTS:
        return messages
    result: list[Any] = []
    run: list[Infer] = []
    last: Any = None
    room = 0
    for message in messages:
        key: Any = None
        if type(message) is Infer and message.options is None and message.outputs is None:
            inputs = message.inputs
            if len(inputs) == 1:
                tensor = inputs[0]
                if type(tensor.data) is bytes:
                    key = (
                        message.model,
                        message.version,
                        message.timeout_us,
                        message.payer,
                        tensor.name,
                        tensor.dtype,
                        tensor.shape,
                    )
            else:
                key = _key(message)
        if key is not None and key == last and len(run) < room:
            run.append(message)
            continue
        if run:
            result += _joined(run)
        if key is None:
            result.append(message)
            run, last = [], None
        else:
            run, last = [message], key
            room = min(limit, CHUNK_BYTES // _inline_bytes(message)) if _fits(message) else 1
    return result + _joined(run)


def _key(message: Infer) -> Any:
    """The properties that must be equal within an InferBatch; None if a tensor is not inside the message."""
    if not message.inputs or any(type(tensor.data) is not bytes for tensor in message.inputs):
        return None
    forms = [(tensor.name, tensor.dtype, tensor.shape) for tensor in message.inputs]
    return message.model, message.version, message.timeout_us, message.payer, forms


def _fits(message: Infer) -> bool:
    """Whether the inputs have the same axis 0 and a fixed size per row. Strings have no fixed size and are checked one
    by one. An axis 0 that columns cannot represent, from a client of a gateway, is refused for that request only."""
    shape = message.inputs[0].shape
    return (
        shape != ()
        and 0 <= shape[0] < 1 << 63
        and all(tensor.shape[:1] == shape[:1] and ITEM_BYTES.get(tensor.dtype, 0) > 0 for tensor in message.inputs)
    )


def _inline_bytes(message: Infer) -> int:
    return 1 + sum([len(tensor.data) for tensor in message.inputs if type(tensor.data) is bytes])


def _joined(run: list[Infer]) -> list[Any]:
    if len(run) < MIN_REQUESTS:
        return run
    first = run[0]
    if len(first.inputs) == 1:
        data: Any = tuple([(message.inputs[0].data,) for message in run])
    else:
        data = tuple([tuple([tensor.data for tensor in message.inputs]) for message in run])
    columns = Columns(
        tuple([TensorForm(tensor.name, tensor.dtype, tensor.shape[1:]) for tensor in first.inputs]),
        tuple([message.request for message in run]),
        (first.inputs[0].shape[0],) * len(run),
        data,
    )
    return [InferBatch(first.model, first.version, columns, first.timeout_us, first.payer)]


class RowReply(Struct, gc=False):
    """The reply to one request of an InferBatch: a tensor with the shape and the bytes for each form."""

    request: int
    version: int
    forms: tuple[TensorForm, ...]
    shapes: tuple[tuple[int, ...], ...]
    data: tuple[bytes, ...]


def reply_of(
    request: int,
    version: int,
    forms: tuple[TensorForm, ...],
    shapes: tuple[tuple[int, ...], ...],
    data: tuple[bytes, ...],
) -> Reply:
    """The fields of a RowReply as a Reply."""
    return Reply(
        request,
        version,
        tuple(
            [Tensor(form.name, form.dtype, shape, blob) for form, shape, blob in zip(forms, shapes, data, strict=True)]
        ),
    )
