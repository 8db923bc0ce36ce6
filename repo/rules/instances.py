"""How many instances a group may have while the model is served: parameters min_instances and max_instances."""

from __future__ import annotations

import re
from typing import NamedTuple

from shmserve.repo.config.complete import is_ensemble
from shmserve.repo.config.problems import ProblemFunction
from shmserve.repo.config.schema import ModelConfig, ModelInstanceGroup, parameter

INSTANCES = 1024
"""Most instances of one model; each is a process."""
MIN_INSTANCES = "min_instances"
"""Model parameter: the fewest instances of each group, on each of its GPUs."""
MAX_INSTANCES = "max_instances"
"""Model parameter: the most instances of each group, on each of its GPUs."""
SCALE_UP_QUEUE = "scale_up_queue_ms"
"""Model parameter: mean time in the queue above which an instance is added."""
SCALE_DOWN = "scale_down_secs"
"""Model parameter: how long fewer instances must have been enough before one is removed."""
SCALING = (MIN_INSTANCES, MAX_INSTANCES, SCALE_UP_QUEUE, SCALE_DOWN)
SCALE_UP_QUEUE_MS = 50
SCALE_DOWN_SECS = 30

_COUNT = re.compile(r"[1-9][0-9]{0,3}", re.ASCII), f'a number of instances from 1 to {INSTANCES}, such as "4"'
PATTERNS = {
    MIN_INSTANCES: _COUNT,
    MAX_INSTANCES: _COUNT,
    SCALE_UP_QUEUE: (re.compile(r"[0-9]{1,9}(\.[0-9]{1,6})?", re.ASCII), 'milliseconds, such as "50"'),
    SCALE_DOWN: (re.compile(r"[0-9]{1,6}(\.[0-9]{1,9})?", re.ASCII), 'seconds, such as "30"'),
}
"""Parameter -> valid values, and a description of them."""


class GroupBounds(NamedTuple):
    group: ModelInstanceGroup
    least: int
    most: int


def scaled_groups(config: ModelConfig) -> list[GroupBounds]:
    """The instance groups with the fewest and most instances that each may have on a device; equal if it is not scaled.
    Passive groups never are."""
    least, most = parameter(config, MIN_INSTANCES), parameter(config, MAX_INSTANCES)
    found = []
    for group in config.instance_group:
        if group.passive or not (least or most):
            found.append(GroupBounds(group, group.count, group.count))
        else:
            fewest = int(least or 1)
            found.append(GroupBounds(group, fewest, int(most or max(group.count, fewest))))
    return found


def validate_scaling(config: ModelConfig, problem: ProblemFunction) -> None:
    given = [key for key in SCALING if key in config.parameters]
    if not given or not all(PATTERNS[key][0].fullmatch(parameter(config, key)) for key in given):
        return  # each wrong value has been reported
    first = f'parameters["{given[0]}"]'
    if is_ensemble(config):
        problem(first, "an ensemble has no instances; set it for the models of its steps")
        return
    least, most = parameter(config, MIN_INSTANCES), parameter(config, MAX_INSTANCES)
    if not (least or most):
        problem(first, f"has no effect without {MIN_INSTANCES} or {MAX_INSTANCES}")
        return
    if least and most and int(least) > int(most):
        problem(f'parameters["{MIN_INSTANCES}"]', f'found "{least}", which is more than {MAX_INSTANCES} "{most}"')
        return
    bounds = scaled_groups(config)
    names: dict[str, int] = {}
    for index, (group, _, highest) in enumerate(bounds):
        if group.name and names.setdefault(group.name, index) != index:
            text = f'"{group.name}" is the name of instance_group[{names[group.name]}], too'
            problem(f"instance_group[{index}].name", f"{text}; groups that are scaled need names of their own")
        if group.count > highest:
            text = f"found {group.count}, which is more than parameter {MAX_INSTANCES} ({highest})"
            problem(f"instance_group[{index}].count", text)
    total = sum(highest * max(1, len(group.gpus)) for group, _, highest in bounds)
    if total > INSTANCES:
        key = f'parameters["{MAX_INSTANCES if most else MIN_INSTANCES}"]'
        problem(key, f"{total} instances in all groups, each a process; expected at most {INSTANCES}")
