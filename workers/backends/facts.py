"""What a model file says of its tensors, held against what the configuration says.

The rule: what could give a wrong answer, or fail every request, fails the load, and the text has both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shmserve.errors import InvalidRequest

if TYPE_CHECKING:
    from shmserve.repo.complete import TensorFacts
    from shmserve.workers.specs import Spec


def unknown(facts: list[TensorFacts], known: Sequence[Spec], declared: Sequence[Spec]) -> list[TensorFacts]:
    """Without those that callers neither give nor get, unless the configuration says that they do."""
    names = {spec.name for spec in known} - {spec.name for spec in declared}
    return [fact for fact in facts if fact.name not in names]


def match(model: str, kind: str, specs: Sequence[Spec], facts: Sequence[TensorFacts], batch: int = -1) -> None:
    """The configuration says of these tensors what the model says. `batch`: the first dim of those that batch."""
    by_name = {fact.name: fact for fact in facts}
    failed = f"unable to load model '{model}'"
    for spec in specs:
        fact = by_name.get(spec.name)
        if fact is None:
            raise InvalidRequest(
                f"{failed}: unexpected inference {kind} '{spec.name}', allowed {kind}s are: {', '.join(by_name)}"
            )
        if fact.dtype != spec.dtype:
            raise InvalidRequest(
                f"{failed}: {kind} '{spec.name}' is {spec.dtype} in the configuration and {fact.dtype} in the model"
            )
        if spec.flat:
            continue
        expected = ((batch,) if spec.batched else ()) + spec.shape
        if len(expected) != len(fact.dims) or any(
            -1 not in pair and pair[0] != pair[1] for pair in zip(expected, fact.dims, strict=True)
        ):
            raise InvalidRequest(
                f"{failed}: {kind} '{spec.name}' has shape {list(expected)} in the configuration"
                f"{' (with the batch dimension)' if spec.batched else ''} and {list(fact.dims)} in the model"
            )
        if spec.batched and batch == -1 and fact.dims[0] != -1:
            raise InvalidRequest(
                f"{failed}: max_batch_size is above 0, but the first dimension of {kind} '{spec.name}' is "
                f"{fact.dims[0]} in the model; a batch needs a dynamic one. Set max_batch_size: 0"
            )
