"""A cache whose keys clients choose."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(dict[K, V]):
    """A dict that `put` empties when it is full. Lookups cost no more than in a dict, and the few keys that clients
    repeat are soon cached again."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def put(self, key: K, value: V) -> None:
        if len(self) >= self._size:
            self.clear()
        self[key] = value
