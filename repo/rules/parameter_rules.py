"""Rules for parameters of a model that belong together: those for the number of instances, and those for versions.

A load sets the shares, aliases and shadow of versions; operators may change them later (`shmserve traffic`).
"""

from __future__ import annotations

from typing import NamedTuple

from shmserve.repo.config.complete import is_ensemble
from shmserve.repo.config.problems import ProblemFunction
from shmserve.repo.config.schema import ModelConfig, ModelInstanceGroup
from shmserve.repo.parameters import (
    INSTANCES,
    MAX_INSTANCES,
    MIN_INSTANCES,
    SCALE_DOWN,
    SCALE_UP_QUEUE,
    SHADOW,
    TRAFFIC,
)

SCALING = (MIN_INSTANCES, MAX_INSTANCES, SCALE_UP_QUEUE, SCALE_DOWN)


class GroupBounds(NamedTuple):
    group: ModelInstanceGroup
    minimum: int
    maximum: int


def scaled_groups(config: ModelConfig) -> list[GroupBounds]:
    """The instance groups with the fewest and most instances that each may have on a device; equal if it is not scaled.
    Passive groups never are."""
    minimum, maximum = MIN_INSTANCES.read(config), MAX_INSTANCES.read(config)
    bounds = []
    for group in config.instance_group:
        if group.passive or not (minimum or maximum):
            bounds.append(GroupBounds(group, group.count, group.count))
        else:
            fewest = minimum or 1
            bounds.append(GroupBounds(group, fewest, maximum or max(group.count, fewest)))
    return bounds


def validate_scaling(config: ModelConfig, problem: ProblemFunction) -> None:
    rows = [row for row in SCALING if row.is_set(config)]
    if not rows or any(row.wrong(config) for row in rows):
        return  # each wrong value has been reported
    first = rows[0].path
    if is_ensemble(config):
        problem(first, "an ensemble has no instances; set it for the models of its steps")
        return
    minimum, maximum = MIN_INSTANCES.read(config), MAX_INSTANCES.read(config)
    if not (minimum or maximum):
        problem(first, f"has no effect without {MIN_INSTANCES.name} or {MAX_INSTANCES.name}")
        return
    if minimum and maximum and minimum > maximum:
        problem(MIN_INSTANCES.path, f'found "{minimum}", which is more than {MAX_INSTANCES.name} "{maximum}"')
        return
    bounds = scaled_groups(config)
    names: dict[str, int] = {}
    for index, (group, _, highest) in enumerate(bounds):
        if group.name and names.setdefault(group.name, index) != index:
            text = f'"{group.name}" is also the name of instance_group[{names[group.name]}]'
            problem(f"instance_group[{index}].name", f"{text}; groups that are scaled need names of their own")
        if group.count > highest:
            text = f"found {group.count}, which is more than parameter {MAX_INSTANCES.name} ({highest})"
            problem(f"instance_group[{index}].count", text)
    total = sum(highest * max(1, len(group.gpus)) for group, _, highest in bounds)
    if total > INSTANCES:
        row = MAX_INSTANCES if maximum else MIN_INSTANCES
        problem(row.path, f"{total} instances in all groups, each a process; expected at most {INSTANCES}")


def why_no_shadow(ensemble: bool, sequences: bool, decoupled: bool, ordered: bool) -> str:
    """Why answers of the model cannot be compared; "" if they can."""
    kinds = (
        ("an ensemble", ensemble),
        ("a model with sequences", sequences),
        ("a decoupled model", decoupled),
        ("a model with preserve_ordering", ordered),
    )
    return next((f"{kind} cannot have a shadow" for kind, is_set in kinds if is_set), "")


def validate_traffic(config: ModelConfig, problem: ProblemFunction) -> None:
    for row in (TRAFFIC, SHADOW):
        shares = {} if row.wrong(config) else row.read(config)
        if sum(shares.values()) > 100:
            problem(row.path, f"the shares add up to {sum(shares.values())} %; the maximum is 100 %")
        if row is SHADOW and shares:
            if len(shares) > 1:
                problem(row.path, f"found {len(shares)} versions, expected one")
            ensemble, sequences = config.ensemble_scheduling is not None, config.sequence_batching is not None
            ordered = config.dynamic_batching is not None and config.dynamic_batching.preserve_ordering
            if reason := why_no_shadow(ensemble, sequences, config.decoupled, ordered):
                problem(row.path, reason)
