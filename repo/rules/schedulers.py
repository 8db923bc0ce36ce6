"""Rules for the three schedulers: dynamic batching, sequences, ensembles.

Invariant: as in `fields`, a check reports and continues.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from shmserve.repo.config import schema
from shmserve.repo.config.complete import ENSEMBLE, is_ensemble, needs_completion
from shmserve.repo.config.problems import ProblemFunction, meant
from shmserve.repo.config.schema import ModelConfig
from shmserve.repo.rules.data import file_name, uncached
from shmserve.repo.rules.ensemble_steps import IF, added, validate_step_parameters

_CORRELATION_TYPES = ("TYPE_UINT64", "TYPE_INT64", "TYPE_UINT32", "TYPE_INT32", "TYPE_STRING")


def validate_scheduler(config: ModelConfig, problem: ProblemFunction) -> None:
    if config.dynamic_batching is not None:
        _dynamic(config, config.dynamic_batching, problem)
    if config.sequence_batching is not None:
        _sequence(config, config.sequence_batching, problem)
    if is_ensemble(config):
        _ensemble(config, problem)


def _preferred(config: ModelConfig, path: str, sizes: Sequence[int], problem: ProblemFunction) -> None:
    # The model may complete max_batch_size 0 to a larger value.
    unknown = config.max_batch_size == 0 and needs_completion(config)
    for index, size in enumerate(sizes):
        if size <= 0:
            problem(f"{path}[{index}]", f"found {size}, expected 1 or more")
        elif size > config.max_batch_size and not unknown:
            problem(f"{path}[{index}]", f"found {size}, expected at most max_batch_size ({config.max_batch_size})")


# ---------------------------------------------------------------------------------------------- dynamic batching


def _dynamic(config: ModelConfig, dynamic: schema.ModelDynamicBatching, problem: ProblemFunction) -> None:
    path = "dynamic_batching"
    _preferred(config, f"{path}.preferred_batch_size", dynamic.preferred_batch_size, problem)
    levels = dynamic.priority_levels
    if levels:
        if not 1 <= dynamic.default_priority_level <= levels:
            text = f"found {dynamic.default_priority_level}, expected 1 to {levels}, the priority_levels"
            problem(f"{path}.default_priority_level", text)
        for level in dynamic.priority_queue_policy:
            if not 1 <= level <= levels:
                text = f"level {level} does not exist; expected 1 to {levels}, the priority_levels"
                problem(f"{path}.priority_queue_policy[{level}]", text)
    if dynamic.preserve_ordering:
        if levels > 1:
            text = f"cannot be combined with {levels} priority_levels; expected at most 1"
            problem(f"{path}.preserve_ordering", text)
        for where, policy in _policies(dynamic):
            if policy.timeout_action == "DELAY" and policy.default_timeout_microseconds:
                problem(
                    f"{path}.{where}.timeout_action", "DELAY with a timeout cannot be combined with preserve_ordering"
                )


def _policies(dynamic: schema.ModelDynamicBatching) -> Iterator[tuple[str, schema.ModelQueuePolicy]]:
    if dynamic.default_queue_policy is not None:
        yield "default_queue_policy", dynamic.default_queue_policy
    for level, policy in dynamic.priority_queue_policy.items():
        yield f"priority_queue_policy[{level}]", policy


# ----------------------------------------------------------------------------------------------------- sequences


def _sequence(config: ModelConfig, sequence: schema.ModelSequenceBatching, problem: ProblemFunction) -> None:
    path = "sequence_batching"
    if config.response_cache is not None and config.response_cache.enable:
        problem("response_cache.enable", uncached(config.name, "sequence batching scheduler"))
    if sequence.oldest is not None:
        _preferred(config, f"{path}.oldest.preferred_batch_size", sequence.oldest.preferred_batch_size, problem)
        if sequence.oldest.max_candidate_sequences < 0:
            text = f"found {sequence.oldest.max_candidate_sequences}, expected 0 or more"
            problem(f"{path}.oldest.max_candidate_sequences", text)
    if sequence.direct is not None:
        share = sequence.direct.minimum_slot_utilization
        if not 0.0 <= share <= 1.0:
            problem(f"{path}.direct.minimum_slot_utilization", f"found {share}, expected 0 to 1")
    _controls(f"{path}.control_input", sequence.control_input, problem)
    _states(f"{path}.state", sequence.state, problem)


def _controls(
    path: str, controls: Sequence[schema.ModelSequenceBatchingControlInput], problem: ProblemFunction
) -> None:
    tensors: dict[str, str] = {}
    kinds: dict[str, str] = {}
    for index, tensor in enumerate(controls):
        here = f"{path}[{index}]"
        if not tensor.name:
            problem(f"{here}.name", "not given")
        elif tensors.setdefault(tensor.name, here) != here:
            problem(f"{here}.name", f'"{tensor.name}" is already the name of {tensors[tensor.name]}')
        if not tensor.control:
            problem(f"{here}.control", "not given; expected at least one")
        for place, control in enumerate(tensor.control):
            inner = f"{here}.control[{place}]"
            if kinds.setdefault(control.kind, inner) != inner:
                problem(f"{inner}.kind", f"{control.kind} is already given by {kinds[control.kind]}")
            _control(inner, control, problem)


def _control(path: str, control: schema.ModelSequenceBatchingControl, problem: ProblemFunction) -> None:
    pairs: dict[str, Sequence[object]] = {
        "int32_false_true": control.int32_false_true,
        "fp32_false_true": control.fp32_false_true,
        "bool_false_true": control.bool_false_true,
    }
    present = [name for name, pair in pairs.items() if pair]
    if control.kind == "CONTROL_SEQUENCE_CORRID":
        for name in present:
            problem(f"{path}.{name}", f"{control.kind} takes no such values; its tensor holds the id itself")
        if control.data_type not in _CORRELATION_TYPES:
            text = f"found {control.data_type}, expected one of {', '.join(_CORRELATION_TYPES)}"
            problem(f"{path}.data_type", text)
        return
    if len(present) != 1:
        names = " and ".join(present) or "none"
        problem(path, f"{control.kind} needs exactly one of {', '.join(pairs)}, found {names}")
    for name in present:
        if len(pairs[name]) != 2:
            problem(f"{path}.{name}", f"found {len(pairs[name])} values, expected 2: for false and for true")
    if any(not math.isfinite(value) for value in control.fp32_false_true):
        problem(f"{path}.fp32_false_true", "expected finite numbers")


def _states(path: str, states: Sequence[schema.ModelSequenceBatchingState], problem: ProblemFunction) -> None:
    inputs: dict[str, str] = {}
    for index, state in enumerate(states):
        here = f"{path}[{index}]"
        for field, name in (("input_name", state.input_name), ("output_name", state.output_name)):
            if not name:
                problem(f"{here}.{field}", "not given")
        if state.input_name and inputs.setdefault(state.input_name, here) != here:
            problem(f"{here}.input_name", f'"{state.input_name}" is already the input of {inputs[state.input_name]}')
        if len(state.initial_state) > 1:
            problem(f"{here}.initial_state", f"found {len(state.initial_state)}, expected at most one")
        if state.use_growable_memory and not state.use_same_buffer_for_input_output:
            problem(f"{here}.use_growable_memory", "needs use_same_buffer_for_input_output: true")
        for place, initial in enumerate(state.initial_state):
            _initial_state(f"{here}.initial_state[{place}]", state, initial, problem)


def _initial_state(
    path: str,
    state: schema.ModelSequenceBatchingState,
    initial: schema.ModelSequenceBatchingInitialState,
    problem: ProblemFunction,
) -> None:
    if not initial.name:
        problem(f"{path}.name", "not given")
    if initial.zero_data is None and not initial.data_file:
        problem(path, "expected zero_data or data_file")
    file_name(f"{path}.data_file", initial.data_file or "", problem)
    for index, dim in enumerate(initial.dims):
        if dim < 1:
            problem(f"{path}.dims[{index}]", f"found {dim}, expected 1 or more: the initial state needs a fixed size")
    if len(initial.dims) != len(state.dims):
        problem(f"{path}.dims", f"found {len(initial.dims)}, expected {len(state.dims)}, as for the state")
        return
    for index, (dim, expected) in enumerate(zip(initial.dims, state.dims, strict=True)):
        if expected != -1 and dim >= 1 and dim != expected:
            problem(f"{path}.dims[{index}]", f"found {dim}, expected {expected}, as for the state")


# ----------------------------------------------------------------------------------------------------- ensembles


def _ensemble(config: ModelConfig, problem: ProblemFunction) -> None:
    if config.platform != ENSEMBLE:
        problem("platform", f'found "{config.platform}", but ensemble_scheduling needs "{ENSEMBLE}"')
    fields: dict[str, object] = {
        "instance_group": config.instance_group,
        "optimization": config.optimization,
        "model_warmup": config.model_warmup,
    }
    for field, entries in fields.items():
        if entries:
            problem(field, "an ensemble has none; set it for the models of its steps")
    if config.ensemble_scheduling is None:
        problem("ensemble_scheduling", f'not given, but platform "{ENSEMBLE}" needs it')
        return
    steps = config.ensemble_scheduling.step
    if not steps:
        problem("ensemble_scheduling.step", "not given; expected at least one")
        return
    for index, step in enumerate(steps):
        path = f"ensemble_scheduling.step[{index}]"
        for field, part in (
            ("model_name", step.model_name),
            ("input_map", step.input_map),
            ("output_map", step.output_map),
        ):
            if not part:
                problem(f"{path}.{field}", "not given")
        if step.model_version < -1:
            problem(f"{path}.model_version", f"found {step.model_version}, expected a version, or -1 for the latest")
    _graph(config, steps, problem)
    validate_step_parameters(config, problem)


def _graph(config: ModelConfig, steps: Sequence[schema.ModelEnsemblingStep], problem: ProblemFunction) -> None:
    """Checks that every tensor is produced once, and used."""
    inputs = {tensor.name: f"input[{index}]" for index, tensor in enumerate(config.input)}
    outputs = {tensor.name: f"output[{index}]" for index, tensor in enumerate(config.output)}
    producers: dict[str, str] = dict(inputs)
    used: set[str] = set()
    for index, step in enumerate(steps):
        for key, tensor in step.output_map.items():
            path = f'ensemble_scheduling.step[{index}].output_map["{key}"]'
            if producers.setdefault(tensor, path) != path:
                problem(path, f'ensemble tensor "{tensor}" is already produced by {producers[tensor]}')
        used.update(step.input_map.values())
        used.add(added(config, index, IF))
    for index, step in enumerate(steps):
        for key, tensor in step.input_map.items():
            if tensor not in producers:
                path = f'ensemble_scheduling.step[{index}].input_map["{key}"]'
                text = (
                    f'ensemble tensor "{tensor}" is neither an input nor produced by a step; {meant(tensor, producers)}'
                )
                problem(path, text)
    for name, path in producers.items():
        if name not in used and (name in inputs or name not in outputs):
            what = "input" if name in inputs else "tensor"
            problem(path, f'ensemble {what} "{name}" is not used by any step')
    for name, path in outputs.items():
        if name not in producers or name in inputs:
            problem(path, f'ensemble output "{name}" is not produced by any step')
