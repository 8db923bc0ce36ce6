"""Which requests of a model a worker may run without the core, if an instance is lent to a client that sends one at a
time, for one caller."""

from __future__ import annotations

from math import prod

from shmserve.core.policy import ModelPolicy
from shmserve.dtypes import ITEM_BYTES
from shmserve.protocol.messages import FIELD_BYTES, INLINE_BYTES, TensorForm

ALONE = 16
"""Consecutive requests that a client must have sent alone before it gets a lease."""
MAX_ALONE = 256
"""Upper limit of `Lending.needed`, which doubles when a lease is ended because others need the instance: granting and
ending a lease costs about as much as two requests."""


def terms_of(policy: ModelPolicy) -> tuple[tuple[TensorForm, ...], int] | None:
    """The inputs and the maximum rows of these requests. None: they need the core, or their outputs may not fit into a
    message."""
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
    return tuple(TensorForm(spec.name, spec.dtype, spec.dims) for spec in policy.inputs), rows
