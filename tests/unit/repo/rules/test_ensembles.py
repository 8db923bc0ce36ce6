"""The graph of an ensemble: what is said of each mistake, and where."""

from __future__ import annotations

import pytest

from shmserve.repo.compile import compile_policy
from shmserve.repo.config.schema import ModelConfig, ModelEnsembling, ModelEnsemblingStep
from shmserve.repo.load import parse
from shmserve.repo.rules.ensembles import GraphProblem, StepModel, check_graph, is_decoupled, way_to


def member(text: str, versions: tuple[int, ...] = (1,), reason: str = "", settled: bool = True) -> StepModel:
    return StepModel(parse(text), versions, reason, settled)


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
            f'{STEP}[1].model_name: model "pipeline" depends on this ensemble: pipeline -> pipeline',
        ),
    ],
)
def test_a_mistake_in_the_ensemble(old: str, new: str, expected: str) -> None:
    assert PIPELINE.count(old) == 1
    assert expected in problems(PIPELINE.replace(old, new))


def test_a_reshape_is_what_steps_see() -> None:
    given = PIPELINE.replace("TYPE_STRING dims: [ 1 ]", "TYPE_STRING dims: [ 1, 1 ] reshape { shape: [ 1 ] }")
    given = given.replace("dims: [ 10 ]", "dims: [ 2, 5 ] reshape { shape: [ 10 ] }")
    assert problems(given) == []
    found = problems(
        given.replace("dims: [ 2, 5 ] reshape { shape: [ 10 ] }", "dims: [ 10 ] reshape { shape: [ 2, 5 ] }")
    )
    assert found == [
        'output[0].dims: output "LABEL" of the ensemble has dims [2, 5], but ensemble tensor "LABEL" '
        '(output "OUT" of step 1, model "classify") has [10]'
    ]


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
    models = {"decode": StepModel(None, reason="it has 2 problems"), "classify": member(CLASSIFY, (2,))}
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
        assert [text for text in texts if "depends on" in text] == [f'model "{way[5]}" depends on this ensemble: {way}']
    config = models["d"].config
    assert config is not None
    assert not any("depends on" in problem.text for problem in check_graph(config, models)), "it is not in the circle"
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
    found = [problem.step for problem in check_graph(config, {"m": StepModel(ModelConfig(name="m"), settled=False)})]
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


ONE = 'input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }'


def _flow(*steps: str, outputs: str, more: str = "") -> str:
    """Steps as "model a->b"; all tensors are alike."""
    told = []
    for step in steps:
        model, _, flow = step.partition(" ")
        reads, _, makes = flow.partition("->")
        maps = f'input_map {{ key: "x" value: "{reads}" }} output_map {{ key: "y" value: "{makes}" }}'
        told.append(f'{{ model_name: "{model}" {maps} }}')
    tensor = "data_type: TYPE_FP32 dims: [ 1 ]"
    given = " ".join(f'output {{ name: "{name}" {tensor} }}' for name in outputs.split())
    return (
        f'name: "e" platform: "ensemble" input {{ name: "a" {tensor} }} {given} '
        f"ensemble_scheduling {{ step [ {', '.join(told)} ] }} {more}"
    )


INNER = _flow("left a->b", outputs="b").replace('"a"', '"x"').replace('"b"', '"y"').replace('"e"', '"inner"')
MANY = {
    "left": member(f'name: "left" {ONE} {STREAM}'),
    "right": member(f'name: "right" {ONE} {STREAM}'),
    "pass": member(f'name: "pass" {ONE}'),
    "inner": member(INNER),
}
BOTH = '"b" from step 0, model "left", "d" from step 1, model "right"'


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (_flow("left a->b", "right b->c", "pass c->d", outputs="b d"), None),
        (_flow("left a->b", "pass a->c", outputs="b c"), None),
        (_flow("inner a->b", "right b->c", outputs="c"), None),
        (
            _flow("left a->b", "right a->c", "pass c->d", outputs="b d"),
            (-1, "", "output", f"the outputs originate from different decoupled models: {BOTH}"),
        ),
        (
            _flow("left a->b", "pass b->c", "left c->d", outputs="d"),
            (2, "left", f"{STEP}[2].model_name", "step 2 needs the output that step 0 is still producing"),
        ),
        (
            _flow("left a->b", "right b->c", "inner c->d", outputs="d"),
            (2, "inner", f"{STEP}[2].model_name", "step 2 needs the output that step 0 is still producing"),
        ),
    ],
)
def test_models_that_answer_many_times(config: str, problem: tuple[int, str, str, str] | None) -> None:
    found = check_graph(parse(config), MANY)
    if problem is None:
        assert found == []
    else:
        assert [(told.step, told.model, told.path) for told in found] == [problem[:3]]
        assert problem[3] in found[0].text


def test_rows_have_one_answer_each() -> None:
    mapped = 'parameters { key: "step[0].map" value { string_value: "a" } }'
    found = check_graph(parse(_flow("left a->b", outputs="b", more=mapped)), MANY)
    text = 'model "left" is decoupled: its responses to rows cannot be combined'
    assert GraphProblem(0, "left", 'parameters["step[0].map"]', text) in found


def test_how_many_answers_may_be_under_way() -> None:
    config = _flow("left a->b", outputs="b")
    assert compile_policy(parse(config), 1).ahead == 0
    assert compile_policy(parse(config.replace("step [", "max_inflight_requests: 3 step [")), 1).ahead == 3
