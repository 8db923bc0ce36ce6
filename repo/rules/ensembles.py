"""Checks that the models of an ensemble fit together: rules that involve more than one configuration.

Invariant: pure functions that find all problems, in a deterministic order (that of maps is not). Problems within a
single configuration (a tensor that is produced twice, or by no step) are reported by `schedulers`; such tensors are
skipped here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from shmserve.repo.config.complete import is_ensemble
from shmserve.repo.config.outline import escaped
from shmserve.repo.config.problems import meant, nearest
from shmserve.repo.config.schema import ModelConfig, ModelEnsemblingStep, ModelInput, ModelOutput
from shmserve.repo.rules.data import uncached
from shmserve.repo.rules.ensemble_steps import IF, MAP, added, steps_of

_OF_ENSEMBLE = -1
"""Step number that stands for the ensemble itself."""


class StepModel(NamedTuple):
    """A model that a step may name.

    `reason` says why it cannot be served, or is empty; `config` is None if unknown. `versions` are those that are
    served. `settled`: the model will not complete its configuration any further.
    """

    config: ModelConfig | None
    versions: tuple[int, ...] = ()
    reason: str = ""
    settled: bool = True


class GraphProblem(NamedTuple):
    """A problem. `step` and `model` locate it; -1 and "" for the ensemble itself. `path` is a field of the ensemble."""

    step: int
    model: str
    path: str
    text: str


class _Tensor(NamedTuple):
    """An ensemble tensor and its producer. `dims` is None if the model has not declared it yet."""

    step: int
    producer: str
    data_type: str
    dims: tuple[int, ...] | None
    batches: bool
    field: str = "dims"


def check_graph(ensemble: ModelConfig, models: Mapping[str, StepModel]) -> list[GraphProblem]:
    """All problems between the ensemble and the models of its steps. `models` are all available models, by name."""
    graph = _Graph(ensemble, models)
    for index in range(len(graph.steps)):
        graph.check_step(index)
    graph.check_outputs()
    graph.check_flow()
    return sorted(graph.problems, key=lambda problem: problem.step if problem.step >= 0 else len(graph.steps))


def decoupled_in(name: str, models: Mapping[str, StepModel]) -> set[str]:
    """The models, among this one and recursively the steps of an ensemble, that may answer a request more than once."""
    seen = {name}
    waiting = [name]
    decoupled = set()
    while waiting:
        current = waiting.pop()
        member = models.get(current)
        if member is None or member.config is None:
            continue
        if not is_ensemble(member.config):
            if member.config.decoupled:
                decoupled.add(current)
            continue
        for step in steps_of(member.config):
            if step.model_name not in seen:
                seen.add(step.model_name)
                waiting.append(step.model_name)
    return decoupled


def dependency_path(start: str, goal: str, models: Mapping[str, StepModel]) -> list[str]:
    """The shortest path from a model through steps of ensembles to another, including both; empty if there is none."""
    came_from = {start: ""}
    waiting = [start]
    while waiting and goal not in came_from:
        following = []
        for current in waiting:
            member = models.get(current)
            for step in steps_of(member.config) if member is not None and member.config is not None else ():
                if step.model_name not in came_from:
                    came_from[step.model_name] = current
                    following.append(step.model_name)
        waiting = following
    path = []
    current = goal if goal in came_from else ""
    while current:
        path.append(current)
        current = came_from[current]
    return path[::-1]


class _Graph:
    """One ensemble being checked. `produced` maps each tensor to its first producer."""

    def __init__(self, ensemble: ModelConfig, models: Mapping[str, StepModel]) -> None:
        self.ensemble = ensemble
        self.models: dict[str, StepModel] = {**models, ensemble.name: StepModel(ensemble)}
        self.steps = steps_of(ensemble)
        self.problems: list[GraphProblem] = []
        self.produced: dict[str, _Tensor] = {}
        batches = ensemble.max_batch_size > 0
        for tensor in ensemble.input:
            produced = _Tensor(_OF_ENSEMBLE, "an input of the ensemble", tensor.data_type, _inner_dims(tensor), batches)
            self.produced.setdefault(tensor.name, produced)
        for index, step in enumerate(self.steps):
            for key, name in sorted(step.output_map.items()):
                self.produced.setdefault(name, self._output_of_step(index, key))

    def _problem(self, index: int, path: str, text: str) -> None:
        if index == _OF_ENSEMBLE:
            self.problems.append(GraphProblem(index, "", path, text))
        else:
            model = self.steps[index].model_name
            self.problems.append(GraphProblem(index, model, f"ensemble_scheduling.step[{index}].{path}", text))

    def _output_of_step(self, index: int, key: str) -> _Tensor:
        step = self.steps[index]
        producer = f'output "{escaped(key)}" of step {index}, model "{escaped(step.model_name)}"'
        member = self.models.get(step.model_name)
        if member is None or member.config is None:
            return _Tensor(index, producer, "", None, False)
        tensor = _named(member.config.output, key)
        if tensor is None:
            return _Tensor(index, producer, "", None, False)
        batches = member.config.max_batch_size > 0 or bool(added(self.ensemble, index, MAP))
        return _Tensor(index, producer, tensor.data_type, _known_dims(member, tensor), batches)

    # ------------------------------------------------------------------------------------------- single steps

    def check_step(self, index: int) -> None:
        step = self.steps[index]
        if not step.model_name:  # already reported by validate
            return
        member = self.models.get(step.model_name)
        if member is None:
            others = [name for name in self.models if name != self.ensemble.name]
            text = f'found "{escaped(step.model_name)}", not a model of the repository; {_meant_model(step, others)}'
            self._problem(index, "model_name", text)
            return
        name = escaped(step.model_name)
        way = dependency_path(step.model_name, self.ensemble.name, self.models)
        if way:
            text = f'model "{name}" depends on this ensemble: {" -> ".join(map(escaped, [self.ensemble.name, *way]))}'
            self._problem(index, "model_name", text)
            return
        if member.reason:
            self._problem(index, "model_name", f'model "{name}" cannot be served: {member.reason}')
        elif step.model_version > 0 and step.model_version not in member.versions:
            there = ", ".join(map(str, member.versions)) or "none"
            text = f'found {step.model_version}, but the versions of model "{name}" that are served are {there}'
            self._problem(index, "model_version", text)
        if member.config is None:
            return
        own_batch, batch = self.ensemble.max_batch_size, member.config.max_batch_size
        if 0 < batch < own_batch:
            text = f'max_batch_size of model "{name}" is {batch}, expected 0 or at least {own_batch}'
            self._problem(index, "model_name", f"{text}, which is the ensemble's")
        self._check_inputs(index, step, member, member.config)
        self._check_output_names(index, step, member, member.config)

    def _check_inputs(self, index: int, step: ModelEnsemblingStep, member: StepModel, config: ModelConfig) -> None:
        model = escaped(config.name)
        for key, name in sorted(step.input_map.items()):
            path = f'input_map["{key}"]'
            tensor = _named(config.input, key)
            if tensor is None:
                if member.settled:
                    names = [declared.name for declared in config.input]
                    self._problem(index, path, f'model "{model}" has no input "{escaped(key)}"; {meant(key, names)}')
                continue
            produced = self.produced.get(name)
            if produced is None:
                continue
            what = f'input "{escaped(key)}" of model "{model}"'
            batches = config.max_batch_size > 0 or name == added(self.ensemble, index, MAP)
            wrong = _differences(what, tensor.data_type, _known_dims(member, tensor), batches, name, produced)
            for text in wrong.values():
                self._problem(index, path, text)
        self._check_condition(index)
        missing = [tensor.name for tensor in config.input if not tensor.optional and tensor.name not in step.input_map]
        for name in missing:
            text = f'input "{escaped(name)}" of model "{model}" is not mapped, and it is not optional'
            self._problem(index, "input_map", text)

    def _check_condition(self, index: int) -> None:
        produced = self.produced.get(added(self.ensemble, index, IF))
        if produced is not None and produced.data_type not in ("", "TYPE_BOOL"):
            path = f'parameters["step[{index}].{IF}"]'
            text = f"expected a TYPE_BOOL of one element, but {produced.producer} is {produced.data_type}"
            self.problems.append(GraphProblem(index, self.steps[index].model_name, path, text))

    def _check_output_names(
        self, index: int, step: ModelEnsemblingStep, member: StepModel, config: ModelConfig
    ) -> None:
        names = [tensor.name for tensor in config.output]
        for key in sorted(step.output_map) if member.settled else ():
            if key not in names:
                text = f'model "{escaped(config.name)}" has no output "{escaped(key)}"; {meant(key, names)}'
                self._problem(index, f'output_map["{key}"]', text)

    # ------------------------------------------------------------------------------------------- the whole graph

    def check_outputs(self) -> None:
        for index, tensor in enumerate(self.ensemble.output):
            produced = self.produced.get(tensor.name)
            if produced is None or produced.step == _OF_ENSEMBLE:
                continue
            what, dims = f'output "{escaped(tensor.name)}" of the ensemble', _inner_dims(tensor)
            wrong = _differences(what, tensor.data_type, dims, self.ensemble.max_batch_size > 0, tensor.name, produced)
            for field, text in wrong.items():
                self._problem(_OF_ENSEMBLE, f"output[{index}].{field}", text)

    def check_flow(self) -> None:
        """Checks that no step depends on itself, and that repeated runs are triggered by one decoupled model only."""
        needs = {
            index: {
                self.produced[name].step
                for name in (*step.input_map.values(), added(self.ensemble, index, IF))
                if name in self.produced and self.produced[name].step != _OF_ENSEMBLE
            }
            for index, step in enumerate(self.steps)
        }
        order, cycles = _ordered(needs)
        for cycle in cycles:
            reads = [
                (f'ensemble_scheduling.step[{cycle[0]}].input_map["{key}"]', name)
                for key, name in sorted(self.steps[cycle[0]].input_map.items())
            ]
            reads.append((f'parameters["step[{cycle[0]}].{IF}"]', added(self.ensemble, cycle[0], IF)))
            path, name = next((p, n) for p, n in reads if n in self.produced and self.produced[n].step == cycle[1])
            text = f'ensemble tensor "{escaped(name)}" waits for itself: step {cycle[0]} needs '
            text += ", which needs ".join(f"step {index}" for index in cycle[1:])
            self.problems.append(GraphProblem(cycle[0], self.steps[cycle[0]].model_name, path, text))
        self._check_decoupled(order)

    def _check_decoupled(self, order: Iterable[int]) -> None:
        """`source`: tensor -> the decoupled step from which it originates; `before`: decoupled step -> those
        before it.
        """
        source: dict[str, int] = {}
        before: dict[int, tuple[int, ...]] = {}
        for index in order:
            step = self.steps[index]
            condition = added(self.ensemble, index, IF)
            sources: dict[int, str] = {}
            for _, name in sorted(step.input_map.items()):
                if name in source:
                    sources.setdefault(source[name], name)
            if condition in source:
                sources.setdefault(source[condition], condition)
            if len(sources) > 1:
                text = f"step {index} receives inputs originated from different decoupled models"
                self._problem(index, "input_map", f"{text}: {self._source_names(sources)}")
            own = next(iter(sources), None)
            decoupled = decoupled_in(step.model_name, self.models)
            if decoupled:
                before[index] = (*before[own], own) if own is not None else ()
                self._check_source(index, before[index], decoupled)
                own = index
            if own is not None:
                for name in step.output_map.values():
                    source.setdefault(name, own)
        cache = self.ensemble.response_cache
        if before and cache is not None and cache.enable:
            first = min(before)
            text = uncached(self.ensemble.name, "'decoupled' transaction policy")
            text += f' Step {first}, model "{escaped(self.steps[first].model_name)}", is decoupled'
            self._problem(_OF_ENSEMBLE, "response_cache.enable", text)
        outputs: dict[int, str] = {}
        for tensor in self.ensemble.output:
            if tensor.name in source:
                outputs.setdefault(source[tensor.name], tensor.name)
        last = max(outputs, key=lambda index: len(before[index]), default=0)
        if any(index != last and index not in before[last] for index in outputs):
            text = f"the outputs originate from different decoupled models: {self._source_names(outputs)}"
            self._problem(_OF_ENSEMBLE, "output", text)

    def _source_names(self, sources: Mapping[int, str]) -> str:
        return ", ".join(
            f'"{escaped(name)}" from step {number}, model "{escaped(self.steps[number].model_name)}"'
            for number, name in sources.items()
        )

    def _check_source(self, index: int, before: Iterable[int], decoupled: set[str]) -> None:
        """Checks a decoupled step that follows other decoupled steps."""
        name = self.steps[index].model_name
        if added(self.ensemble, index, MAP):
            path = f'parameters["step[{index}].{MAP}"]'
            text = f'model "{escaped(name)}" is decoupled: its responses to rows cannot be combined'
            self.problems.append(GraphProblem(index, name, path, text))
        for other in before:
            both = sorted(decoupled & decoupled_in(self.steps[other].model_name, self.models))
            if both:
                text = f"step {index} needs the output that step {other} is still producing"
                text = f'model "{escaped(both[0])}" would wait for itself: {text}'
                self._problem(index, "model_name", text)


def _meant_model(step: ModelEnsemblingStep, names: Sequence[str]) -> str:
    near = nearest(step.model_name, names)
    if near:
        return f'did you mean "{near}"?'
    return "add it to the repository, or name another model"


def _named(tensors: Sequence[ModelInput | ModelOutput], name: str) -> ModelInput | ModelOutput | None:
    return next((tensor for tensor in tensors if tensor.name == name), None)


def _inner_dims(tensor: ModelInput | ModelOutput) -> tuple[int, ...]:
    """The dims of an ensemble's own tensor, as its steps see it."""
    return tensor.dims if tensor.reshape is None else tensor.reshape.shape


