"""Bytes of request bodies and of unsent responses that the gateway holds for its clients. Only bytes that have arrived
count, never an announced size.

A connection, or an address, may hold a share (by default a quarter) of what all others leave, or an equal part if that
is more. So a few clients cannot use up the budget. A connection that holds less than an equal part of its address's
share is not refused because of other connections of that address. Limits can therefore be exceeded, at most twofold.

The rule differs from that of caller_shares.py. A call is refused before it costs anything, and the broker's limit on
calls is hard. A body is refused after part of it has been received, so a connection must get an equal part regardless
of what others hold. Both rules use `share_of_rest`.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

from shmserve.errors import Unavailable
from shmserve.gateway.limits.caller_shares import network_of, share_of_rest

HELD_BYTES = 1 << 30
SHARE = 0.25


class _Address:
    """Bytes that the connections of one address hold."""

    __slots__ = ("__weakref__", "held", "holders")

    def __init__(self) -> None:
        self.held = 0
        self.holders = 0
        """Number of connections that hold anything."""


class Budget:
    """`limit`: bytes in total. `share`: the fraction of what the others leave that one connection or address may
    hold."""

    def __init__(self, limit: int = HELD_BYTES, share: float = SHARE) -> None:
        self.limit = limit
        self._share = share
        self.sure = share * limit
        """Total up to which no connection or address can exceed its share."""
        self.held = 0
        self.holders = 0
        """Number of connections that hold anything."""
        self._addresses: WeakValueDictionary[str, _Address] = WeakValueDictionary()

    def account(self, address: str) -> BudgetAccount:
        """A new account. `address`: that of the client."""
        return BudgetAccount(self, self.party(address))

    def party(self, address: str) -> _Address | None:
        """What connections of the address hold together; None: it has no share."""
        address = network_of(address)
        if not address:
            return None
        party = self._addresses.get(address)
        if party is None:
            party = self._addresses[address] = _Address()
        return party

    def share_of(self, held: int, parties: int) -> float:
        """Maximum bytes for one of `parties`, which holds `held` bytes now."""
        share = self._share
        return max(share_of_rest(share, self.limit, self.held, held), self.limit / max(parties, 1 / share))

    @property
    def addresses(self) -> int:
        return len(self._addresses)


class BudgetAccount:
    """Bytes that one connection holds or, on a connection of a proxy with many calls at once, one of its callers."""

    __slots__ = ("__weakref__", "_address", "_budget", "held", "unsent")

    def __init__(self, budget: Budget, address: _Address | None) -> None:
        self._budget = budget
        self._address = address
        self.held = 0
        self.unsent = 0
        """Bytes of a response, included in `held`."""

    def take(self, size: int) -> None:
        """Counts bytes that have arrived. Raises Unavailable, without counting them, if they would exceed a share."""
        if self._budget.held + size > self._budget.sure:
            self._check(size)
        self._add(size)

    def _add(self, size: int) -> None:
        budget, address = self._budget, self._address
        if not self.held and size:
            budget.holders += 1
            if address is not None:
                address.holders += 1
        self.held += size
        budget.held += size
        if address is not None:
            address.held += size

    def give(self, size: int) -> None:
        """Releases bytes."""
        budget, address = self._budget, self._address
        self.held -= size
        budget.held -= size
        if address is not None:
            address.held -= size
        if not self.held and size:
            budget.holders -= 1
            if address is not None:
                address.holders -= 1

    def count_for(self, address: str) -> None:
        """Counts what it holds, and will hold, for this address: a proxy speaks for another caller now."""
        held = self.held
        self.give(held)
        self._address = self._budget.party(address)
        self._add(held)

    def answer(self, size: int) -> None:
        """Charges a large response to the current request of the connection, whose body is released. `sent` releases
        it."""
        self.give(self.held)
        self.unsent = 0
        self.take(size)
        self.unsent = size

    def keep_until_sent(self) -> None:
        """What is held now belongs to the response."""
        self.unsent = self.held

    def sent(self) -> None:
        if self.unsent:
            self.give(self.unsent)
            self.unsent = 0

    def used(self) -> None:
        """Releases everything except the response."""
        if self.held != self.unsent:
            self.give(self.held - self.unsent)

    def _check(self, size: int) -> None:
        budget, address = self._budget, self._address
        wanted, first = self.held + size, not self.held
        if wanted > budget.share_of(self.held, budget.holders + first) or budget.held + size > 2 * budget.limit:
            raise _over("connection", wanted, budget)
        if address is None:
            return
        share = budget.share_of(address.held, budget.addresses)
        held = address.held + size
        if held > 2 * share or (held > share and wanted * (address.holders + first) > share):
            raise _over("address", held, budget)


def _over(kind: str, wanted: int, budget: Budget) -> Unavailable:
    return Unavailable(
        f"the bodies and unsent responses of this {kind} would take {wanted} bytes, over its share (--limit "
        f"caller_share) of {budget.limit} bytes, of which {budget.held} are in use; retry later, or raise --limit "
        "http_held_bytes"
    )
