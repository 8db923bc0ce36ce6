"""Ensemble steps as used by the core, and two extensions: `step[i].map` and `step[i].if`.

Both are in the ensemble's `parameters`, so that Triton can still parse the file. `map` names an ensemble tensor that
the step reads: each row along axis 0 becomes a request of its own, and the answers are combined. `if` names a BOOL
tensor with one element: the step runs only if it is true.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from shmserve.core.policy import StepPolicy
from shmserve.repo.config.outline import escaped
from shmserve.repo.config.problems import ProblemFunction, meant
from shmserve.repo.config.schema import ModelConfig, ModelEnsemblingStep, parameter

MAP, IF = "map", "if"
_KEY = re.compile(r"step\[([0-9]{1,6})\]\.(\w+)", re.ASCII)


def steps_of(config: ModelConfig) -> Sequence[ModelEnsemblingStep]:
    return config.ensemble_scheduling.step if config.ensemble_scheduling is not None else ()


def added(config: ModelConfig, index: int, what: str) -> str:
    """The tensor that the parameter names for this step; "" if not set."""
    return parameter(config, f"step[{index}].{what}")


def compile_steps(config: ModelConfig) -> tuple[StepPolicy, ...] | None:
    if config.ensemble_scheduling is None:
        return None
    return tuple(
        StepPolicy(
            step.model_name,
            max(step.model_version, 0),
            tuple(sorted(step.input_map.items())),
            tuple(sorted(step.output_map.items())),
            added(config, index, MAP),
            added(config, index, IF),
        )
        for index, step in enumerate(config.ensemble_scheduling.step)
    )


def validate_step_parameters(config: ModelConfig, problem: ProblemFunction) -> None:
    """Validates the parameters of an ensemble that begin with `step[`."""
    steps = steps_of(config)
    produced = {tensor.name for tensor in config.input} | {name for step in steps for name in step.output_map.values()}
    for key, value in config.parameters.items():
        if not key.startswith("step["):
            continue
        path, name = f'parameters["{key}"]', value.string_value
        match = _KEY.fullmatch(key)
        if match is None or match[2] not in (MAP, IF):
            problem(path, f'found "{escaped(key)}", expected "step[INDEX].{MAP}" or "step[INDEX].{IF}"')
        elif int(match[1]) >= len(steps):
            problem(path, f"no step {match[1]}; the steps are 0 to {len(steps) - 1}")
        elif match[2] == MAP:
            reads = steps[int(match[1])].input_map.values()
            if name not in reads:
                text = f'step {match[1]} does not read ensemble tensor "{escaped(name)}"; {meant(name, reads)}'
                problem(path, text)
            if config.max_batch_size > 0:
                text = f"expected max_batch_size 0, found {config.max_batch_size}: axis 0 is not a batch axis"
                problem(path, text)
        elif name not in produced:
            text = (
                f'ensemble tensor "{escaped(name)}" is neither an input nor produced by a step; {meant(name, produced)}'
            )
            problem(path, text)
