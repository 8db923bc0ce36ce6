"""Limits what one connection, address or token may have in flight at the broker through this gateway.

The broker sees a gateway as one client, with one limit on its requests (client_requests) and one on its queries
(client_questions), and all clients share the gateway's memory for inputs. Without shares, the clients of one slow model
could therefore use up everything. Each party may use a fraction of what all others leave, so something is always left.
As in the broker (core/intake/quotas.py), a full share of an address or a token only refuses connections that already
use much of it. The connections divide as much again by the same rule, and a connection with nothing in flight is
refused only if the rest is reserved for other addresses.

Invariant: the counts of an account are the sums over the calls in flight that were charged to it.
"""

from __future__ import annotations

import ipaddress
from typing import Protocol

from msgspec import Struct

from shmserve.errors import Unavailable
from shmserve.gateway.limits.proxies import TrustedProxies, parsed_address
from shmserve.gateway.metrics import family
from shmserve.protocol.messages import NAME_LENGTH

PAYERS = 256
"""Callers that a connection of a proxy remembers before idle ones are forgotten."""


class ShareExceeded(Unavailable):
    """A party has too much in flight. The server may still have capacity for others."""


class ShareBounds(Struct, frozen=True):
    """`share`: the fraction of what the others leave that a connection, an address or a token may have in flight. With
    1, only the total is limited."""

    share: float = 0.25
    input_bytes: int = 4 << 30
    """Maximum input bytes of all requests together."""
    proxies: TrustedProxies = TrustedProxies()


class ShareAccount:
    """`kind`: the kind of party, as in metrics and error texts."""

    __slots__ = ("calls", "connections", "input_bytes", "kind", "share")

    def __init__(self, kind: str, share: float) -> None:
        self.kind = kind
        self.share = share
        self.calls = 0
        self.input_bytes = 0
        self.connections = 0
        """Number of connections that use this account, including idle ones."""


class Creditor(Protocol):
    """Gets back the charge of a call when the call is over."""

    def give(self, input_bytes: int) -> None: ...


class Charged(Protocol):
    """The fields of a ticket that `Payer.charge` sets and `release` reads."""

    payer: Creditor | None
    input_bytes: int


class Payer:
    """One connection with one token, and the accounts that its calls are charged to. The first account is the total."""

    __slots__ = ("_pool", "accounts", "caller", "calls", "input_bytes", "name", "queries", "token")

    def __init__(
        self,
        pool: Pool,
        accounts: tuple[ShareAccount, ...],
        queries: Payer | None = None,
        token: str = "",
        address: str = "",
    ) -> None:
        self._pool = pool
        self.accounts = accounts
        self.calls = 0
        self.input_bytes = 0
        self.queries = queries or self
        """The account for queries."""
        self.token = token
        """Name of the token, or the key of a ZeroMQ client; "": none. Sequence ids are scoped by it."""
        self.caller = token, address
        """Who calls, over any number of connections."""
        self.name = f"token {token}"[:NAME_LENGTH] if token else address
        """The caller as the broker knows it. "": callers on this machine without a token, who share what the gateway
        has."""

    def charge(self, ticket: Charged, input_bytes: int) -> None:
        """Raises Unavailable, without charging anything, if a share would be exceeded."""
        ticket.payer = None
        self.take(input_bytes)
        ticket.payer = self
        ticket.input_bytes = input_bytes

    def take(self, input_bytes: int) -> None:
        pool = self._pool
        total = pool.total
        if total.calls >= pool.calm_calls or total.input_bytes + input_bytes > pool.calm_bytes:
            pool.check(self, input_bytes)
        self.calls += 1
        self.input_bytes += input_bytes
        for account in self.accounts:
            account.calls += 1
            account.input_bytes += input_bytes

    def give(self, input_bytes: int) -> None:
        self.calls -= 1
        self.input_bytes -= input_bytes
        for account in self.accounts:
            account.calls -= 1
            account.input_bytes -= input_bytes


def release(ticket: Charged) -> None:
    """Called when the call is no longer in flight. May be called repeatedly."""
    payer, ticket.payer = ticket.payer, None
    if payer is not None:
        payer.give(ticket.input_bytes)


