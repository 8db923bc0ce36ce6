"""The graph of an ensemble: every valid one is accepted, and every single mistake in one is named with its place."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from shmserve.repo.ensembles import GraphProblem, Member, check_graph, is_decoupled, way_to
from shmserve.repo.load import parse
from shmserve.repo.schema import (
    DataType,
    ModelConfig,
    ModelEnsembling,
    ModelEnsemblingStep,
    ModelInput,
    ModelOutput,
    ModelTransactionPolicy,
)
from shmserve.repo.validate_schedulers import validate_scheduler

Models = dict[str, Member]
TYPES: tuple[DataType, ...] = ("TYPE_FP32", "TYPE_UINT8", "TYPE_STRING", "TYPE_INT64")


def member(text: str, versions: tuple[int, ...] = (1,), reason: str = "", settled: bool = True) -> Member:
    return Member(parse(text), versions, reason, settled)


DECODE = """
name: "decode" max_batch_size: 8
input { name: "IN" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] }
"""
CLASSIFY = """
name: "classify" max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: [ 3, -1, -1 ] }
input { name: "BIAS" data_type: TYPE_FP32 dims: [ 1 ] optional: true }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 10 ] }
"""
PIPELINE = """
name: "pipeline" platform: "ensemble" max_batch_size: 4
input { name: "RAW" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "LABEL" data_type: TYPE_FP32 dims: [ 10 ] }
ensemble_scheduling {
  step [
    {
      model_name: "decode" model_version: -1
      input_map { key: "IN" value: "RAW" } output_map { key: "OUT" value: "picture" }
    },
    {
      model_name: "classify" model_version: 2
      input_map { key: "IN" value: "picture" } output_map { key: "OUT" value: "LABEL" }
    }
  ]
}
"""


def problems(pipeline: str = PIPELINE, decode: str = DECODE, classify: str = CLASSIFY) -> list[str]:
    models = {"decode": member(decode), "classify": member(classify, (1, 2))}
    return [f"{problem.path}: {problem.text}" for problem in check_graph(parse(pipeline), models)]


STEP = "ensemble_scheduling.step"
IN = 'input "IN" of model "classify"'
PICTURE = 'ensemble tensor "picture" (output "OUT" of step 0, model "decode")'


def test_a_pipeline_that_fits() -> None:
    assert problems() == []


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            'model_name: "classify"',
            'model_name: "clasify"',
            f'{STEP}[1].model_name: found "clasify", not a model of the repository; did you mean "classify"?',
        ),
        (
            "model_version: 2",
            "model_version: 7",
            f'{STEP}[1].model_version: found 7, but the versions of model "classify" that are served are 1, 2',
        ),
        (
            'key: "IN" value: "picture"',
            'key: "In" value: "picture"',
            f'{STEP}[1].input_map["In"]: model "classify" has no input "In"; did you mean "IN"?',
        ),
        (
            'key: "OUT" value: "picture"',
            'key: "OUTPUT" value: "picture"',
            f'{STEP}[0].output_map["OUTPUT"]: model "decode" has no output "OUTPUT"; did you mean "OUT"?',
        ),
        (
            'key: "IN" value: "RAW"',
            'key: "X" value: "RAW"',
            f'{STEP}[0].input_map: input "IN" of model "decode" is not mapped, and it is not optional',
        ),
        (
            "max_batch_size: 4",
            "max_batch_size: 16",
            f'{STEP}[0].model_name: max_batch_size of model "decode" is 8, expected 0 or at least 16, '
            "which is the ensemble's",
        ),
        (
            'name: "LABEL" data_type: TYPE_FP32 dims: [ 10 ]',
            'name: "LABEL" data_type: TYPE_FP64 dims: [ 10 ]',
            'output[0].data_type: output "LABEL" of the ensemble is TYPE_FP64, but ensemble tensor "LABEL" '
            '(output "OUT" of step 1, model "classify") is TYPE_FP32',
        ),
        (
            'name: "LABEL" data_type: TYPE_FP32 dims: [ 10 ]',
            'name: "LABEL" data_type: TYPE_FP32 dims: [ 9 ]',
            'output[0].dims: output "LABEL" of the ensemble has dims [9], but ensemble tensor "LABEL" '
            '(output "OUT" of step 1, model "classify") has [10]',
        ),
        (
            'name: "RAW" data_type: TYPE_STRING',
            'name: "RAW" data_type: TYPE_UINT8',
            f'{STEP}[0].input_map["IN"]: input "IN" of model "decode" is TYPE_STRING, but ensemble tensor "RAW" '
            "(an input of the ensemble) is TYPE_UINT8",
        ),
        (
            'model_name: "classify"',
            'model_name: "pipeline"',
            f'{STEP}[1].model_name: model "pipeline" needs this ensemble itself: pipeline -> pipeline',
        ),
    ],
)
def test_a_mistake_in_the_ensemble(old: str, new: str, expected: str) -> None:
    assert PIPELINE.count(old) == 1
    assert expected in problems(PIPELINE.replace(old, new))


def test_a_mistake_in_a_model() -> None:
    dims = f'{STEP}[1].input_map["IN"]: {IN} has dims [4, -1, -1], but {PICTURE} has [3, 224, 224]'
    assert problems(classify=CLASSIFY.replace("[ 3, -1", "[ 4, -1")) == [dims]
    kind = f'{STEP}[1].input_map["IN"]: {IN} is TYPE_FP16, but {PICTURE} is TYPE_FP32'
    assert problems(classify=CLASSIFY.replace('"IN" data_type: TYPE_FP32', '"IN" data_type: TYPE_FP16')) == [kind]
    both = CLASSIFY.replace("[ 3, -1", "[ 4, -1").replace('"IN" data_type: TYPE_FP32', '"IN" data_type: TYPE_FP16')
    assert problems(classify=both) == [kind, dims]


def test_a_model_that_takes_no_batches() -> None:
    alone = CLASSIFY.replace("max_batch_size: 8", "")
    text = "; with the batch counted in, where there is one, [3, -1] and [-1, 3, 224, 224]"
    assert text in problems(classify=alone.replace("[ 3, -1, -1 ]", "[ 3, -1 ]"))[0]
    batch_counted_in = alone.replace("[ 3, -1, -1 ]", "[ -1, 3, 224, 224 ]").replace("[ 10 ]", "[ -1, 10 ]")
    assert problems(classify=batch_counted_in) == []
    assert problems(classify=batch_counted_in.replace("3, 224", "1, 224")) != []
    assert problems(PIPELINE.replace("max_batch_size: 4", "")) == [], "a batch of one is put around it"


def test_a_model_that_cannot_be_served() -> None:
    models = {"decode": Member(None, reason="it has 2 problems"), "classify": member(CLASSIFY, (2,))}
    assert check_graph(parse(PIPELINE), models) == [
        GraphProblem(0, "decode", f"{STEP}[0].model_name", 'model "decode" cannot be served: it has 2 problems')
    ]


def test_a_model_that_will_say_more_of_itself() -> None:
    """What is not known yet is not complained of; what is known is."""
    models = {"decode": member(DECODE), "classify": member('name: "classify"', (2,), settled=False)}
    assert check_graph(parse(PIPELINE), models) == []
    said = 'name: "classify" input { name: "IN" data_type: TYPE_FP32 dims: [ -1, 3 ] }'
    models["classify"] = member(said, (2,), settled=False)
    assert check_graph(parse(PIPELINE), models) == [], "its dims mean another thing once it takes batches"
    models["classify"] = member(said.replace("FP32", "FP16"), (2,), settled=False)
    assert [problem.text for problem in check_graph(parse(PIPELINE), models)] == [
        f"{IN} is TYPE_FP16, but {PICTURE} is TYPE_FP32"
    ]


def ensemble(name: str, *models: str) -> str:
    """Steps one after another, each over t0, t1, .."""
    steps = "".join(
        f'step {{ model_name: "{model}" input_map {{ key: "x" value: "t{index}" }} '
        f'output_map {{ key: "y" value: "t{index + 1}" }} }}\n'
        for index, model in enumerate(models)
    )
    tensor = "data_type: TYPE_FP32 dims: [ 1 ]"
    return f"""name: "{name}" platform: "ensemble"
