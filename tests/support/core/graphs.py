"""Random graphs of steps, models that compute, and direct computation of the same results: the oracle for ensembles.

A model may send any number of responses to a request (`many`). For each response, all later steps are computed again.

Tensors are vectors (dims [-1]), matrices ([-1, -1]), conditions (BOOL [1]) and rows of these (BOOL [-1, 1]).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from shmserve.core.policy import BatchPolicy, ModelPolicy, StepPolicy, TensorSpec

Array = np.ndarray[Any, Any]
VECTOR, MATRIX, CONDITION, CONDITIONS = "vector", "matrix", "condition", "conditions"
DIMS = {VECTOR: (-1,), MATRIX: (-1, -1), CONDITION: (1,), CONDITIONS: (-1, 1)}
RANK = {VECTOR: 1, MATRIX: 2, CONDITION: 1, CONDITIONS: 2}
DTYPES = {VECTOR: "INT32", MATRIX: "INT32", CONDITION: "BOOL", CONDITIONS: "BOOL"}
ROWS = {VECTOR: MATRIX, CONDITION: CONDITIONS}
"""Kind of a row -> kind of the tensor of rows that a mapped step reads or makes."""
NUMPY = {"INT32": np.dtype("<i4"), "BOOL": np.dtype("?")}
PRIME = 1009


class Failed(Exception):
    """The model or the graph fails for this request."""


@dataclass
class Kind:
    """A model: `inputs` and `outputs` are kinds of tensors, by name. `steps` empty: it is not an ensemble."""

    name: str
    inputs: dict[str, str]
    outputs: dict[str, str]
    max_batch: int = 0
    optional: frozenset[str] = frozenset()
    salt: int = 0
    fragile: bool = False
    many: bool = False
    steps: list[StepPolicy] = field(default_factory=list)

    def policy(self, batching: BatchPolicy | None) -> ModelPolicy:
        inputs = tuple(_spec(name, kind, name in self.optional) for name, kind in self.inputs.items())
        outputs = tuple(_spec(name, kind, False) for name, kind in self.outputs.items())
        steps = tuple(self.steps) or None
        return ModelPolicy(
            self.name,
            1,
            self.max_batch,
            inputs,
            outputs,
            None if steps else batching,
            None,
            steps=steps,
            decoupled=self.many,
        )


def _spec(name: str, kind: str, optional: bool) -> TensorSpec:
    return TensorSpec(name, DTYPES[kind], DIMS[kind], optional)


# ------------------------------------------------------------------------------------------------ computed directly


def compute(kind: Kind, inputs: Mapping[str, Array]) -> list[dict[str, Array]]:
    """All responses of a model to a request, without the batch dimension."""
    total = kind.salt + sum((index + 1) * int(inputs[name].sum()) for index, name in enumerate(sorted(inputs)))
    if kind.fragile and total % 5 == 0:
        raise Failed(f"{kind.name} cannot")
    first = inputs[min(name for name in kind.inputs if name not in kind.optional)]
    return [_made(kind, first.shape[-1], total + 13 * number) for number in range(total % 5 if kind.many else 1)]


def _made(kind: Kind, width: int, total: int) -> dict[str, Array]:
    made = {}
    for index, (name, what) in enumerate(kind.outputs.items()):
        base = (np.arange(width) * (index + 2) + total) % PRIME
        if what == CONDITION:
            made[name] = np.array([(total + index) % 3 > 0])
        elif what == MATRIX:
            count = (total + index) % 5
            made[name] = ((base + np.arange(count)[:, None] * 7) % PRIME).astype("<i4").reshape(count, width)
        else:
            made[name] = base.astype("<i4")
    return made


def is_many(kinds: Mapping[str, Kind], name: str) -> bool:
    return kinds[name].many or any(is_many(kinds, step.model) for step in kinds[name].steps)


def answers(
    kinds: Mapping[str, Kind], name: str, inputs: Mapping[str, Array], wanted: Sequence[str] | None = None
) -> Iterator[dict[str, Array]]:
    """The responses of the model or ensemble, without skipped outputs. Raises Failed if it cannot continue."""
    kind = kinds[name]
    if not kind.steps:
        for made in compute(kind, inputs):
            yield {name: made[name] for name in wanted if name in made} if wanted is not None else made
        return
    outputs = tuple(kind.outputs) if wanted is None else tuple(wanted)
    yield from _Answers(kinds, kind, outputs).level(0, dict(inputs), set(kind.inputs))


class _Answers:
    """The responses of one ensemble. The level of a step is the number of steps with many responses that precede it."""

    def __init__(self, kinds: Mapping[str, Kind], kind: Kind, outputs: Sequence[str]) -> None:
        self.kinds, self.kind, self.outputs = kinds, kind, outputs
        self.maker = {tensor: index for index, step in enumerate(kind.steps) for _, tensor in step.outputs}
        self.needed = _needed(kind, outputs)
        self.read = _read_by(kind, self.needed, outputs)
        self.many = {index for index in self.needed if is_many(kinds, kind.steps[index].model)}
        self.levels = {index: self._level(index) for index in self.needed}
        sources = [self.levels[index] for index in self.many]
        if len(set(sources)) < len(sources) or any(kind.steps[index].mapped for index in self.many):
            raise Failed("not what can be followed")

    def _level(self, index: int) -> int:
        makers = [self.maker[name] for name in _reads(self.kind.steps[index]) if name in self.maker]
        return max((self._level(maker) + (maker in self.many) for maker in makers), default=0)

    def level(self, level: int, there: dict[str, Array], over: set[str]) -> Iterator[dict[str, Array]]:
        todo = {index for index in self.needed - self.many if self.levels[index] == level}
        while todo:
            for index in sorted(todo):
                step = self.kind.steps[index]
                if _reads(step) <= over:
                    there |= _step(self.kinds, step, there, self.read, set(self.maker))
                    over |= {tensor for _, tensor in step.outputs}
                    todo.remove(index)
        source = next((index for index in self.many if self.levels[index] == level), None)
        if source is None:
            yield {name: there[name] for name in self.outputs if name in there}
            return
        step = self.kind.steps[source]
        names = dict(step.outputs)
        over = over | set(names.values())
        given = _given(self.kinds, step, there, set(self.maker))
        if given is None:
            yield from self.level(level + 1, dict(there), set(over))
            return
        wanted = [own for own, tensor in step.outputs if tensor in self.read]
        for made in answers(self.kinds, step.model, given, wanted):
            found = {names[own]: array for own, array in made.items()}
            yield from self.level(level + 1, there | found, set(over))


def _reads(step: StepPolicy) -> set[str]:
    return {tensor for _, tensor in step.inputs} | ({step.condition} if step.condition else set())


def _needed(kind: Kind, outputs: Sequence[str]) -> set[int]:
    maker = {tensor: index for index, step in enumerate(kind.steps) for _, tensor in step.outputs}
    found: set[int] = set()
    todo = [maker[name] for name in outputs]
    while todo:
        index = todo.pop()
        if index not in found:
            found.add(index)
            step = kind.steps[index]
            todo += [maker[t] for t in [*(t for _, t in step.inputs), step.condition] if t in maker]
    return found


def _read_by(kind: Kind, needed: set[int], outputs: Sequence[str]) -> set[str]:
    """Tensors that a step or the caller uses."""
    read = {tensor for index in needed for _, tensor in kind.steps[index].inputs}
    return read | {kind.steps[index].condition for index in needed} | set(outputs)


def _given(
    kinds: Mapping[str, Kind], step: StepPolicy, there: Mapping[str, Array], makers: set[str]
) -> dict[str, Array] | None:
    """The inputs of the step's model; None if it is skipped."""
    kind = kinds[step.model]
    if step.condition and not (step.condition in there and bool(there[step.condition].all())):
        return None
    given = {own: there[tensor] for own, tensor in step.inputs if tensor in there}
    lacking = [
        tensor
        for own, tensor in step.inputs
        if own not in given and (own not in kind.optional or tensor == step.mapped)
    ]
    if makers.intersection(lacking):
        return None
    if lacking and (step.mapped not in there or len(there[step.mapped])):
        raise Failed(f"{lacking} are missing")
    return given