class Pool:
    """The calls of one kind that the broker accepts from this gateway. `limit`: the broker's name for their limit."""

    def __init__(self, what: str, limit: str, calls: int, bounds: ShareBounds) -> None:
        self.total = ShareAccount("gateway", 1.0)
        self.refused = {"connection": 0, "address": 0, "token": 0}
        self.limit = limit
        self._what = what
        self._bounds = bounds
        self._addresses: dict[str, ShareAccount] = {}
        self._tokens: dict[str, ShareAccount] = {}
        self.allow(calls, bounds.input_bytes)

    def allow(self, calls: int, input_bytes: int | None = None) -> None:
        """Sets the total. While fewer than `calm_calls` and `calm_bytes` are in flight, no party can exceed its
        share."""
        share = self._bounds.share
        self.calls = calls
        self.calm_calls = int(share * calls)
        if input_bytes is not None:
            self._input_bytes = input_bytes
            self.calm_bytes = share * input_bytes

    @property
    def max_calls(self) -> int:
        """Maximum number of calls in flight for a connection while no others have any."""
        return int(self._bounds.share * self.calls)

    # ------------------------------------------------------------------------------------ accounts

    def enter(self, connection: ShareAccount, address: str, token: str) -> tuple[ShareAccount, ...]:
        accounts = [self.total, connection]
        if address:
            accounts.append(_entered(self._addresses, address, "address", self._bounds.share))
        if token:
            accounts.append(_entered(self._tokens, token, "token", self._bounds.share))
        return tuple(accounts)

    def leave(self, address: str, token: str) -> None:
        """Called when a connection that used these accounts has ended."""
        if address:
            _remove(self._addresses, address)
        if token:
            _remove(self._tokens, token)

    # ------------------------------------------------------------------------------------ limits

    def check(self, payer: Payer, input_bytes: int) -> None:
        """Raises Unavailable if one more call with these input bytes would put an account over its share."""
        total = self.total
        for account in payer.accounts[1:]:
            if _is_over(account, account.calls, payer.calls, total.calls, self.calls, 1):
                raise self._too_many(account)
            if _is_over(
                account, account.input_bytes, payer.input_bytes, total.input_bytes, self._input_bytes, input_bytes
            ):
                raise self._too_large(account, input_bytes)

    def _too_many(self, account: ShareAccount) -> Unavailable:
        self.refused[account.kind] += 1
        if self.total.calls >= self.calls:
            return Unavailable(
                f"{self.total.calls} {self._what} are in flight through this gateway, the broker's limit ({self.limit})"
                "; retry later"
            )
        return ShareExceeded(
            f"{account.calls} {self._what} of this {account.kind} are in flight, its share (--limit caller_share) of "
            f"the {self.calls} that this gateway may have; retry later"
        )

    def _too_large(self, account: ShareAccount, more: int) -> ShareExceeded:
        self.refused[account.kind] += 1
        return ShareExceeded(
            f"the inputs of this {account.kind}'s {self._what} in flight take {account.input_bytes} bytes; "
            f"{more} more would exceed its share (--limit caller_share) of {self._input_bytes} bytes "
            "(--limit gateway_input_bytes); retry later"
        )


