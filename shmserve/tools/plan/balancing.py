"""How a balancer chooses a server.

Invariant: a balancer knows only what it has sent, what came back, and what servers have reported.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from hashlib import blake2b
from math import ceil
from random import Random

from shmserve.tools.plan.fleet import KEYED, FleetPlan

POINTS = 64
"""Points of each server on the ring."""
_MASK = (1 << 64) - 1
REDRAWS = 4
"""Number of extra draws to avoid a server that just failed a request."""


class Ring:
    """Consistent hashing: a key belongs to the next server on the ring. When a server is removed, only its keys
    move."""

    def __init__(self) -> None:
        self._members: dict[int, list[int]] = {}
        self._points: list[int] = []
        self._servers: list[int] = []
        self._stale = False

    def add(self, server: int, name: int) -> None:
        """Adds a server. A server that comes back has its old name and so gets its old keys."""
        results = []
        for part in range(POINTS // 8):
            digest = blake2b(f"{name} {part}".encode()).digest()
            results += [int.from_bytes(digest[place : place + 8], "little") for place in range(0, 64, 8)]
        self._members[server] = results
        self._stale = True

    def remove(self, server: int) -> None:
        del self._members[server]
        self._stale = True

    def place(self, key: int) -> int:
        """The index on the ring of the key's server."""
        if self._stale:
            pairs = sorted((point, server) for server, points in self._members.items() for point in points)
            self._points = [point for point, _ in pairs]
            self._servers = [server for _, server in pairs]
            self._stale = False
        mixed = (key + 1) * 0x9E3779B97F4A7C15 & _MASK
        mixed = (mixed ^ (mixed >> 31)) * 0xBF58476D1CE4E5B9 & _MASK
        return bisect(self._points, mixed ^ (mixed >> 29))

    def at(self, place: int) -> int:
        return self._servers[place % len(self._servers)]

    @property
    def length(self) -> int:
        return len(self._servers)


class LeastLoaded:
    """Finds a random server among those with the fewest requests. Keeps a list of servers for each number of
    requests."""

    def __init__(self, random: Random) -> None:
        self._random = random.random
        self._levels: list[list[int]] = [[]]
        self._where: dict[int, tuple[int, int]] = {}
        """Server -> its number of requests, and its index in the list for that number."""
        self._low = 0

    def put(self, server: int, level: int) -> None:
        levels = self._levels
        while len(levels) <= level:
            levels.append([])
        self._where[server] = level, len(levels[level])
        levels[level].append(server)
        if level < self._low:
            self._low = level

    def take(self, server: int) -> None:
        level, place = self._where.pop(server)
        servers = self._levels[level]
        last = servers.pop()
        if last != server:
            servers[place] = last
            self._where[last] = level, place

    def move(self, server: int, level: int) -> None:
        if server in self._where:
            self.take(server)
            self.put(server, level)

    def find(self) -> int:
        levels = self._levels
        while not levels[self._low]:
            self._low += 1
        servers = levels[self._low]
        return servers[int(self._random() * len(servers))]


class Balancer:
    """`load`: server -> requests in flight, as far as the balancer knows. `ring` is shared by all balancers."""

    def __init__(self, plan: FleetPlan, number: int, ring: Ring) -> None:
        random = Random(f"{plan.seed} balancer {number}")
        self.load: list[int] = []
        self._reported = plan.report_ns > 0
        self._random = random.random
        self._servers: list[int] = []
        self._places: dict[int, int] = {}
        self._turn = number
        self._ring = ring
        self._bound = plan.bound
        self._total = 0
        self._by_load = LeastLoaded(random) if plan.policy == "least" else None
        policies = {
            "random": self._any,
            "round-robin": self._next,
            "two-choices": self._better,
            "least": self._least_loaded,
            "hash": self._of_key,
            "bounded-hash": self._near_key,
        }
        self._policy = policies[plan.policy]
        self._keyed = plan.policy in KEYED

    # ------------------------------------------------------------------------------------ the servers

    def add(self, server: int) -> None:
        while len(self.load) <= server:
            self.load.append(0)
        self._places[server] = len(self._servers)
        self._servers.append(server)
        self._total += self.load[server]
        if self._by_load is not None:
            self._by_load.put(server, self.load[server])

    def remove(self, server: int) -> None:
        place, last = self._places.pop(server), self._servers.pop()
        if last != server:
            self._servers[place] = last
            self._places[last] = place
        self._total -= self.load[server]
        if self._by_load is not None:
            self._by_load.take(server)

    # ------------------------------------------------------------------------------------ requests in flight

    def count(self, server: int, change: int) -> None:
        """Counts a request that was sent to the server or has ended. Between two reports, only sent requests count."""
        if change < 0 and self._reported:
            return
        level = self.load[server] + change
        if server in self._places:
            self._total += level - self.load[server]
        self.load[server] = level
        if self._by_load is not None:
            self._by_load.move(server, level)

    def report(self, in_flight: Sequence[int]) -> None:
        """Handles a report of all servers' requests in flight."""
        for server in self._servers:
            level = in_flight[server]
            if level != self.load[server]:
                self._total += level - self.load[server]
                self.load[server] = level
                if self._by_load is not None:
                    self._by_load.move(server, level)

    # ------------------------------------------------------------------------------------ choosing

    def choose(self, key: int, failed: int = -1) -> int:
        """The server for a request, -1 if there is none. `failed`: the server at which the request has just failed."""
        if not self._servers:
            return -1
        result = self._policy(key)
        if result == failed and len(self._servers) > 1:
            if self._keyed:
                place = self._ring.place(key)
                return next(
                    server for step in range(self._ring.length) if (server := self._ring.at(place + step)) != failed
                )
            for _ in range(REDRAWS):
                result = self._any(key)
                if result != failed:
                    break
        return result

    def _any(self, key: int) -> int:
        return self._servers[int(self._random() * len(self._servers))]

    def _next(self, key: int) -> int:
        self._turn += 1
        return self._servers[self._turn % len(self._servers)]

    def _better(self, key: int) -> int:
        servers, random = self._servers, self._random
        count = len(servers)
        one, other = servers[int(random() * count)], servers[int(random() * count)]
        return other if self.load[other] < self.load[one] else one

    def _least_loaded(self, key: int) -> int:
        assert self._by_load is not None
        return self._by_load.find()

    def _of_key(self, key: int) -> int:
        return self._ring.at(self._ring.place(key))

    def _near_key(self, key: int) -> int:
        ring, load = self._ring, self.load
        maximum = ceil(self._bound * (self._total + 1) / len(self._servers))
        place = ring.place(key)
        for step in range(ring.length):
            server = ring.at(place + step)
            if load[server] < maximum:
                return server
        return ring.at(place)