def _known_dims(member: StepModel, tensor: ModelInput | ModelOutput) -> tuple[int, ...] | None:
    """The dims; None if the model may still turn out to batch, which would change their meaning."""
    assert member.config is not None
    return tensor.dims if member.settled or member.config.max_batch_size > 0 else None


def _differences(
    what: str, data_type: str, dims: tuple[int, ...] | None, batches: bool, name: str, produced: _Tensor
) -> dict[str, str]:
    """How a consumed tensor differs from the produced one: field (data_type or dims) -> text."""
    wrong = {}
    tensor = f'ensemble tensor "{escaped(name)}" ({produced.producer})'
    if produced.data_type and data_type != produced.data_type:
        wrong["data_type"] = f"{what} is {data_type}, but {tensor} is {produced.data_type}"
    if dims is None or produced.dims is None or _same(dims, produced.dims):
        return wrong
    if batches == produced.batches:
        wrong["dims"] = f"{what} has dims {list(dims)}, but {tensor} has {list(produced.dims)}"
        return wrong
    full, produced_full = _full(dims, batches), _full(produced.dims, produced.batches)
    if not _same(full, produced_full):
        text = f"{what} has dims {list(dims)}, but {tensor} has {list(produced.dims)}; with the batch counted in, where"
        wrong["dims"] = f"{text} there is one, {list(full)} and {list(produced_full)}"
    return wrong


