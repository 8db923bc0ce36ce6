"""Random graphs of ensembles: every valid one is accepted, and every single mistake in one is named with its place."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from shmserve.repo.config.schema import (
    DataType,
    ModelConfig,
    ModelEnsembling,
    ModelEnsemblingStep,
    ModelInput,
    ModelOutput,
    ModelTransactionPolicy,
)
from shmserve.repo.rules.ensembles import StepModel, check_graph
from shmserve.repo.rules.schedulers import validate_scheduler
from tests.support.hypothesis_profiles import examples

Models = dict[str, StepModel]
TYPES: tuple[DataType, ...] = ("TYPE_FP32", "TYPE_UINT8", "TYPE_STRING", "TYPE_INT64")
STEP = "ensemble_scheduling.step"


class Tensor(NamedTuple):
    name: str
    data_type: DataType
    full: tuple[int, ...]
    """With the batch dimension, where the ensemble has one."""


def some(random: Random, most: int) -> range:
    return range(random.randint(1, most))


def looser(random: Random, dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-1 if random.random() < 0.3 else dim for dim in dims)


def make_graph(random: Random) -> tuple[ModelConfig, Models]:
    """A valid ensemble: each step takes tensors that there are, and what nobody takes is an output."""
    batch = random.choice((0, 4))
    lead = (-1,) if batch else ()

    def tensor(name: str) -> Tensor:
        dims = tuple(random.choice((-1, 1, 3, 224)) for _ in some(random, 3))
        return Tensor(name, random.choice(TYPES), lead + dims)

    inputs = [tensor(f"in{index}") for index in some(random, 3)]
    there, unused = list(inputs), {made.name for made in inputs}
    steps: list[ModelEnsemblingStep] = []
    models: Models = {}
    streaming = random.randint(0, 8)
    for index in some(random, 6):
        taken = random.sample(there, random.randint(1, min(3, len(there))))
        if index == 0:  # so that every input is taken by somebody
            taken = inputs
        made = [tensor(f"t{index}_{place}") for place in some(random, 2)]
        batches = bool(batch) and random.random() < 0.6
        skip = 1 if batches else 0
        config = ModelConfig(
            name=f"m{index}",
            max_batch_size=random.randint(4, 8) if batches else 0,
            input=(
                *(
                    ModelInput(name=f"x{place}", data_type=one.data_type, dims=looser(random, one.full)[skip:])
                    for place, one in enumerate(taken)
                ),
                ModelInput(name="extra", data_type="TYPE_BOOL", dims=(1,), optional=True),
            ),
            output=tuple(
                ModelOutput(name=f"y{place}", data_type=one.data_type, dims=one.full[skip:])
                for place, one in enumerate(made)
            ),
            model_transaction_policy=ModelTransactionPolicy(decoupled=True) if index == streaming else None,
        )
        models[config.name] = StepModel(config, (1, 2))
        step = ModelEnsemblingStep(
            model_name=config.name,
            model_version=random.choice((-1, 0, 1, 2)),
            input_map={f"x{place}": one.name for place, one in enumerate(taken)},
            output_map={f"y{place}": one.name for place, one in enumerate(made)},
        )
        steps.append(step)
        unused -= {one.name for one in taken}
        unused |= {one.name for one in made}
        there += made
    random.shuffle(steps)
    skip = len(lead)
    config = ModelConfig(
        name="e",
        platform="ensemble",
        max_batch_size=batch,
        input=tuple(ModelInput(name=one.name, data_type=one.data_type, dims=one.full[skip:]) for one in inputs),
        output=tuple(
            ModelOutput(name=one.name, data_type=one.data_type, dims=one.full[skip:])
            for one in there
            if one.name in unused
        ),
        ensemble_scheduling=ModelEnsembling(step=tuple(steps)),
    )
    return config, models


def all_problems(config: ModelConfig, models: Models) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    validate_scheduler(config, lambda path, text: found.append((path, text)))
    return found + [(problem.path, problem.text) for problem in check_graph(config, models)]


def steps_of(config: ModelConfig) -> tuple[ModelEnsemblingStep, ...]:
    assert config.ensemble_scheduling is not None
    return config.ensemble_scheduling.step


def with_step(config: ModelConfig, index: int, step: ModelEnsemblingStep) -> ModelConfig:
    steps = list(steps_of(config))
    steps[index] = step
    return replace(config, ensemble_scheduling=ModelEnsembling(step=tuple(steps)))


@settings(max_examples=examples(60))
@given(st.integers(0, 2**32))
def test_valid_graphs_are_accepted(seed: int) -> None:
    assert all_problems(*make_graph(Random(seed))) == []


class Mutated(NamedTuple):
    config: ModelConfig
    models: Models
    path: str
    text: str


Mutation = Callable[[Random, ModelConfig, Models, int], Mutated]


def swap(member: StepModel, **changes: object) -> StepModel:
    assert member.config is not None
    return member._replace(config=replace(member.config, **changes))


def renamed_model(random: Random, config: ModelConfig, models: Models, index: int) -> Mutated:
    step = replace(steps_of(config)[index], model_name="nowhere")
    return Mutated(with_step(config, index, step), models, f"{STEP}[{index}].model_name", "not a model of the")


def absent_version(random: Random, config: ModelConfig, models: Models, index: int) -> Mutated:
    step = replace(steps_of(config)[index], model_version=3)
    return Mutated(with_step(config, index, step), models, f"{STEP}[{index}].model_version", "found 3, but")


def unmapped_input(random: Random, config: ModelConfig, models: Models, index: int) -> Mutated:
    step = steps_of(config)[index]
    key = random.choice(list(step.input_map))
    step = replace(step, input_map={name: value for name, value in step.input_map.items() if name != key})
    return Mutated(with_step(config, index, step), models, f"{STEP}[{index}].input_map", f'"{key}" of model')


def unknown_input(random: Random, config: ModelConfig, models: Models, index: int) -> Mutated:
    step = steps_of(config)[index]
    step = replace(step, input_map={**step.input_map, "zz": config.input[0].name})
    path = f'{STEP}[{index}].input_map["zz"]'
    return Mutated(with_step(config, index, step), models, path, f'"{step.model_name}" has no input "zz"')


def unknown_output(random: Random, config: ModelConfig, models: Models, index: int) -> Mutated:
    step = steps_of(config)[index]
    step = replace(step, output_map={**step.output_map, "zz": "spare"})
    path = f'{STEP}[{index}].output_map["zz"]'
    return Mutated(with_step(config, index, step), models, path, f'"{step.model_name}" has no output "zz"')


def other_type(random: Random, config: ModelConfig, models: Models, index: int) -> Mutated:
    name = steps_of(config)[index].model_name
    found = models[name].config
    assert found is not None
    changed = replace(found.input[0], data_type="TYPE_FP16")
    models = {**models, name: swap(models[name], input=(changed, *found.input[1:]))}
    return Mutated(config, models, f'{STEP}[{index}].input_map["x0"]', "is TYPE_FP16, but")


def other_dims(random: Random, config: ModelConfig, models: Models, index: int) -> Mutated:
    name = steps_of(config)[index].model_name
    found = models[name].config
    assert found is not None
    changed = replace(found.input[0], dims=(*found.input[0].dims, 1, 1))
    models = {**models, name: swap(models[name], input=(changed, *found.input[1:]))}
    return Mutated(config, models, f'{STEP}[{index}].input_map["x0"]', "has dims")


def other_promise(random: Random, config: ModelConfig, models: Models, index: int) -> Mutated:
    place = random.randrange(len(config.output))
    outputs = list(config.output)
    outputs[place] = replace(outputs[place], dims=(*outputs[place].dims, 7, 7))
    return Mutated(replace(config, output=tuple(outputs)), models, f"output[{place}].dims", "of the ensemble has dims")


def made_twice(random: Random, config: ModelConfig, models: Models, index: int) -> Mutated:
    step = steps_of(config)[index]
    step = replace(step, output_map={**step.output_map, "y0": config.input[0].name})
    return Mutated(with_step(config, index, step), models, f'{STEP}[{index}].output_map["y0"]', "is already produced")


def made_by_nobody(random: Random, config: ModelConfig, models: Models, index: int) -> Mutated:
    output = ModelOutput(name="never", data_type="TYPE_BOOL", dims=(1,))
    path = f"output[{len(config.output)}]"
    return Mutated(
        replace(config, output=(*config.output, output)), models, path, '"never" is not produced by any step'
    )


def input_of_nobody(random: Random, config: ModelConfig, models: Models, index: int) -> Mutated:
    spare = ModelInput(name="spare", data_type="TYPE_BOOL", dims=(1,))
    path = f"input[{len(config.input)}]"
    return Mutated(replace(config, input=(*config.input, spare)), models, path, '"spare" is not used by any step')


def tensor_of_nobody(random: Random, config: ModelConfig, models: Models, index: int) -> Mutated:
    gone = random.choice(config.output).name
    changed = replace(config, output=tuple(output for output in config.output if output.name != gone))
    return Mutated(changed, models, f"{STEP}[", f'tensor "{gone}" is not used by any step')


def taken_from_nowhere(random: Random, config: ModelConfig, models: Models, index: int) -> Mutated:
    step = steps_of(config)[index]
    step = replace(step, input_map={**step.input_map, "x0": "nowhere"})
    path = f'{STEP}[{index}].input_map["x0"]'
    return Mutated(with_step(config, index, step), models, path, '"nowhere" is neither an input nor produced by a step')


def smaller_batch(random: Random, config: ModelConfig, models: Models, index: int) -> Mutated:
    name = steps_of(config)[index].model_name
    models = {**models, name: swap(models[name], max_batch_size=3)}
    path = f"{STEP}[{index}].model_name"
    return Mutated(replace(config, max_batch_size=4), models, path, "is 3, expected 0 or at least 4")


def circle_of_steps(random: Random, config: ModelConfig, models: Models, index: int) -> Mutated:
    step = steps_of(config)[index]
    step = replace(step, input_map={**step.input_map, "x0": next(iter(step.output_map.values()))})
    return Mutated(with_step(config, index, step), models, f"{STEP}[{index}].input_map", "waits for itself")


def circle_of_ensembles(random: Random, config: ModelConfig, models: Models, index: int) -> Mutated:
    name = steps_of(config)[index].model_name
    inner = (ModelEnsemblingStep(model_name=config.name, input_map={"a": "b"}, output_map={"c": "d"}),)
    found = swap(models[name], platform="ensemble", ensemble_scheduling=ModelEnsembling(step=inner))
    return Mutated(
        config, {**models, name: found}, f"{STEP}[{index}].model_name", f"depends on this ensemble: e -> {name} -> e"
    )


def two_streams(random: Random, config: ModelConfig, models: Models, index: int) -> Mutated:
    """A new step that takes from two new models."""
    stream = ModelConfig(
        name="stream",
        input=(ModelInput(name="x", data_type="TYPE_INVALID", dims=(1,)),),
        output=(ModelOutput(name="y", data_type="TYPE_BOOL", dims=(1,)),),
        model_transaction_policy=ModelTransactionPolicy(decoupled=True),
    )
    models = {**models, "stream": StepModel(stream, (1,)), "join": StepModel(None, reason="not here", settled=False)}
    new = [
        ModelEnsemblingStep(model_name="stream", input_map={"x": config.input[0].name}, output_map={"y": name})
        for name in ("s1", "s2")
    ]
    join = ModelEnsemblingStep(model_name="join", input_map={"a": "s1", "b": "s2"}, output_map={"c": "end"})
    steps = (join, *new, *steps_of(config))
    text = 'different decoupled models: "s1" from step 1, model "stream", "s2" from step 2, model "stream"'
    return Mutated(
        replace(config, ensemble_scheduling=ModelEnsembling(step=steps)), models, f"{STEP}[0].input_map", text
    )


MUTATIONS: list[Mutation] = [
    renamed_model,
    absent_version,
    unmapped_input,
    unknown_input,
    unknown_output,
    other_type,
    other_dims,
    other_promise,
    made_twice,
    made_by_nobody,
    input_of_nobody,
    tensor_of_nobody,
    taken_from_nowhere,
    smaller_batch,
    circle_of_steps,
    circle_of_ensembles,
    two_streams,
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_single_mistake_is_found(mutation: Mutation) -> None:
    @settings(max_examples=examples(15))
    @given(st.integers(0, 2**32))
    def each(seed: int) -> None:
        random = Random(seed)
        config, models = make_graph(random)
        changed = mutation(random, config, models, random.randrange(len(steps_of(config))))
        found = all_problems(changed.config, changed.models)
        assert any(path.startswith(changed.path) and changed.text in text for path, text in found), found

    each()
