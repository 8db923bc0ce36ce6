"""The replica for a request: a sequence stays on its replica, and a model is used where it is awake or has room.

Any other request goes to the one of two random replicas that has the shorter queue.
"""

from __future__ import annotations

import random
from hashlib import blake2b
from typing import Any

from ray.serve.request_router import LocalityMixin, MultiplexMixin, RequestRouter

AWAKE, ASLEEP, ROOM = "awake", "asleep", "room"
"""What a replica with many models reports (`ServerReplica.record_routing_stats`): the names of those that are awake and
asleep, and the free bytes of its memory budget."""


def of_sequence(replicas: list[Any], sequence: str) -> Any:
    """The same replica for all requests of a sequence, as long as it lives; when another one comes or goes, only its
    share of the sequences moves (rendezvous hashing).
    """
    return max(replicas, key=lambda replica: _weight(replica.replica_id.unique_id, sequence))


def _weight(replica: str, sequence: str) -> bytes:
    return blake2b(f"{replica}\n{sequence}".encode(), digest_size=8).digest()


class Placements:
    """Where models are loaded on demand, as far as this process has decided it."""

    def __init__(self) -> None:
        self._placed: dict[str, tuple[Any, Any]] = {}
        """Model -> the replica that was chosen last, and its report at that time."""

    def choose(self, replicas: list[Any], model: str) -> list[Any]:
        """The replicas where the model is awake or being loaded; else the one with the most room. One that was chosen
        since its last report does not show yet what it has room for, so it comes last, but for the same model again.
        """
        serving = [replica for replica in replicas if _serves(replica, model)]
        if serving:
            return serving
        unreported = {one for one, report in self._placed.values() if _report_of(replicas, one) is report}
        before = self._placed.get(model, (None, None))[0]
        if before in unreported:
            return [replica for replica in replicas if replica.replica_id == before]
        chosen = max(replicas, key=lambda one: (one.replica_id not in unreported, *_room(one)))
        self._placed[model] = chosen.replica_id, chosen.routing_stats
        return [chosen]


def _serves(replica: Any, model: str) -> bool:
    report = replica.routing_stats
    loading = model in replica.multiplexed_model_ids and model not in report.get(ASLEEP, ())
    return model in report.get(AWAKE, ()) or loading


def _report_of(replicas: list[Any], replica_id: Any) -> Any:
    return next((replica.routing_stats for replica in replicas if replica.replica_id == replica_id), None)


def _room(replica: Any) -> tuple[float, int, str]:
    """Without a budget, all have as much room, and the fewest models count."""
    report = replica.routing_stats
    return float(report.get(ROOM, 0)), -len(report.get(AWAKE, ())), replica.replica_id.unique_id


class KServeRouter(LocalityMixin, MultiplexMixin, RequestRouter):
    """Runs in every process that sends requests to replicas. Unlike Ray's default, a replica is chosen for one request,
    and not for the next one in line.
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
