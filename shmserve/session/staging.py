"""Decides whether tensors on a GPU are sent in place or through host memory.

The caller need not know where a model runs. A model that is not on the tensor's GPU fails the request with HANDLE_LOST;
the request is then resent with the bytes in host memory, and that model gets no more GPU tensors on this connection.
Requests of sequences are always staged: a resent request would have lost its place in the sequence.
"""

from __future__ import annotations

import logging

import numpy as np

from shmserve.errors import ServeError
from shmserve.protocol.messages import Infer
from shmserve.session.memory import SessionMemory
from shmserve.session.streams import StreamTicket
from shmserve.session.ticket import KeptInputs, Ticket

log = logging.getLogger("shmserve")


def place_device_tensors(message: Infer, kept: KeptInputs, memory: SessionMemory) -> None:
    """Fills in the data of GPU tensors, the last missing part of the request."""
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
            if not isinstance(place, np.ndarray):
                devices.synchronize(place)
    except BaseException:
        memory.release_inputs(kept)
        raise


def stage(message: Infer, kept: KeptInputs, memory: SessionMemory) -> None:
    """Moves all GPU inputs to host memory. Outputs for places on a GPU also come through host memory."""
    for index, source in (kept.devices or {}).items():
        tensor = message.inputs[index]
        if memory.shared:
            block = memory.block(source.nbytes, kept)
            memory.devices.fetch_into(source, block.address)
            tensor.data = (block.handle(),)
        else:
            tensor.data = kept.add_frame(tensor.name, memory.devices.fetch(source), memory.frame_bytes)
        memory.devices.release(source)
    kept.devices = None
    for wanted in message.outputs or ():
        place = kept.places.get(wanted.name)
        if place is not None and not isinstance(place, np.ndarray):
            wanted.place = None


def restage(ticket: Ticket, memory: SessionMemory) -> bool:
    """Moves a request whose GPU memory the worker cannot read to host memory. False: it cannot be sent again."""
    message, kept = ticket.message, ticket.kept
    if not isinstance(message, Infer) or kept is None or kept.devices is None:
        return False
    if isinstance(ticket, StreamTicket) and ticket.begun:
        return False
    memory.devices.far.add(message.model)
    try:
        stage(message, kept, memory)
    except ServeError as error:
        log.warning("cannot copy GPU tensors through host memory: %s", error)
        return False
    return True
