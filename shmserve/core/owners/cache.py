"""The response cache: identical requests get a stored response, without running the model.

The key contains everything that a response depends on, in full, so different requests never collide. Inputs in shared
memory are copied once into the broker's own memory; the copy is used both for the comparison and by the model. So the
owner may overwrite its memory at any time, and no response is stored for an input that the model has not seen.

Outputs are also copied into the broker's memory and returned as handles, so that cached responses do not occupy
workers' arenas; outputs whose copy would block the broker for too long stay where the worker wrote them. A response is
valid only for the audience and model generation for which it was computed.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from operator import itemgetter
from typing import Any, Protocol

from msgspec import Struct

from shmserve.core.ledger import INTERNAL, Ledger
from shmserve.core.owners.outputs import Outputs
from shmserve.core.records import Request, Version
from shmserve.protocol.messages import OWNER_SHIFT, Handle, Map, Tensor, Value
from shmserve.protocol.trace_context import TRACE_CONTEXT

Key = tuple[Any, ...]
_double = struct.Struct("<d").pack
OVERHEAD = 512
"""Approximate size of an entry besides its tensors."""
COPIED_BYTES = 1 << 20
"""Limit for the inputs, and for the outputs, of one request: the broker blocks while it copies and compares them."""


class Placed(Struct):
    """Where a copy was placed. `announcement`: of its segment, if that is new."""

    handle: Handle
    announcement: Map | None = None


class Copies(Protocol):
    """How the broker reads shared memory and stores copies."""

    def read(self, parts: Sequence[Handle]) -> bytes | None:
        """The bytes of these handles. None: not host memory, or not readable through its descriptor."""

    def place(self, data: bytes, audience: str) -> Placed | None:
        """Stores the bytes where the audience can read them. None: no space, or not possible."""


class CacheEntry(Struct, eq=False):
    version: Version
    outputs: tuple[Tensor, ...]
    parameters: dict[str, Value] | None
    handles: list[Handle]
    size: int


class Cache:
    """An LRU cache of `limit` bytes. 0: disabled."""

    def __init__(self, limit: int, ledger: Ledger, outputs: Outputs) -> None:
        self.limit = limit
        self._copies: Copies | None = None
        """None: only inputs inside messages are compared, and outputs stay where they are."""
        self.clock: Callable[[], int] = lambda: 0
        """In ns, for statistics only: the turn's `now` does not advance during lookups and copies."""
        self.bytes = self.hits = self.misses = self.evictions = 0
        self._ledger = ledger
        self._outputs = outputs
        self._entries: OrderedDict[Key, CacheEntry] = OrderedDict()

    def copy_with(self, copies: Copies, clock: Callable[[], int] | None = None) -> None:
        """Lets the cache copy tensors from and to shared memory. Call it before the first turn if there is a cache.
        `clock` returns ns, to measure lookups and insertions; without it they count as 0."""
        self._copies = copies
        if clock is not None:
            self.clock = clock

    def __len__(self) -> int:
        return len(self._entries)

    def key(self, request: Request) -> Key | None:
        """Everything that the response depends on; None if it cannot be cached."""
        outputs, options = request.outputs, request.options
        if options is not None and options.sequence and request.version.service.graph is not None:
            return None  # its steps may keep state, and the response contains the sequence
        if outputs is not None and any(wanted.place is not None for wanted in outputs):
            return None
        contents, size = [], 0
        for tensor in request.inputs:
            data = tensor.data if isinstance(tensor.data, bytes) else self._read(tensor.data)
            if data is None:
                return None
            contents.append((tensor.name, tensor.dtype, tensor.shape, data))
            size += len(data)
            if size > min(self.limit, COPIED_BYTES):
                return None
        inputs = tuple(sorted(contents))
        wanted = None if outputs is None else tuple(sorted((output.name, output.classes) for output in outputs))
        parameters = options.parameters.items() if options is not None else ()
        typed = tuple(
            (name, type(value), _exact(value))
            for name, value in sorted(parameters, key=itemgetter(0))
            if name not in TRACE_CONTEXT
        )
        return (request.version, request.audience, inputs, wanted, typed, request.in_shared_memory, request.step)

    def _read(self, parts: object) -> bytes | None:
        if self._copies is None or not isinstance(parts, tuple):
            return None
        if sum(part.size for part in parts) > min(self.limit, COPIED_BYTES):
            return None
        return self._copies.read(parts)

    def use_private_copy(self, key: Key, request: Request) -> bool:
        """Makes the model read the compared copy of inputs that their owner could still overwrite. False: not
        possible."""
        bytes_of = {name: data for name, _, _, data in key[2]}
        inputs: list[Tensor] = []
        placed: list[Handle] = []
        for tensor in request.inputs:
            if isinstance(tensor.data, tuple) and any(part.segment >> OWNER_SHIFT for part in tensor.data):
                copy = self._place(bytes_of[tensor.name], INTERNAL)
                if copy is None:
                    for block in placed:
                        self._ledger.send_back(block)
                    return False
                placed.append(copy)
                tensor = Tensor(tensor.name, tensor.dtype, tensor.shape, (copy,))
            inputs.append(tensor)
        if placed:
            segments = tuple(copy.segment for copy in placed)
            self._ledger.use(segments)
            request.inputs, request.segments = tuple(inputs), request.segments + segments
            self._outputs.pin(placed)
            request.pins += tuple(placed)
        return True

    def _place(self, data: bytes, audience: str) -> Handle | None:
        assert self._copies is not None
        placed = self._copies.place(data, audience)
        if placed is None:
            return None
        if placed.announcement is not None:
            self._ledger.announce(0, placed.announcement, audience)
        return placed.handle

    def find(self, key: Key) -> CacheEntry | None:
        entry = self._entries.get(key)
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return entry

    def add(self, key: Key, outputs: tuple[Tensor, ...], parameters: dict[str, Value] | None, own: int) -> None:
        """`own`: the client, whose own memory is not cached."""
        if key in self._entries:
            return
        handles: list[Handle] = []
        size = OVERHEAD + sum(len(data) for _, _, _, data in key[2])
        for tensor in outputs:
            if isinstance(tensor.data, bytes):
                size += len(tensor.data)
                continue
            assert isinstance(tensor.data, tuple)
            handles += tensor.data
            size += sum(handle.size for handle in tensor.data)
        if size > self.limit or any(handle.segment >> OWNER_SHIFT == own for handle in handles):
            return
        if handles and self._copies is not None and sum(handle.size for handle in handles) <= COPIED_BYTES:
            outputs, handles = self._moved(outputs, handles, key[1])
        self._outputs.pin(handles)
        self._entries[key] = CacheEntry(key[0], outputs, parameters, handles, size)
        self.bytes += size
        while self.bytes > self.limit:
            _, oldest = self._entries.popitem(last=False)
            self.evictions += 1
            self._evict(oldest)

    def _moved(
        self, outputs: tuple[Tensor, ...], handles: list[Handle], audience: str
    ) -> tuple[tuple[Tensor, ...], list[Handle]]:
        """Copies of the outputs in the broker's memory, or the originals if that is not possible."""
        assert self._copies is not None
        moved: list[Tensor] = []
        placed: list[Handle] = []
        for tensor in outputs:
            if isinstance(tensor.data, tuple):
                data = self._copies.read(tensor.data)
                copy = self._place(data, audience) if data is not None else None
                if copy is None:
                    for block in placed:
                        self._ledger.send_back(block)
                    return outputs, handles
                placed.append(copy)
                tensor = Tensor(tensor.name, tensor.dtype, tensor.shape, (copy,))
            moved.append(tensor)
        return tuple(moved), placed

    def purge(self, version: Version) -> None:
        """Removes the entries of a version whose responses are no longer valid."""
        for key in [key for key, entry in self._entries.items() if entry.version is version]:
            self._evict(self._entries.pop(key))

    def _evict(self, entry: CacheEntry) -> None:
        self.bytes -= entry.size
        self._outputs.unpin(entry.handles)

    def entries(self) -> Collection[CacheEntry]:
        return self._entries.values()

    def check(self) -> None:
        assert self.bytes == sum(entry.size for entry in self._entries.values()) <= max(self.limit, 0)


def _exact(value: Value) -> Value | bytes:
    """Makes values equal only if a model cannot distinguish them: 1, 1.0 and True differ by type, 0.0 and -0.0 by
    bits."""
    return _double(value) if isinstance(value, float) else value