def _step(
    kinds: Mapping[str, Kind], step: StepPolicy, there: Mapping[str, Array], read: set[str], makers: set[str]
) -> dict[str, Array]:
    """Tensors of the ensemble that the step computes; none if it is skipped."""
    given = _given(kinds, step, there, makers)
    if given is None:
        return {}
    wanted = [own for own, tensor in step.outputs if tensor in read]
    names = dict(step.outputs)
    if not step.mapped:
        (made,) = answers(kinds, step.model, given, wanted)
        return {names[own]: array for own, array in made.items()}
    rows_of = there[step.mapped]
    mapped = {own for own, tensor in step.inputs if tensor == step.mapped}
    rows = [
        next(answers(kinds, step.model, {own: a[row] if own in mapped else a for own, a in given.items()}, wanted))
        for row in range(len(rows_of))
    ]
    if not rows:
        return {names[own]: np.zeros((0, 0), "<i4") for own in wanted}
    put = {}
    for own in wanted:
        parts = [row[own] for row in rows if own in row]
        if parts and (len(parts) != len(rows) or len({part.shape for part in parts}) > 1):
            raise Failed(f"{own} is not there for all rows")
        if parts:
            put[names[own]] = np.stack(parts)
    return put


# ------------------------------------------------------------------------------------------------ made at random


