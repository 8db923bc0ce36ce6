"""Model parameters about the versions of a model: `traffic`, `aliases` and `shadow`, such as "2=90,3=10".

A load sets them; operators may change them later (`shmserve traffic`).
"""

from __future__ import annotations

from shmserve.repo.config.problems import ProblemFunction
from shmserve.repo.config.schema import ModelConfig
from shmserve.repo.parameters import SHADOW, TRAFFIC


def why_no_shadow(ensemble: bool, sequences: bool, decoupled: bool, ordered: bool) -> str:
    """Why answers of the model cannot be compared; "" if they can."""
    kinds = (
        ("an ensemble", ensemble),
        ("a model with sequences", sequences),
        ("a decoupled model", decoupled),
        ("a model with preserve_ordering", ordered),
    )
    return next((f"{kind} cannot have a shadow" for kind, found in kinds if found), "")


def validate_traffic(config: ModelConfig, problem: ProblemFunction) -> None:
    for row in (TRAFFIC, SHADOW):
        shares = {} if row.wrong(config) else row.read(config)
        if sum(shares.values()) > 100:
            problem(row.path, f"the shares add up to {sum(shares.values())} %; the maximum is 100 %")
        if row is SHADOW and shares:
            if len(shares) > 1:
                problem(row.path, f"found {len(shares)} versions, expected one")
            policy = config.model_transaction_policy
            decoupled = policy is not None and policy.decoupled
            ensemble, sequences = config.ensemble_scheduling is not None, config.sequence_batching is not None
            ordered = config.dynamic_batching is not None and config.dynamic_batching.preserve_ordering
            if reason := why_no_shadow(ensemble, sequences, decoupled, ordered):
                problem(row.path, reason)
