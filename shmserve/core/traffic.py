"""Which versions of a model get the requests that name no version, and names for versions (aliases).

A version is chosen once for each turn, so that requests cost nothing more.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct

ALIAS = "@"
"""`MODEL@NAME` is the version with this alias."""
STEP = 0.6180339887498949
"""Adding this golden ratio, modulo 1, meets every interval as often as it is long, also at every second or n-th turn:
shares hold for requests that come only in certain turns."""


class Traffic(Struct, frozen=True):
    """What operators have set for a model. `shares`: version -> percent of the requests that name no version; the rest
    goes to the highest READY version without a share. Shares of versions that are not READY are divided among the
    others. `aliases`: name -> version.
    """

    shares: dict[int, int] = {}
    aliases: dict[str, int] = {}

    def weights(self, ready: Collection[int]) -> list[tuple[int, int]]:
        """The versions that get requests while these are READY, each with its weight: that with the largest first."""
        found = [(number, percent) for number, percent in self.shares.items() if percent and number in ready]
        others = set(ready) - self.shares.keys()
        left = 100 - sum(self.shares.values())
        if others and left > 0:
            found.append((max(others), left))
        return sorted(found, key=lambda entry: (entry[1], entry[0]), reverse=True)


UNSET = Traffic()


class Split(Struct):
    """The weights of several versions, and where the sequence of choices is."""

    weights: list[tuple[int, int]]
    phase: float = 0.0

    def choose(self) -> int:
        self.phase = (self.phase + STEP) % 1.0
        left = self.phase * sum(weight for _, weight in self.weights)
        for number, weight in self.weights:
            left -= weight
            if left < 0:
                return number
        return self.weights[0][0]
