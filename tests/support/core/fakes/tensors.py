"""Tensors of messages, in columns or request by request."""

from __future__ import annotations

from typing import Any

from shmserve.protocol.messages import Columns, Fail, FailBatch, Handle, Reply, ReplyBatch, Tensor, TensorForm
from shmserve.protocol.worker_messages import Row


def references(tensors: tuple[Tensor, ...]) -> list[Handle]:
    return [handle for tensor in tensors if isinstance(tensor.data, tuple) for handle in tensor.data]


def one_input(rows: int = 1) -> Tensor:
    return Tensor("x", "FP32", (rows, 1), bytes(4 * rows))


def one_by_one(columns: Columns) -> list[tuple[int, tuple[Tensor, ...]]]:
    """The number of each request, and its tensors."""
    count = len(columns.requests)
    assert 0 < count == len(columns.rows) == len(columns.data), f"columns of different length: {columns}"
    assert {len(blobs) for blobs in columns.data} == {len(columns.forms)}, f"not one tensor for each form: {columns}"
    return [
        (
            columns.requests[index],
            tuple(
                Tensor(form.name, form.dtype, (columns.rows[index], *form.dims), columns.data[index][place])
                for place, form in enumerate(columns.forms)
            ),
        )
        for index in range(count)
    ]


def replies_of(message: Any) -> list[Any]:
    """The answers in a ReplyBatch or FailBatch; else the message itself."""
    if isinstance(message, FailBatch):
        return [Fail(number, message.code, message.text) for number in message.requests]
    if isinstance(message, ReplyBatch):
        return [Reply(number, message.version, outputs) for number, outputs in one_by_one(message.columns)]
    return [message]


def in_columns(rows: tuple[Row, ...]) -> Columns | None:
    """The results as columns, which a worker may send if all are inside the message and of one form."""
    if not rows or any(row.error is not None or row.parameters or not row.outputs for row in rows):
        return None
    tensors = [tensor for row in rows for tensor in row.outputs]
    if any(not isinstance(tensor.data, bytes) or not tensor.shape for tensor in tensors):
        return None
    forms = [tuple(TensorForm(one.name, one.dtype, one.shape[1:]) for one in row.outputs) for row in rows]
    if forms.count(forms[0]) != len(forms) or any(len({one.shape[0] for one in row.outputs}) > 1 for row in rows):
        return None
    return Columns(
        forms[0],
        tuple(row.request for row in rows),
        tuple(row.outputs[0].shape[0] for row in rows),
        tuple(tuple(one.data for one in row.outputs if isinstance(one.data, bytes)) for row in rows),
    )
