"""Answers that are kept: who asks a model the same again gets the same, without anything being run.

The key is all that an answer depends on, in full, so that two different requests are never taken for one. Cached are
requests whose inputs came inside their message, or in frames beside it, which are in the broker's own memory. Inputs in
memory of clients are not looked at: they can be written while their hash is made, and after it, and so an answer could
be kept for an input that the model has never seen. Nor is memory of workers, which the broker does not map.

Large outputs stay where their worker put them, and are given out as handles again. Answers are for the audience that
they were made for, and for the generation of the model that made them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from shmserve.core.ledger import Ledger
from shmserve.core.request import Request
from shmserve.core.versions import Version
from shmserve.messages import OWNER_SHIFT, Handle, Tensor, Value

Key = tuple[Any, ...]
OVERHEAD = 512
"""Bytes that an entry takes beside its tensors, about."""


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
        self.look: Callable[[Handle], memoryview] | None = None
        """The bytes of what lies in the broker's own memory."""
        self.bytes = self.hits = self.misses = self.evictions = 0
        self._ledger = ledger
        self._entries: OrderedDict[Key, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def key(self, request: Request) -> Key | None:
        """All that the answer depends on; None for a request whose answer cannot be kept."""
        outputs, options = request.outputs, request.options
        if outputs is not None and any(wanted.place is not None for wanted in outputs):
            return None
        found = []
        for tensor in request.inputs:
            data = tensor.data if isinstance(tensor.data, bytes) else self._copy(tensor.data)
            if data is None:
                return None
            found.append((tensor.name, tensor.dtype, tensor.shape, data))
        inputs = tuple(sorted(found))
        wanted = None if outputs is None else tuple(sorted((output.name, output.classes) for output in outputs))
        parameters = tuple(sorted(options.parameters.items(), key=_name)) if options is not None else ()
        typed = tuple((name, type(value), value) for name, value in parameters)  # 1, 1.0 and True are not the same
        return (request.version, request.audience, inputs, wanted, typed, request.outside)

    def _copy(self, parts: object) -> bytes | None:
        """What lies in the broker's own memory: the request will be over before the answer is dropped."""
        if self.look is None or not isinstance(parts, tuple):
            return None
        if any(part.segment >> OWNER_SHIFT for part in parts) or sum(part.size for part in parts) > self.limit:
            return None
        return b"".join(map(self.look, parts))

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
        for handle in handles:
            self._ledger.keep(handle)
        self._entries[key] = Entry(key[0], outputs, parameters, handles, size)
        self.bytes += size
        while self.bytes > self.limit:
            _, oldest = self._entries.popitem(last=False)
            self.evictions += 1
            self._let_go(oldest)

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


def _name(item: tuple[str, Value]) -> str:
    return item[0]
