"""Applies the scheduling settings of a policy to a version."""

from __future__ import annotations

from collections import deque

from shmserve.core.batching.form import BatchRules
from shmserve.core.batching.lending import lending_of
from shmserve.core.batching.queue import RequestQueue
from shmserve.core.ensembles.graph import EnsembleGraph
from shmserve.core.policy import BatchPolicy, ModelPolicy, QueuePolicy
from shmserve.core.records import Version
from shmserve.core.requests.validation import Checker
from shmserve.core.sequences.slots import SequenceSlots
from shmserve.core.state import State
from shmserve.core.stats.latencies import FirstResponses
from shmserve.protocol.messages import CHUNK_BYTES, PACKET_BYTES

WORKS_BYTES = 80 * 1024
"""An Execute is split when its works reach this size, not counting CHUNK_BYTES of tensors and options."""
assert CHUNK_BYTES + WORKS_BYTES < PACKET_BYTES


def apply_policy(state: State, version: Version, policy: ModelPolicy) -> None:
    """Applies the policy of a version, which is known when its first worker has loaded the model."""
    version.policy = policy
    version.checker = Checker(policy)
    version.queue = RequestQueue(policy.batching)
    version.most_works = max(1, WORKS_BYTES // _work_bytes(policy))
    version.decoupled = policy.decoupled
    if policy.sequence is not None:
        version.sequence_slots = SequenceSlots(policy.sequence)
        version.plain = version.prefetch = False
        if policy.max_batch > 0:
            version.batch_rules = BatchRules.of(policy.max_batch, policy.sequence.batching, version.checker.varies)
    if policy.steps is not None:
        version.graph = EnsembleGraph(policy)
        version.plain = False
    batching = policy.batching
    if batching is not None:
        if policy.max_batch > 0:
            version.batch_rules = BatchRules.of(policy.max_batch, batching, version.checker.varies)
            version.padding = policy.padding
        version.prefetch = _sends_ahead(batching)
        version.plain = version.prefetch and not batching.preserve_ordering
        if batching.preserve_ordering and not policy.decoupled:
            version.order = deque()
    # With preserve_ordering, a cached response must not overtake running requests.
    version.cached = (
        state.cache.limit > 0 and policy.cached and version.order is None and not (policy.decoupled or policy.sequence)
    )
    if version.cached:
        version.plain = False
    if version.plain and version.order is None:
        version.lending = lending_of(policy)
    first = FirstResponses.of(policy.first_response_ms) if state.limits.first_responses else None
    version.statistics.collect(state.limits.summaries, first, policy.decoupled)


def _work_bytes(policy: ModelPolicy) -> int:
    """An upper bound for the encoded size of a Work without handles: its own fields, the form of each input, and each
    requested output with its place and, for an ensemble, its labels."""
    size = 256
    for spec in policy.inputs:
        size += len(spec.name) + 24 + 9 * len(spec.dims)
    for spec in policy.outputs:
        size += 2 * len(spec.name) + 64
    return size


def _sends_ahead(policy: BatchPolicy) -> bool:
    """False if the order of queued requests may still change: they stay in the broker until an instance is idle."""
    return policy.levels == 0 and policy.default_policy == QueuePolicy()