def _full(dims: tuple[int, ...], batches: bool) -> tuple[int, ...]:
    return (-1, *dims) if batches else dims


def _same(one: Sequence[int], other: Sequence[int]) -> bool:
    return len(one) == len(other) and all(-1 in pair or pair[0] == pair[1] for pair in zip(one, other, strict=True))


def _ordered(needs: Mapping[int, set[int]]) -> tuple[list[int], list[list[int]]]:
    """The steps in topological order, without those on or behind cycles; and the cycles.

    A cycle is [first, what it needs, .., first]. Cycles that share a step are reported as one.
    """
    remaining = {index: set(needed) for index, needed in needs.items()}
    order = _take_free(remaining)
    cycles = []
    while remaining:
        current = min(remaining)
        seen: dict[int, int] = {}
        cycle: list[int] = []
        while current not in seen:
            seen[current] = len(cycle)
            cycle.append(current)
            current = min(remaining[current])
        cycle = cycle[seen[current] :]
        first = cycle.index(min(cycle))
        cycles.append([*cycle[first:], *cycle[:first], cycle[first]])
        for index in cycle:
            del remaining[index]
        for needed in remaining.values():
            needed.difference_update(cycle)
        _take_free(remaining)
    return order, cycles


def _take_free(remaining: dict[int, set[int]]) -> list[int]:
    """Repeatedly removes the steps that need no remaining step, and returns them in that order."""
    users: dict[int, list[int]] = {}
    for index, needed in remaining.items():
        for other in needed:
            users.setdefault(other, []).append(index)
    order = [index for index, needed in remaining.items() if not needed]
    for index in order:
        for user in users.get(index, ()):
            remaining[user].discard(index)
            if not remaining[user]:
                order.append(user)
    for index in order:
        del remaining[index]
    return order
