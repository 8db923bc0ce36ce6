"""Whether tensors on a GPU go to the server as they are, or by way of the host.

The rule of the file: nobody need know beforehand where a model runs. One that is not on the tensor's GPU says so, with
HANDLE_LOST; then the same request is sent once more, with the bytes in host memory, and that model is not tried again
on this connection. Requests of sequences are not tried at all: sent once more they would have lost their place.
"""

from __future__ import annotations

import logging

from shmserve.errors import ServeError
from shmserve.protocol.messages import Infer
from shmserve.session.gpu.tensors import DeviceRef
from shmserve.session.memory import SessionMemory
from shmserve.session.streams import StreamTicket
from shmserve.session.ticket import KeptInputs, Ticket

log = logging.getLogger("shmserve")


def settle(message: Infer, kept: KeptInputs, memory: SessionMemory) -> None:
    """The request is complete but for the bytes of what is on a GPU."""
    assert kept.devices is not None
    devices, options = memory.devices, message.options
    try:
        if (
            not memory.announcements.device_memory
            or message.model in devices.far
            or (options is not None and options.sequence)
        ):
            stage(message, kept, memory)
            return
        for index, source in kept.devices.items():
            message.inputs[index].data = (devices.export(source),)
        for place in kept.places.values():
            if isinstance(place, DeviceRef):
                devices.settle(place)
    except BaseException:
        memory.let_go(kept)
        raise


def stage(message: Infer, kept: KeptInputs, memory: SessionMemory) -> None:
    """All of it goes by way of the host: also what is written to a place there comes from there."""
    for index, source in (kept.devices or {}).items():
        tensor = message.inputs[index]
        if memory.shared:
            block = memory.block(source.nbytes, kept)
            memory.devices.fetch_into(source, block.address)
            tensor.data = (block.handle(),)
        else:
            tensor.data = kept.add_frame(tensor.name, memory.devices.fetch(source), memory.frame_bytes)
        memory.devices.let_go(source)
    kept.devices = None
    for wanted in message.outputs or ():
        if isinstance(kept.places.get(wanted.name), DeviceRef):
            wanted.place = None


def once_more(ticket: Ticket, memory: SessionMemory) -> bool:
    """What is on a GPU cannot be read there: the request is made fit to be sent again. False: there is no other way."""
    message, kept = ticket.message, ticket.kept
    if not isinstance(message, Infer) or kept is None or kept.devices is None:
        return False
    if isinstance(ticket, StreamTicket) and ticket.begun:
        return False
    memory.devices.far.add(message.model)
    try:
        stage(message, kept, memory)
    except ServeError as error:
        log.warning("what is on a GPU cannot go by way of the host: %s", str(error))
        return False
    return True
