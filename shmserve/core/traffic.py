"""How requests that name no version are divided among the versions of a model, and version aliases.

A version is chosen once per turn, so there is no cost per request.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import Struct

ALIAS = "@"
"""`MODEL@NAME` is the version with this alias."""
STEP = 0.6180339887498949
"""The golden ratio conjugate. Adding it modulo 1 hits every interval in proportion to its length, even when sampled
only at every n-th turn, so shares hold for requests that arrive only in certain turns."""


class Traffic(Struct, frozen=True):
    """Traffic settings of a model. `shares`: version -> percent of the requests that name no version; the rest goes to
    the highest READY version without a share. Shares of versions that are not READY are divided among the others.
    `aliases`: name -> version. `shadow`: version -> percent of the requests that name no version, which it receives in
    addition to the version that answers them.
    """

    shares: dict[int, int] = {}
    aliases: dict[str, int] = {}
    shadow: dict[int, int] = {}

    def changed(
        self,
        shares: Mapping[int, int] | None,
        aliases: Mapping[str, int | None],
        shadow: Mapping[int, int] | None,
    ) -> Traffic:
        """Returns a copy with these shares and this shadow instead of the current ones (None: unchanged), and these
        aliases in addition to the current ones (version None: remove the alias)."""
        merged = {**self.aliases, **aliases}
        kept = {alias: number for alias, number in merged.items() if number is not None}
        return Traffic(
            self.shares if shares is None else dict(shares), kept, self.shadow if shadow is None else dict(shadow)
        )

    def weights(self, ready: Collection[int]) -> list[tuple[int, int]]:
        """The versions that get requests while these are READY, with their weights, the largest first."""
        weights = [(number, percent) for number, percent in self.shares.items() if percent and number in ready]
        others = set(ready) - self.shares.keys()
        remaining = 100 - sum(self.shares.values())
        if others and remaining > 0:
            weights.append((max(others), remaining))
        return sorted(weights, key=lambda entry: (entry[1], entry[0]), reverse=True)

    @property
    def text(self) -> str:
        parts = [f"{percent} % to version {number}" for number, percent in sorted(self.shares.items())]
        parts += [f"{percent} % also to version {number}" for number, percent in sorted(self.shadow.items())]
        parts += [f"'{alias}' is version {number}" for alias, number in sorted(self.aliases.items())]
        return ", ".join(parts) or "all to the highest version"


UNSET = Traffic()


class Split(Struct):
    """The weights of several versions, and the position in the sequence of choices."""

    weights: list[tuple[int, int]]
    phase: float = 0.0

    def choose(self) -> int:
        self.phase = (self.phase + STEP) % 1.0
        remaining = self.phase * sum(weight for _, weight in self.weights)
        for number, weight in self.weights:
            remaining -= weight
            if remaining < 0:
                return number
        return self.weights[0][0]


class Shadow(Struct, eq=False):
    """The version that additionally gets `percent` of the requests, and the position in the sequence of choices."""

    version: int
    percent: int
    phase: float = 0.0
    pending: int = 0
    """Its requests in flight."""
    log_at: int = 0
    """The earliest time for the next log entry about it."""

    def choose(self) -> bool:
        self.phase = (self.phase + STEP) % 1.0
        return 100 * self.phase < self.percent
