"""Completes and checks the configuration against the tensors in a model file.

Invariant: a mismatch that could give a wrong result or fail every request fails the load, and the error shows both
sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from shmserve.errors import InvalidRequest
from shmserve.repo.config.complete import complete_from_model
from shmserve.workers.batch.specs import inputs_of, model_inputs_of, model_outputs_of, outputs_of

if TYPE_CHECKING:
    from shmserve.repo.config.complete import TensorFacts
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.workers.batch.specs import Spec


def completed(
    config: ModelConfig,
    inputs: Sequence[TensorFacts],
    outputs: Sequence[TensorFacts],
    default_max_batch: int,
) -> ModelConfig:
    """Adds the tensors of the model file, except those that callers neither send nor receive."""
    return complete_from_model(
        config,
        _of_callers(inputs, model_inputs_of(config), inputs_of(config)),
        _of_callers(outputs, model_outputs_of(config), outputs_of(config)),
        default_max_batch=default_max_batch,
    )


def _of_callers(facts: Sequence[TensorFacts], known: Sequence[Spec], declared: Sequence[Spec]) -> list[TensorFacts]:
    names = {spec.name for spec in known} - {spec.name for spec in declared}
    return [fact for fact in facts if fact.name not in names]


def match(
    model: str,
    kind: str,
    specs: Sequence[Spec],
    facts: Sequence[TensorFacts],
    *,
    optional: Sequence[TensorFacts] = (),
    batch: int = -1,
    flat: tuple[int, ...] | None = None,
    whose: str = "model",
) -> None:
    """Raises unless the configuration matches the model file for these tensors. `optional`: further tensors that have
    default values in the model, whose shapes are those of the defaults. `batch`: the first dim of tensors with a
    batch dimension. `flat`: the shape of flat tensors; None: any."""
    by_name = {fact.name: fact for fact in facts}
    optional_names = {fact.name: fact for fact in optional}
    failed = f"unable to load model '{model}'"
    for spec in specs:
        fact = by_name.get(spec.name) or optional_names.get(spec.name)
        if fact is None:
            raise unexpected(model, kind, spec, by_name)
        if fact.dtype != spec.dtype:
            raise InvalidRequest(
                f"{failed}: {kind} '{spec.name}' is {spec.dtype} in the configuration and {fact.dtype} in the {whose}"
            )
        expected = flat if spec.flat else ((batch,) if spec.batched else ()) + spec.shape
        if expected is None or spec.name not in by_name:
            continue
        if len(expected) != len(fact.dims) or any(
            -1 not in pair and pair[0] != pair[1] for pair in zip(expected, fact.dims, strict=True)
        ):
            raise InvalidRequest(
                f"{failed}: {kind} '{spec.name}' has shape {list(expected)} in the configuration"
                f"{' (with the batch dimension)' if spec.batched else ''} and {list(fact.dims)} in the {whose}"
            )
        if spec.batched and batch == -1 and fact.dims[0] != -1:
            raise InvalidRequest(
                f"{failed}: max_batch_size is above 0, but the first dimension of {kind} '{spec.name}' is "
                f"{fact.dims[0]} in the {whose}; a batch needs a dynamic one. Set max_batch_size: 0"
            )


def unexpected(model: str, kind: str, spec: Spec, names: Iterable[str]) -> InvalidRequest:
    return InvalidRequest(
        f"unable to load model '{model}': unexpected inference {kind} '{spec.name}', allowed {kind}s are: "
        f"{', '.join(names)}"
    )


def none_optional(model: str, specs: Sequence[Spec], whose: str) -> None:
    """Raises if the configuration lets callers leave out an input."""
    for spec in specs:
        if spec.optional:
            raise InvalidRequest(
                f"unable to load model '{model}': input '{spec.name}' is optional, and {whose} needs all inputs"
            )


def none_missing(model: str, specs: Sequence[Spec], facts: Sequence[TensorFacts]) -> None:
    """Raises unless the configuration has all inputs that the model needs."""
    names = {spec.name for spec in specs}
    missing = [fact.name for fact in facts if fact.name not in names]
    if missing:
        raise InvalidRequest(
            f"unable to load model '{model}', configuration expects {len(specs)} inputs, model provides "
            f"{len(facts)}: it also has {', '.join(missing)}"
        )
