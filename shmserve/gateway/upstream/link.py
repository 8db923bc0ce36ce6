"""The lane to the broker, with tensors as bytes. Invariant: tensors are never decoded into typed arrays or strings.
Their bytes pass unchanged from the network to the model and back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from typing import Any

import numpy as np

from shmserve.errors import Internal, InvalidRequest, ServeError, Unavailable, Unsupported
from shmserve.gateway.kserve.answers import Buffer, Held
from shmserve.gateway.kserve.plans import InputPlan
from shmserve.gateway.limits.backlog import InputBacklog
from shmserve.gateway.limits.bounded_cache import BoundedCache
from shmserve.gateway.limits.caller_shares import CallerShares, ShareBounds
from shmserve.gateway.limits.turns import COPY_BYTES, JobTurns, ReadTurns, SlicedWork
from shmserve.gateway.upstream.receive import Room
from shmserve.protocol.messages import INLINE_BYTES, Fail, Infer, Part, Reply, Tensor
from shmserve.protocol.namespaces import plain
from shmserve.session import Session, Ticket
from shmserve.session.columns import reply_of
from shmserve.session.encode import MESSAGE_BYTES
from shmserve.session.foreign_memory import ForeignRegion, RegionPart
from shmserve.session.memory import SessionMemory
from shmserve.session.ticket import KeptInputs
from shmserve.shm.views import Array
from shmserve.transport.address import address_of
from shmserve.transport.loop_link import LoopLink

_BYTE = np.dtype("uint8")
RETURN_BYTES = 4 << 20
"""From this total size, outputs are returned to the server at once."""
TRIM_S = 10.0
"""Interval for freeing unused memory of inputs."""
KNOWN_CONFIGS = 256
"""Maximum number of configurations of models that are kept."""
RECONNECT_S = 1.0
"""Time for which calls wait for a server that is being restarted."""
Piece = bytes | bytearray | memoryview | Array
"""The bytes of a tensor; an array was allocated by `allocate`, so the model can read it in place."""


def _explain_lost(message: Fail, ticket: Ticket, memory: SessionMemory) -> Fail:
    """The error for a request whose memory a worker could not open, if clients have registered that memory."""
    regions = _regions_of(ticket, memory)
    if any(region.on_gpu for region in regions):
        text = f"{message.text}; CUDA shared memory works only with models on the same GPU"
        return Fail(message.request, Unsupported.code, text)
    if not regions:
        return message
    for region in regions:
        region.lost = True
    text = "the model's worker could not open the shared memory by its key; retry, the gateway now copies it"
    return Fail(message.request, Unavailable.code, text)


def _regions_of(ticket: Ticket, memory: SessionMemory) -> list[ForeignRegion]:
    """Registered client memory that the request reads or writes."""
    message = ticket.message
    if not isinstance(message, Infer):
        return []
    handles = [part for tensor in message.inputs if isinstance(tensor.data, tuple) for part in tensor.data]
    handles += [wanted.place for wanted in message.outputs or () if wanted.place is not None]
    regions = [memory.foreign.regions.get(handle.segment) for handle in handles]
    return [region for region in regions if region is not None]


def _as_they_are(inputs: Any, memory: SessionMemory) -> Any:
    """Inputs are the result of `stored`."""
    return inputs


def _held(reply: Reply | Part, frames: Any, places: Any, memory: SessionMemory) -> Any:
    """An inline reply is returned unchanged."""
    if type(reply) is Reply and all(type(tensor.data) is bytes for tensor in reply.outputs):
        return reply
    return Held(reply, [_buffers(tensor, memory) for tensor in reply.outputs])


def _buffers(tensor: Tensor, memory: SessionMemory) -> list[Buffer]:
    data = tensor.data
    if isinstance(data, int):
        raise Internal("an output arrived in a frame, which the Unix socket does not support")
    if not isinstance(data, tuple):
        return [data]
    if len(data) == 1 and memory.is_own(data[0]):
        return []  # the output is in the client's region
    dropped = memory.drops.dropped
    buffers: list[Buffer] = []
    remaining = list(data)
    try:
        while remaining:
            handle = remaining[0]
            buffers.append(memory.mapped.view(handle, _BYTE, (handle.size,), on_drop=dropped).data)
            del remaining[0]
    except BaseException:
        for handle in remaining:
            dropped(handle)
        raise
    return buffers


def stored(memory: SessionMemory, inputs: Iterable[InputPlan | Tensor], pieces: Iterable[Piece | RegionPart]) -> Any:
    """The inputs of one request, stored for the broker: small ones in the message, large ones in this process's arena.
    Returns the argument of `Session.infer`."""
    tensors: list[Tensor] = []
    kept: KeptInputs | None = None
    total = 0
    for tensor, piece in zip(inputs, pieces, strict=True):
        if isinstance(piece, RegionPart):
            data: Any = (piece.handle,)
        elif len(piece) <= INLINE_BYTES and total + len(piece) <= MESSAGE_BYTES:
            total += len(piece)
            data = bytes(piece)
        else:
            if not isinstance(piece, np.ndarray):
                place = allocate(memory, len(piece))
                place.data[:] = piece
                piece = place
            located = memory.locate(piece)
            if located is None:
                raise Internal("the location of an input is not in this process's arena")
            kept = kept or KeptInputs()
            kept.arrays.append(piece)
            data = (located[0],)
        tensors.append(Tensor(tensor.name, tensor.dtype, tensor.shape, data))
    return tuple(tensors), kept, total


def allocate(memory: SessionMemory, size: int) -> Array:
    """Allocates bytes that workers can read; they are freed with the array. Unavailable: the arena is full."""
    return memory.empty((size,), _BYTE)


def placed_in_slices(memory: SessionMemory, data: Piece) -> SlicedWork[Piece]:
    """Copies a large input to memory that workers can read, so that sending it, also in several requests, copies
    nothing. Returns `data` if it is sent inline or has been copied already; or if the arena is full, which is for the
    request to report."""
    size = len(data)
    if size <= INLINE_BYTES or isinstance(data, np.ndarray):
        return data
    try:
        array = memory.empty((size,), _BYTE, cold=True)
        for at in range(0, size, COPY_BYTES):
            end = min(at + COPY_BYTES, size)
            memory.warm(array, at, end)
            array[at:end] = memoryview(data)[at:end]
            if end < size:
                yield
    except Unavailable:
        return data
    return array


PARTIAL_SHARE = 0.5
"""Maximum fraction of the memory for inputs that may hold tensors of which only a part has arrived. The rest is
reserved for complete requests, so clients that never finish a body cannot use it up."""


def partial_room(memory: SessionMemory, size: int, shift: int = 0) -> Room | None:
    """Like `allocate`, for a tensor that has not arrived completely: `size` bytes, `shift` bytes after the start of a
    block. None: receive the bytes elsewhere and copy them."""
    if memory.used >= PARTIAL_SHARE:
        return None
    try:
        array = memory.empty((size + shift,), _BYTE, cold=True)[shift:]
    except Unavailable:
        return None
    return Room(array.data, partial(memory.warm, array))


class GatewayLink:
    """The connection of a gateway to the broker. All endpoints share it, and their clients share its limits on requests
    in flight. `make_link` makes the link that it owns."""

    def __init__(
        self,
        url: str | None,
        runtime_dir: str | None,
        name: str,
        memory_bytes: int,
        bounds: ShareBounds | None = None,
        busy_poll_ns: int = 0,
        make_link: Callable[..., LoopLink] = LoopLink,
    ) -> None:
        address = address_of(url, runtime_dir)
        if address.kind != "unix":
            raise InvalidRequest(
                f"a gateway must run on the server's machine and use its Unix socket, not {address.url}"
            )
        self.shares = CallerShares(bounds or ShareBounds(input_bytes=memory_bytes))
        self._configs: BoundedCache[str, Any] = BoundedCache(KNOWN_CONFIGS)
        """Configurations by the names with which they were asked for: those of models, with or without a namespace."""
        self._link = make_link(
            address,
            name,
            RECONNECT_S,
            memory_bytes,
            make_session=partial(
                Session,
                cold=True,
                encode=_as_they_are,
                decode=_held,
                row_reply=reply_of,
                on_limits=self.shares.limits,
                on_changed=self._forget_config,
                explain_lost=_explain_lost,
                keeps=True,
            ),
            hold_bytes=RETURN_BYTES,
            busy_poll_ns=busy_poll_ns,
        )
        self.session = self._link.session
        self._trim_timer: asyncio.TimerHandle | None = None

    def bind(self) -> asyncio.AbstractEventLoop:
        loop = self._link.bind()
        if self._trim_timer is None:
            self._trim_timer = loop.call_later(TRIM_S, self._trim, loop)
        return loop

    def _trim(self, loop: asyncio.AbstractEventLoop) -> None:
        """Frees memory that the bodies of earlier requests have left unused."""
        self._trim_timer = loop.call_later(TRIM_S, self._trim, loop)
        if self.session.memory.trim() and self.session.connected:
            self.send_soon()

    def send_soon(self, with_deadline: bool = False) -> None:
        self._link.send_soon(with_deadline)

    def cancel(self, ticket: Ticket) -> None:
        self._link.cancel(ticket)

    def known_config(self, model: str) -> Any:
        """The configuration of a model, if the broker has sent it and has not announced a change. None: ask for it."""
        known = self._configs.get(model)
        return known if known is not None and not self._link.has_input else None

    def keep_config(self, model: str, config: Any) -> Any:
        """Called with the answer to a query with `follow`. Returns it."""
        self._configs.put(model, config)
        return config

    def _forget_config(self, model: str) -> None:
        """`model`: "" if all may have changed."""
        if model:
            self._configs.pop(model, None)
            self._configs.pop(plain(model), None)
        else:
            self._configs.clear()

    async def close(self, error: ServeError | None = None) -> None:
        if self._trim_timer is not None:
            self._trim_timer.cancel()
        await self._link.close(error)

    @cached_property
    def turns(self) -> JobTurns:
        """Shared by all endpoints."""
        return JobTurns(self.bind())

    @cached_property
    def reads(self) -> ReadTurns:
        """Shared by all endpoints."""
        return ReadTurns(self.bind())

    @cached_property
    def backlog(self) -> InputBacklog:
        """Shared by all endpoints."""
        return InputBacklog(self.bind())