def models(random: Random, many: bool) -> dict[str, Kind]:
    """Some models that compute; `many`: the first one sends many responses."""
    found: dict[str, Kind] = {}
    for number in range(random.randint(2, 4)):
        batches = random.random() < 0.6
        count = random.randint(1, 3)
        inputs = {f"x{index}": VECTOR for index in range(count)}
        if not batches and random.random() < 0.3:
            inputs["x0"] = MATRIX
        optional = frozenset(name for name in inputs if name != "x0" and random.random() < 0.3)
        what = [VECTOR, VECTOR, CONDITION] if batches else [VECTOR, MATRIX, MATRIX, CONDITION]
        outputs = {f"y{index}": random.choice(what) for index in range(random.randint(1, 3))}
        max_batch = random.choice([1, 3, 8]) if batches else 0
        fragile = random.random() < 0.15
        found[f"m{number}"] = Kind(f"m{number}", inputs, outputs, max_batch, optional, random.randint(0, 999), fragile)
    found["m0"].many = many
    return found


def ensemble(random: Random, name: str, kinds: Mapping[str, Kind]) -> Kind | None:
    """An ensemble of these models; None if they do not fit together."""
    made = {f"i{index}": random.choice([VECTOR, VECTOR, MATRIX]) for index in range(random.randint(1, 3))}
    if random.random() < 0.3:
        made["ic"] = CONDITION
    inputs = dict(made)
    steps: list[StepPolicy] = []
    for _ in range(random.randint(1, 6)):
        model = random.choice(sorted(kinds))
        if is_many(kinds, model) and any(is_many(kinds, step.model) for step in steps) and random.random() < 0.9:
            continue  # two of them seldom make sense in one ensemble
        step = _random_step(random, model, kinds, made, len(steps))
        if step is not None:
            steps.append(step)
    made = {tensor: kind for tensor, kind in made.items() if tensor not in inputs}
    if not steps or not made:
        return None
    count = random.randint(1, len(made))
    outputs = {tensor: made[tensor] for tensor in sorted(random.sample(sorted(made), count))}
    optional = frozenset(tensor for tensor in inputs if tensor != "ic" and random.random() < 0.1)
    return Kind(name, inputs, outputs, 0, optional - {"i0"}, steps=random.sample(steps, len(steps)))


def _random_step(
    random: Random, name: str, kinds: Mapping[str, Kind], made: dict[str, str], number: int
) -> StepPolicy | None:
    kind = kinds[name]
    by_kind = {what: [tensor for tensor, found in made.items() if found == what] for what in DIMS}
    reads: list[tuple[str, str]] = []
    mapped = ""
    for own, what in kind.inputs.items():
        if own in kind.optional and random.random() < 0.5:
            continue
        rows = by_kind[ROWS[what]] if what in ROWS else []
        if rows and not mapped and random.random() < 0.5:
            mapped = random.choice(rows)
            reads.append((own, mapped))
        elif by_kind[what] and by_kind[what] != [mapped]:
            reads.append((own, random.choice(by_kind[what])))
        else:
            return None
    if [tensor for _, tensor in reads].count(mapped) > 1:
        return None
    condition = random.choice(by_kind[CONDITION]) if by_kind[CONDITION] and random.random() < 0.4 else ""
    makes = {own: what for own, what in kind.outputs.items() if not mapped or what in ROWS}
    if not makes:
        return None
    for own in makes:
        made[f"t{number}{own}"] = ROWS[makes[own]] if mapped else makes[own]
    outputs = tuple(sorted((own, f"t{number}{own}") for own in makes))
    return StepPolicy(name, 0, tuple(sorted(reads)), outputs, mapped, condition)


def example(random: Random, what: str) -> Array:
    if what == CONDITION:
        return np.array([random.random() < 0.6])
    shape = (random.randint(0, 4), 3) if what == MATRIX else (3,)
    return np.array([random.randint(0, 99) for _ in range(int(np.prod(shape)))], "<i4").reshape(shape)
