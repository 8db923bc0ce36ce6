"""Answers that are kept: who asks a model the same again gets the same, without anything being run.

The key is all that an answer depends on, in full, so that two different requests are never taken for one. The bytes of
inputs in shared memory are copied once into the broker's own memory, and the copy is what is compared and what the
model reads: their owner may write to his own as he likes, and no answer is kept for an input that the model has not
seen.

Outputs are copied into the broker's memory as well and given out as handles, so that no worker's memory is bound by
what is kept; those too large to be copied while everybody waits stay where their worker put them. Answers are for the
audience that they were made for, and for the generation of the model that made them.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from msgspec import Struct

from shmserve.core.ledger import INTERNAL, Ledger
from shmserve.core.records import Request, Version
from shmserve.protocol.messages import OWNER_SHIFT, Handle, Map, Tensor, Value

Key = tuple[Any, ...]
_double = struct.Struct("<d").pack
OVERHEAD = 512
"""Bytes that an entry takes beside its tensors, about."""
COPIED_BYTES = 1 << 20
"""Of the inputs, and of the outputs, of one request: everybody waits while they are copied and compared."""


class Placed(Struct):
    """Where something was put. `announcement`: of the segment, if it is new."""

    handle: Handle
    announcement: Map | None = None


class Copies(Protocol):
    """How the broker reads shared memory, and keeps a copy of it."""

    def read(self, parts: Sequence[Handle]) -> bytes | None:
        """What lies there. None: it is no memory of the host that can be read by its descriptor."""

    def place(self, data: bytes, audience: str) -> Placed | None:
        """Puts it where that audience may read it. None: there is no room, or no way."""


class Entry(Struct, eq=False):
    version: Version
    outputs: tuple[Tensor, ...]
    parameters: dict[str, Value] | None
    handles: list[Handle]
    size: int


class Cache:
    """`limit` bytes; what was used longest ago goes first. 0: nothing is kept."""

    def __init__(self, limit: int, ledger: Ledger) -> None:
        self.limit = limit
        self.copies: Copies | None = None
        """Without it nothing but what comes inside of messages is compared, and outputs stay where they are."""
        self.clock: Callable[[], int] = _no_time
        """In ns. For statistics only: the turn's `now` stands still while answers are looked up and copied."""
        self.bytes = self.hits = self.misses = self.evictions = 0
        self._ledger = ledger
        self._entries: OrderedDict[Key, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def key(self, request: Request) -> Key | None:
        """All that the answer depends on; None for a request whose answer cannot be kept."""
        outputs, options = request.outputs, request.options
        if options is not None and options.sequence and request.version.graph is not None:
            return None  # its steps may keep states, and the answer names the sequence
        if outputs is not None and any(wanted.place is not None for wanted in outputs):
            return None
        found, size = [], 0
        for tensor in request.inputs:
            data = tensor.data if isinstance(tensor.data, bytes) else self._read(tensor.data)
            if data is None:
                return None
            found.append((tensor.name, tensor.dtype, tensor.shape, data))
            size += len(data)
            if size > min(self.limit, COPIED_BYTES):
                return None
        inputs = tuple(sorted(found))
        wanted = None if outputs is None else tuple(sorted((output.name, output.classes) for output in outputs))
        parameters = tuple(sorted(options.parameters.items(), key=_name)) if options is not None else ()
        typed = tuple((name, type(value), _exact(value)) for name, value in parameters)
        return (request.version, request.audience, inputs, wanted, typed, request.outside, request.labels)

    def _read(self, parts: object) -> bytes | None:
        if self.copies is None or not isinstance(parts, tuple):
            return None
        if sum(part.size for part in parts) > min(self.limit, COPIED_BYTES):
            return None
        return self.copies.read(parts)

    def hold_still(self, key: Key, request: Request) -> bool:
        """Lets the model read what was compared, where somebody else could still write to it. False: it cannot be."""
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
            request.blocks += tuple(placed)
        return True

    def _place(self, data: bytes, audience: str) -> Handle | None:
        assert self.copies is not None
        placed = self.copies.place(data, audience)
        if placed is None:
            return None
        if placed.announcement is not None:
            self._ledger.announce(0, placed.announcement, audience)
        return placed.handle

    def find(self, key: Key) -> Entry | None:
        entry = self._entries.get(key)
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return entry

    def add(self, key: Key, outputs: tuple[Tensor, ...], parameters: dict[str, Value] | None, own: int) -> None:
        """`own`: the client, whose memory is not kept."""
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
        if handles and self.copies is not None and sum(handle.size for handle in handles) <= COPIED_BYTES:
            outputs, handles = self._moved(outputs, handles, key[1])
        for handle in handles:
            self._ledger.keep(handle)
        self._entries[key] = Entry(key[0], outputs, parameters, handles, size)
        self.bytes += size
        while self.bytes > self.limit:
            _, oldest = self._entries.popitem(last=False)
            self.evictions += 1
            self._let_go(oldest)

    def _moved(
        self, outputs: tuple[Tensor, ...], handles: list[Handle], audience: str
    ) -> tuple[tuple[Tensor, ...], list[Handle]]:
        """Copies of them in the broker's memory; where that cannot be, they themselves."""
        assert self.copies is not None
        moved: list[Tensor] = []
        placed: list[Handle] = []
        for tensor in outputs:
            if isinstance(tensor.data, tuple):
                data = self.copies.read(tensor.data)
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
        """It answers no more, or would answer otherwise."""
        for key in [key for key, entry in self._entries.items() if entry.version is version]:
            self._let_go(self._entries.pop(key))

    def _let_go(self, entry: Entry) -> None:
        self.bytes -= entry.size
        for handle in entry.handles:
            self._ledger.unpin(handle)

    def check(self) -> None:
        assert self.bytes == sum(entry.size for entry in self._entries.values()) <= max(self.limit, 0)


def _exact(value: Value) -> Value | bytes:
    """Equal only where a model sees no difference: 1, 1.0 and True differ by type, 0.0 and -0.0 by their bits."""
    return _double(value) if isinstance(value, float) else value


def _name(item: tuple[str, Value]) -> str:
    return item[0]


def _no_time() -> int:
    return 0
