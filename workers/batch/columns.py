"""Outputs in columns: those of all requests of a batch have one form, and are inside the message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

from shmserve.protocol.messages import Tensor, TensorForm

if TYPE_CHECKING:
    from shmserve.workers.batch.specs import Spec


class InlineColumn(Sequence["Tensor | None"]):
    """An output of several requests, inside the message: `blobs[n]` has the share of the n-th request. `dims`: the
    shape of a share without axis 0, whose length is in `shares`."""

    __slots__ = ("blobs", "dims", "shares", "spec")

    def __init__(self, spec: Spec, dims: tuple[int, ...], shares: Sequence[int], blobs: list[bytes]) -> None:
        self.spec = spec
        self.dims = dims
        self.shares = shares
        self.blobs = blobs

    @property
    def form(self) -> TensorForm:
        return TensorForm(self.spec.name, self.spec.dtype, self.dims)

    def __len__(self) -> int:
        return len(self.blobs)

    def __iter__(self) -> Iterator[Tensor | None]:
        """Iterates in one pass, for results that do not stay in columns."""
        shares, dims = self.shares, self.dims
        shapes: Iterable[tuple[int, ...]] = repeat((shares[0], *dims))
        if shares.count(shares[0]) != len(shares):
            shapes = [(share, *dims) for share in shares]
        return map(Tensor, repeat(self.spec.name), repeat(self.spec.dtype), shapes, self.blobs)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        return Tensor(self.spec.name, self.spec.dtype, (self.shares[index], *self.dims), self.blobs[index])