class ConnectionShares:
    """The shares of one connection, until `close`."""

    __slots__ = ("_accounts", "_payers", "_peer", "_shares", "is_of_proxy")

    def __init__(self, shares: CallerShares, address: str) -> None:
        self._shares = shares
        self._peer = address
        self.is_of_proxy = shares.bounds.proxies.trusts(address)
        """Its requests may be those of many callers, so it has no share of its own."""
        share = 1.0 if self.is_of_proxy else shares.bounds.share
        self._accounts = ShareAccount("connection", share), ShareAccount("connection", share)
        self._payers: dict[tuple[str, str], Payer] = {}

    def address(self, named: str) -> str:
        """The address of the caller. `named`: what a header says about it, which counts if a proxy has sent it."""
        named_address = self._shares.bounds.proxies.caller(named) if named and self.is_of_proxy else ""
        return named_address if network_of(named_address) else self._peer

    def payer(self, token: str, named: str = "") -> Payer:
        """`token`: the name of the token; "" for a call without one. `named`: what a header says about the caller."""
        if named and not self.is_of_proxy:
            named = ""
            self._shares.ignored += bool(self._shares.bounds.proxies)
        payer = self._payers.get((token, named))
        if payer is None:
            if len(self._payers) >= PAYERS:
                self._forget_idle()
            shares, (requests, queries) = self._shares, self._accounts
            address = network_of(self.address(named))
            query_payer = Payer(shares.queries, shares.queries.enter(queries, address, token))
            payer = Payer(shares.requests, shares.requests.enter(requests, address, token), query_payer, token, address)
            self._payers[token, named] = payer
        return payer

    def _forget_idle(self) -> None:
        for key, payer in list(self._payers.items()):
            if not (payer.calls or payer.queries.calls):
                self._leave(payer)
                del self._payers[key]

    def _leave(self, payer: Payer) -> None:
        token, address = payer.caller
        self._shares.requests.leave(address, token)
        self._shares.queries.leave(address, token)

    def close(self) -> None:
        for payer in self._payers.values():
            self._leave(payer)
        self._payers = {}


class CallerShares:
    """The shares of one gateway."""

    def __init__(self, bounds: ShareBounds | None = None) -> None:
        self.bounds = bounds or ShareBounds()
        self.ignored = 0
        """Requests that named their caller in a header, from other places than trusted proxies."""
        self.requests = Pool("requests", "client_requests", 8192, self.bounds)
        self.queries = Pool("questions", "client_questions", 1024, self.bounds)

    def limits(self, limits: dict[str, int]) -> None:
        """Applies the limits in the broker's Welcome."""
        for pool in (self.requests, self.queries):
            pool.allow(limits.get(pool.limit, pool.calls))

    def connect(self, address: str) -> ConnectionShares:
        """`address`: the peer address of the socket."""
        return ConnectionShares(self, address)

    def metrics(self) -> str:
        requests, queries = self.requests, self.queries
        refused = {f'share="{kind}"': count + queries.refused[kind] for kind, count in sorted(requests.refused.items())}
        by_kind = "Calls refused because a share was exceeded, by kind of share"
        ignored = "Requests whose X-Forwarded-For or Forwarded was ignored, because they came from no trusted proxy"
        return (
            family("requests", "gauge", "Requests in flight at the broker", {"": requests.total.calls})
            + family("questions", "gauge", "Queries in flight at the broker", {"": queries.total.calls})
            + family("input_bytes", "gauge", "Bytes of inputs in flight", {"": requests.total.input_bytes})
            + family("share_refusals_total", "counter", by_kind, refused)
            + family("forwarded_ignored_total", "counter", ignored, {"": self.ignored})
        )


def share_of_rest(share: float, capacity: int, total: int, used: int) -> float:
    """The total that a party may use if it uses `used` now: a fraction of what all others leave."""
    return share * (capacity - total + used)


def _is_over(account: ShareAccount, used: int, part: int, total: int, capacity: int, more: int) -> bool:
    """Whether `more` would be too much for an account that uses `used`, `part` of it by this payer, while `total` of
    `capacity` is in flight."""
    limit = share_of_rest(account.share, capacity, total, used)
    if not used or used + more <= limit:
        return False
    if account.kind == "connection":
        return True
    if not part:
        return total + more > (1 - account.share) * capacity
    return part + more > account.share * (2 * limit - used + part)


def _entered(accounts: dict[str, ShareAccount], key: str, kind: str, share: float) -> ShareAccount:
    account = accounts.get(key)
    if account is None:
        account = accounts[key] = ShareAccount(kind, share)
    account.connections += 1
    return account


def _remove(accounts: dict[str, ShareAccount], key: str) -> None:
    account = accounts[key]
    account.connections -= 1
    if not account.connections:
        del accounts[key]


def network_of(address: str) -> str:
    """The key by which clients are counted. For IPv6 it is the /64 network, since a host usually has a whole one. For a
    loopback address it is "": all clients on this machine, and all behind a proxy on it, share that address."""
    parsed = parsed_address(address)
    if parsed is None or parsed.is_loopback:
        return ""
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((parsed, 64), strict=False))
    return str(parsed)
