"""Chooses the replica for a request: a sequence stays on its replica, and a model is used where it is awake or fits
into memory.

Any other request goes to the replica with the shorter queue out of two random ones.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, NamedTuple

from ray.serve.request_router import LocalityMixin, MultiplexMixin, RequestRouter

AWAKE, ASLEEP, LOADING, ROOM = "awake", "asleep", "loading", "room"
"""Names of what a replica with many models reports (`ServerReplica.record_routing_stats`): the names of the models that
are awake, asleep and being loaded, and the free bytes of its memory budget."""
UNREPORTED_S = 10.0
"""A model that was sent to a replica, and is missing from its reports after this time, could not be loaded."""


def of_sequence(replicas: list[Any], sequence: str) -> Any:
    """The same replica for all requests of a sequence, as long as it lives. When another replica is added or removed,
    only its share of the sequences moves (rendezvous hashing).
    """
    return max(replicas, key=lambda replica: _weight(replica.replica_id.unique_id, sequence))


def _weight(replica: str, sequence: str) -> bytes:
    return blake2b(f"{replica}\n{sequence}".encode(), digest_size=8).digest()


class Placement(NamedTuple):
    replica: Any
    time: float


class Placements:
    """The replicas that this process has chosen for models that are loaded on demand."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._placed: dict[str, Placement] = {}
        """Model -> the replica chosen last, until that replica's reports show the model."""

    def choose(self, replicas: list[Any], model: str) -> list[Any]:
        """The replicas where the model is awake or being loaded; else the one with the most free memory. A replica that
        was chosen for another model and does not report that model yet comes last.
        """
        by_id = {replica.replica_id: replica for replica in replicas}
        self._placed = {name: one for name, one in self._placed.items() if self._is_unreported(by_id, name, one)}
        serving = [replica for replica in replicas if _serves(replica, model)]
        if serving:
            return serving
        if model in self._placed:
            return [by_id[self._placed[model].replica]]
        unreported = Counter(one.replica for one in self._placed.values())
        chosen = max(replicas, key=lambda one: (-unreported[one.replica_id], *_room(one)))
        self._placed[model] = Placement(chosen.replica_id, self._clock())
        return [chosen]

    def _is_unreported(self, replicas: dict[Any, Any], model: str, placed: Placement) -> bool:
        """Whether the replica's reports do not show its choice yet. A report made before the choice may arrive after
        it, and Ray resends the last reports of all replicas when one has changed.
        """
        replica = replicas.get(placed.replica)
        if replica is None or self._clock() - placed.time > UNREPORTED_S:
            return False
        return not any(model in replica.routing_stats.get(state, ()) for state in (AWAKE, LOADING))


def _serves(replica: Any, model: str) -> bool:
    report = replica.routing_stats
    loading = model in replica.multiplexed_model_ids and model not in report.get(ASLEEP, ())
    return model in report.get(AWAKE, ()) or loading


def _room(replica: Any) -> tuple[float, int, str]:
    """Sort key. Without a budget, all replicas have the same free memory, and the one with the fewest models is
    chosen."""
    report = replica.routing_stats
    return float(report.get(ROOM, 0)), -len(report.get(AWAKE, ())), replica.replica_id.unique_id


class KServeRouter(LocalityMixin, MultiplexMixin, RequestRouter):
    """Runs in every process that sends requests to replicas. Unlike Ray's default, it chooses a replica for a
    particular request, not for the next one in line.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._placements = Placements()

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        replicas = list(self._replicas.values())
        if not replicas:
            return []
        if pending_request is not None:
            metadata, context = pending_request.metadata, pending_request.routing_context
            if metadata.session_id:
                context.should_backoff = True
                return [[of_sequence(replicas, metadata.session_id)]]
            if metadata.multiplexed_model_id and any(AWAKE in replica.routing_stats for replica in replicas):
                context.should_backoff = True
                return [self._placements.choose(replicas, metadata.multiplexed_model_id)]
        near = [self._replicas[one] for one in self.apply_locality_routing(pending_request) if one in self._replicas]
        return [random.sample(near, min(2, len(near)))]
