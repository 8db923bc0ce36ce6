"""The replica for a request: a sequence stays on its replica, and a model is used where it is awake or has room.

Any other request goes to the one of two random replicas that has the shorter queue.
"""

from __future__ import annotations

import random
from hashlib import blake2b
from typing import Any

from ray.serve.request_router import LocalityMixin, MultiplexMixin, RequestRouter

AWAKE, ROOM = "awake", "room"
"""What a replica with many models reports (`ServerReplica.record_routing_stats`): the names of those that are awake,
and the free bytes of its memory budget."""


def of_sequence(replicas: list[Any], sequence: str) -> Any:
    """The same replica for all requests of a sequence, as long as it lives; when another one comes or goes, only its
    share of the sequences moves (rendezvous hashing).
    """
    return max(replicas, key=lambda replica: _weight(replica.replica_id.unique_id, sequence))


def for_model(replicas: list[Any], model: str) -> list[Any]:
    """Where the model is awake; else the replica with the most room. Every router chooses the same one, so that two
    requests that arrive together do not load a model twice.
    """
    awake = [replica for replica in replicas if model in replica.routing_stats.get(AWAKE, ())]
    return awake or [max(replicas, key=lambda replica: (_room(replica), replica.replica_id.unique_id))]


def _room(replica: Any) -> float:
    return float(replica.routing_stats.get(ROOM, 0))


def _weight(replica: str, sequence: str) -> bytes:
    return blake2b(f"{replica}\n{sequence}".encode(), digest_size=8).digest()


class KServeRouter(LocalityMixin, MultiplexMixin, RequestRouter):
    """Runs in every process that sends requests to replicas. Unlike Ray's default, a replica is chosen for one request,
    and not for the next one in line.
    """

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
                return [for_model(replicas, metadata.multiplexed_model_id)]
        near = [self._replicas[one] for one in self.apply_locality_routing(pending_request) if one in self._replicas]
        return [random.sample(near, min(2, len(near)))]
