"""A request made fit for a new connection. The rule of the file: bytes are the same, only the numbers of segments
change; what lay in memory of the old server's workers is copied to the caller's own.
"""

from __future__ import annotations

from msgspec.structs import replace

from shmserve.messages import Handle, Infer, Tensor
from shmserve.session.memory import Memory
from shmserve.session.ticket import Kept


def renewed(message: Infer, kept: Kept | None, numbers: dict[int, int], memory: Memory) -> Infer:
    """The same request for the server that knows the own segments by their new numbers."""
    if kept is None:
        return message
    tensors = []
    for index, tensor in enumerate(message.inputs):
        data = tensor.data
        if isinstance(data, tuple):
            array = kept.received.pop(index, None)
            if array is not None:
                data = (memory.copy_in(array, kept),)
            else:
                data = tuple([_renumbered(handle, numbers) for handle in data])
        tensors.append(Tensor(tensor.name, tensor.dtype, tensor.shape, data))
    outputs = message.outputs
    if outputs is not None:
        outputs = tuple(
            [
                wanted if wanted.place is None else replace(wanted, place=_renumbered(wanted.place, numbers))
                for wanted in outputs
            ]
        )
    return Infer(
        message.request, message.model, message.version, tuple(tensors), outputs, message.timeout_us, message.options
    )


def _renumbered(handle: Handle, numbers: dict[int, int]) -> Handle:
    return Handle(numbers.get(handle.segment, handle.segment), handle.offset, handle.size)
