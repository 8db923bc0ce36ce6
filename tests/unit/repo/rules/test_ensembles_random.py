"""Random graphs of ensembles: valid ones are accepted, and a single mistake is reported with its place."""

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
    """The shape, with the batch dimension if the ensemble has one."""


def some(random: Random, most: int) -> range:
    return range(random.randint(1, most))


def looser(random: Random, dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-1 if random.random() < 0.3 else dim for dim in dims)


def make_graph(random: Random) -> tuple[ModelConfig, Models]:
    """A valid ensemble: each step reads existing tensors, and tensors that no step reads are outputs."""
    batch = random.choice((0, 4))
    lead = (-1,) if batch else ()

    def tensor(name: str) -> Tensor:
        dims = tuple(random.choice((-1, 1, 3, 224)) for _ in some(random, 3))
        return Tensor(name, random.choice(TYPES), lead + dims)

    inputs = [tensor(f"in{index}") for index in some(random, 3)]
    existing, unused = list(inputs), {made.name for made in inputs}
    steps: list[ModelEnsemblingStep] = []
    models: Models = {}
    streaming = random.randint(0, 8)
    for index in some(random, 6):
        read = random.sample(existing, random.randint(1, min(3, len(existing))))
        if index == 0:  # so that every input is used
            read = inputs
        made = [tensor(f"t{index}_{place}") for place in some(random, 2)]
        batches = bool(batch) and random.random() < 0.6
        skip = 1 if batches else 0
        config = ModelConfig(
            name=f"m{index}",
            max_batch_size=random.randint(4, 8) if batches else 0,
            input=(
                *(
                    ModelInput(name=f"x{place}", data_type=one.data_type, dims=looser(random, one.full)[skip:])
                    for place, one in enumerate(read)
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
            input_map={f"x{place}": one.name for place, one in enumerate(read)},
            output_map={f"y{place}": one.name for place, one in enumerate(made)},
        )
        steps.append(step)
        unused -= {one.name for one in read}
        unused |= {one.name for one in made}
        existing += made
    random.shuffle(steps)
    skip = len(lead)
    config = ModelConfig(
        name="e",
        platform="ensemble",
        max_batch_size=batch,
        input=tuple(ModelInput(name=one.name, data_type=one.data_type, dims=one.full[skip:]) for one in inputs),
        output=tuple(
            ModelOutput(name=one.name, data_type=one.data_type, dims=one.full[skip:])
            for one in existing
            if one.name in unused
        ),
        ensemble_scheduling=ModelEnsembling(step=tuple(steps)),
    )
    return config, models


def all_problems(config: ModelConfig, models: Models) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    validate_scheduler(config, lambda path, text: found.append((path, text)))
    return found + [(problem.path, problem.text) for problem in check_graph(config, models)]


@settings(max_examples=examples(60))
@given(st.integers(0, 2**32))
def test_valid_graphs_are_accepted(seed: int) -> None:
    assert all_problems(*make_graph(Random(seed))) == []


class Mutated(NamedTuple):
    """A graph with a mistake, and the path and text of the problem."""

    config: ModelConfig
    models: Models
    path: str
    text: str


class Graph:
    """A valid graph, and one of its steps."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.config, self.models = make_graph(random)
        self.index = random.randrange(len(self.steps))
        self.step = self.steps[self.index]

    @property
    def steps(self) -> list[ModelEnsemblingStep]:
        assert self.config.ensemble_scheduling is not None
        return list(self.config.ensemble_scheduling.step)

    @property
    def model(self) -> ModelConfig:
        config = self.models[self.step.model_name].config
        assert config is not None
        return config

    def with_step(self, path: str, text: str, **changes: object) -> Mutated:
        steps = self.steps
        steps[self.index] = replace(self.step, **changes)
        config = replace(self.config, ensemble_scheduling=ModelEnsembling(step=tuple(steps)))
        return Mutated(config, self.models, f"{STEP}[{self.index}].{path}", text)

    def with_model(self, path: str, text: str, **changes: object) -> Mutated:
        name = self.step.model_name
        models = {**self.models, name: self.models[name]._replace(config=replace(self.model, **changes))}
        return Mutated(self.config, models, f"{STEP}[{self.index}].{path}", text)

    def with_first_input(self, text: str, **changes: object) -> Mutated:
        first, *others = self.model.input
        return self.with_model('input_map["x0"]', text, input=(replace(first, **changes), *others))

    def with_config(self, path: str, text: str, **changes: object) -> Mutated:
        return Mutated(replace(self.config, **changes), self.models, path, text)


def unknown_model(graph: Graph) -> Mutated:
    return graph.with_step("model_name", "not a model of the", model_name="nowhere")


def absent_version(graph: Graph) -> Mutated:
    return graph.with_step("model_version", "found 3, but", model_version=3)


def unmapped_input(graph: Graph) -> Mutated:
    input_map = dict(graph.step.input_map)
    key = graph.random.choice(list(input_map))
    del input_map[key]
    return graph.with_step("input_map", f'"{key}" of model', input_map=input_map)


def unknown_input(graph: Graph) -> Mutated:
    input_map = {**graph.step.input_map, "zz": graph.config.input[0].name}
    return graph.with_step('input_map["zz"]', f'"{graph.step.model_name}" has no input "zz"', input_map=input_map)


def unknown_output(graph: Graph) -> Mutated:
    output_map = {**graph.step.output_map, "zz": "spare"}
    return graph.with_step('output_map["zz"]', f'"{graph.step.model_name}" has no output "zz"', output_map=output_map)


def other_type(graph: Graph) -> Mutated:
    return graph.with_first_input("is TYPE_FP16, but", data_type="TYPE_FP16")


def other_dims(graph: Graph) -> Mutated:
    return graph.with_first_input("has dims", dims=(*graph.model.input[0].dims, 1, 1))


def other_dims_of_an_output(graph: Graph) -> Mutated:
    outputs = list(graph.config.output)
    place = graph.random.randrange(len(outputs))
    outputs[place] = replace(outputs[place], dims=(*outputs[place].dims, 7, 7))
    return graph.with_config(f"output[{place}].dims", "of the ensemble has dims", output=tuple(outputs))


def tensor_produced_twice(graph: Graph) -> Mutated:
    output_map = {**graph.step.output_map, "y0": graph.config.input[0].name}
    return graph.with_step('output_map["y0"]', "is already produced", output_map=output_map)


def output_of_no_step(graph: Graph) -> Mutated:
    outputs = (*graph.config.output, ModelOutput(name="never", data_type="TYPE_BOOL", dims=(1,)))
    return graph.with_config(f"output[{len(outputs) - 1}]", '"never" is not produced by any step', output=outputs)


def unused_input(graph: Graph) -> Mutated:
    inputs = (*graph.config.input, ModelInput(name="spare", data_type="TYPE_BOOL", dims=(1,)))
    return graph.with_config(f"input[{len(inputs) - 1}]", '"spare" is not used by any step', input=inputs)


def unused_tensor(graph: Graph) -> Mutated:
    name = graph.random.choice(graph.config.output).name
    outputs = tuple(output for output in graph.config.output if output.name != name)
    return graph.with_config(f"{STEP}[", f'tensor "{name}" is not used by any step', output=outputs)


def unknown_tensor(graph: Graph) -> Mutated:
    text = '"nowhere" is neither an input nor produced by a step'
    return graph.with_step('input_map["x0"]', text, input_map={**graph.step.input_map, "x0": "nowhere"})


def smaller_batch(graph: Graph) -> Mutated:
    mutated = graph.with_model("model_name", "is 3, expected 0 or at least 4", max_batch_size=3)
    return mutated._replace(config=replace(mutated.config, max_batch_size=4))


def circle_of_steps(graph: Graph) -> Mutated:
    own = next(iter(graph.step.output_map.values()))
    return graph.with_step("input_map", "waits for itself", input_map={**graph.step.input_map, "x0": own})


def circle_of_ensembles(graph: Graph) -> Mutated:
    text = f"depends on this ensemble: e -> {graph.step.model_name} -> e"
    inner = ModelEnsemblingStep(model_name=graph.config.name, input_map={"a": "b"}, output_map={"c": "d"})
    scheduling = ModelEnsembling(step=(inner,))
    return graph.with_model("model_name", text, platform="ensemble", ensemble_scheduling=scheduling)


def two_decoupled_models(graph: Graph) -> Mutated:
    """A new step that reads from two decoupled models."""
    stream = ModelConfig(
        name="stream",
        input=(ModelInput(name="x", data_type="TYPE_INVALID", dims=(1,)),),
        output=(ModelOutput(name="y", data_type="TYPE_BOOL", dims=(1,)),),
        model_transaction_policy=ModelTransactionPolicy(decoupled=True),
    )
    join = ModelEnsemblingStep(model_name="join", input_map={"a": "s1", "b": "s2"}, output_map={"c": "end"})
    streams = [
        ModelEnsemblingStep(model_name="stream", input_map={"x": graph.config.input[0].name}, output_map={"y": name})
        for name in ("s1", "s2")
    ]
    config = replace(graph.config, ensemble_scheduling=ModelEnsembling(step=(join, *streams, *graph.steps)))
    new = {"stream": StepModel(stream, (1,)), "join": StepModel(None, reason="not here", settled=False)}
    text = 'different decoupled models: "s1" from step 1, model "stream", "s2" from step 2, model "stream"'
    return Mutated(config, {**graph.models, **new}, f"{STEP}[0].input_map", text)


MUTATIONS = [
    unknown_model,
    absent_version,
    unmapped_input,
    unknown_input,
    unknown_output,
    other_type,
    other_dims,
    other_dims_of_an_output,
    tensor_produced_twice,
    output_of_no_step,
    unused_input,
    unused_tensor,
    unknown_tensor,
    smaller_batch,
    circle_of_steps,
    circle_of_ensembles,
    two_decoupled_models,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_a_single_error_is_reported(mutate: Callable[[Graph], Mutated]) -> None:
    @settings(max_examples=examples(15))
    @given(st.integers(0, 2**32))
    def each(seed: int) -> None:
        mutated = mutate(Graph(Random(seed)))
        found = all_problems(mutated.config, mutated.models)
        assert any(path.startswith(mutated.path) and mutated.text in text for path, text in found), found

    each()
