"""Which requests of a model a worker may run without the core, if an instance is lent to a client that sends them for
one caller."""

from __future__ import annotations

from math import prod

from shmserve.core.policy import ModelPolicy
from shmserve.dtypes import ITEM_BYTES
from shmserve.protocol.messages import FIELD_BYTES, INLINE_BYTES, TensorForm

ALONE = 16
"""Consecutive batches of a client, one request at a time or of all its requests, before it gets a lease."""
SHORT_NS = 500_000
"""Maximum time of a batch for leases with several requests in flight: the median, which others on the machine hardly
change. While a packet of a lease is on its way, the instance is idle, which costs more than the broker's work if
batches take long."""
MAX_ALONE = 256
"""Upper limit of `Lending.needed`, which doubles when a lease is ended because others need the instance: granting and
ending a lease costs about as much as two requests."""


def terms_of(policy: ModelPolicy, batches: bool) -> tuple[tuple[TensorForm, ...], int, int] | None:
    """The inputs and the maximum rows of these requests, and the maximum rows of a batch of them. None: they need the
    core, or their outputs may not fit into a message. `batches`: batches may have whatever requests have arrived."""
    if policy.sequence or policy.steps or policy.decoupled or not policy.inputs or not policy.outputs:
        return None
    if policy.padding is not None:  # padding is counted for each batch
        return None
    for spec in policy.inputs:
        if spec.optional or spec.ragged or not ITEM_BYTES[spec.dtype]:
            return None
    sizes = [ITEM_BYTES[spec.dtype] * prod(spec.dims) for spec in policy.outputs]
    if any(size <= 0 or min(spec.dims, default=0) < 0 for size, spec in zip(sizes, policy.outputs, strict=True)):
        return None
    rows = min(INLINE_BYTES // max(sizes), FIELD_BYTES // sum(sizes))
    if not rows:
        return None
    rows = min(rows, policy.max_batch)
    batch = min(policy.max_batch, FIELD_BYTES // sum(sizes)) if batches else 0
    return tuple(TensorForm(spec.name, spec.dtype, spec.dims) for spec in policy.inputs), rows, batch