input {{ name: "t0" {tensor} }} output {{ name: "t{len(models)}" {tensor} }} ensemble_scheduling {{ {steps} }}"""


def test_ensembles_that_need_each_other() -> None:
    models = {name: member(ensemble(name, other)) for name, other in (("a", "b"), ("b", "c"), ("c", "a"), ("d", "a"))}
    for name, way in (("a", "a -> b -> c -> a"), ("b", "b -> c -> a -> b"), ("c", "c -> a -> b -> c")):
        config = models[name].config
        assert config is not None
        texts = [problem.text for problem in check_graph(config, models)]
        assert [text for text in texts if "itself" in text] == [f'model "{way[5]}" needs this ensemble itself: {way}']
    config = models["d"].config
    assert config is not None
    assert not any("itself" in problem.text for problem in check_graph(config, models)), "it is not in the circle"
    assert way_to("c", "d", models) == ["d", "a", "b", "c"]
    assert way_to("d", "a", models) == []


def test_steps_that_wait_for_each_other() -> None:
    text = PIPELINE.replace('key: "IN" value: "RAW"', 'key: "IN" value: "RAW" } input_map { key: "Z" value: "LABEL"')
    decode = DECODE + 'input { name: "Z" data_type: TYPE_FP32 dims: [ 10 ] }'
    assert problems(text, decode) == [
        f'{STEP}[0].input_map["Z"]: ensemble tensor "LABEL" waits for itself: step 0 needs step 1, which needs step 0'
    ]
    own = PIPELINE.replace('value: "RAW"', 'value: "picture"')
    assert any('"picture" waits for itself: step 0 needs step 0' in text for text in problems(own))


def test_all_circles_are_told() -> None:
    """0 <-> 1, 2 -> 2, 3 <-> 4, and 5 which waits behind all of them."""
    wanted = {0: "t1", 1: "t0", 2: "t2", 3: "t4", 4: "t3", 5: "t0"}
    steps = tuple(
        ModelEnsemblingStep(model_name="m", input_map={"x": name}, output_map={"y": f"t{index}"})
        for index, name in wanted.items()
    )
    config = ModelConfig(name="e", platform="ensemble", ensemble_scheduling=ModelEnsembling(step=steps))
    found = [problem.step for problem in check_graph(config, {"m": Member(ModelConfig(name="m"), settled=False)})]
    assert found == [0, 2, 3]


STREAM = "model_transaction_policy { decoupled: true }"
JOIN = """
name: "join" platform: "ensemble"
input { name: "RAW" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "SUM" data_type: TYPE_FP32 dims: [ 1 ] }
ensemble_scheduling {
  step [
    { model_name: "left" input_map { key: "x" value: "RAW" } output_map { key: "y" value: "L" } },
    { model_name: "right" input_map { key: "x" value: "RAW" } output_map { key: "y" value: "R" } },
    { model_name: "pass" input_map { key: "x" value: "R" } output_map { key: "y" value: "R2" } },
    {
      model_name: "add" input_map { key: "a" value: "L" } input_map { key: "b" value: "R2" }
      output_map { key: "y" value: "SUM" }
    }
  ]
}
"""


def test_two_models_that_answer_as_often_as_they_like() -> None:
    tensor = "data_type: TYPE_FP32 dims: [ 1 ]"
    one = f'input {{ name: "x" {tensor} }} output {{ name: "y" {tensor} }}'
    two = f'input {{ name: "a" {tensor} }} input {{ name: "b" {tensor} }} output {{ name: "y" {tensor} }}'
    inner = ensemble("right", "stream").replace('"t0"', '"x"').replace('"t1"', '"y"')
    models = {
        "left": member(f'name: "left" {one} {STREAM}'),
        "right": member(inner),
        "stream": member(f'name: "stream" {one} {STREAM}'),
        "pass": member(f'name: "pass" {one}'),
        "add": member(f'name: "add" {two}'),
    }
    assert check_graph(parse(JOIN), models) == [
        GraphProblem(
            3,
            "add",
            f"{STEP}[3].input_map",
            'step 3 receives inputs originated from different decoupled models: "L" from step 0, model "left", '
            '"R2" from step 1, model "right"',
        )
    ]
    assert [is_decoupled(name, models) for name in models] == [True, True, True, False, False]
    models["left"] = member(f'name: "left" {one}')
    assert check_graph(parse(JOIN), models) == []


# ------------------------------------------------------------------------------------------------ random graphs


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
        models[config.name] = Member(config, (1, 2))
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


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_valid_graphs_are_accepted(seed: int) -> None:
    assert all_problems(*make_graph(Random(seed))) == []


class Mutated(NamedTuple):
    config: ModelConfig
    models: Models
    path: str
    text: str


Mutation = Callable[[Random, ModelConfig, Models, int], Mutated]


def swap(member: Member, **changes: object) -> Member:
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
    return Mutated(with_step(config, index, step), models, f'{STEP}[{index}].output_map["y0"]', "is made already")


def made_by_nobody(random: Random, config: ModelConfig, models: Models, index: int) -> Mutated:
    output = ModelOutput(name="never", data_type="TYPE_BOOL", dims=(1,))
    path = f"output[{len(config.output)}]"
    return Mutated(replace(config, output=(*config.output, output)), models, path, '"never" is made by no step')


def input_of_nobody(random: Random, config: ModelConfig, models: Models, index: int) -> Mutated:
    spare = ModelInput(name="spare", data_type="TYPE_BOOL", dims=(1,))
    path = f"input[{len(config.input)}]"
    return Mutated(replace(config, input=(*config.input, spare)), models, path, '"spare" is used by no step')


def tensor_of_nobody(random: Random, config: ModelConfig, models: Models, index: int) -> Mutated:
    gone = random.choice(config.output).name
    changed = replace(config, output=tuple(output for output in config.output if output.name != gone))
    return Mutated(changed, models, f"{STEP}[", f'tensor "{gone}" is used by no step')


def taken_from_nowhere(random: Random, config: ModelConfig, models: Models, index: int) -> Mutated:
    step = steps_of(config)[index]
    step = replace(step, input_map={**step.input_map, "x0": "nowhere"})
    path = f'{STEP}[{index}].input_map["x0"]'
    return Mutated(with_step(config, index, step), models, path, '"nowhere" is neither an input nor made by a step')


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
        config, {**models, name: found}, f"{STEP}[{index}].model_name", f"needs this ensemble itself: e -> {name} -> e"
    )


def two_streams(random: Random, config: ModelConfig, models: Models, index: int) -> Mutated:
    """A new step that takes from two new models."""
    stream = ModelConfig(
        name="stream",
        input=(ModelInput(name="x", data_type="TYPE_INVALID", dims=(1,)),),
        output=(ModelOutput(name="y", data_type="TYPE_BOOL", dims=(1,)),),
        model_transaction_policy=ModelTransactionPolicy(decoupled=True),
    )
    models = {**models, "stream": Member(stream, (1,)), "join": Member(None, reason="not here", settled=False)}
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
    @settings(max_examples=15, deadline=None)
    @given(st.integers(0, 2**32))
    def each(seed: int) -> None:
        random = Random(seed)
        config, models = make_graph(random)
        changed = mutation(random, config, models, random.randrange(len(steps_of(config))))
        found = all_problems(changed.config, changed.models)
        assert any(path.startswith(changed.path) and changed.text in text for path, text in found), found

    each()
