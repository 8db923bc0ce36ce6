"""The graph of an ensemble and the models of its steps: problems and their places."""

from __future__ import annotations

from typing import Any

from shmserve.repo.compile import compile_policy
from shmserve.repo.config.schema import ModelConfig
from shmserve.repo.load import parse
from shmserve.repo.rules.ensembles import StepModel, check_graph, decoupled_in, dependency_path
from shmserve.repo.rules.schedulers import validate_scheduler
from tests.support.cases import cases


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


def test_errors_in_a_model_of_the_ensemble_are_reported() -> None:
    """Those in the ensemble are in `broken/repository.expected`."""
    assert problems() == []
    dims = f'{STEP}[1].input_map["IN"]: {IN} has dims [4, -1, -1], but {PICTURE} has [3, 224, 224]'
    assert problems(classify=CLASSIFY.replace("[ 3, -1", "[ 4, -1")) == [dims]
    kind = f'{STEP}[1].input_map["IN"]: {IN} is TYPE_FP16, but {PICTURE} is TYPE_FP32'
    assert problems(classify=CLASSIFY.replace('"IN" data_type: TYPE_FP32', '"IN" data_type: TYPE_FP16')) == [kind]
    both = CLASSIFY.replace("[ 3, -1", "[ 4, -1").replace('"IN" data_type: TYPE_FP32', '"IN" data_type: TYPE_FP16')
    assert problems(classify=both) == [kind, dims]


def test_shapes_are_compared_after_the_reshape_and_with_the_batch() -> None:
    given = PIPELINE.replace("TYPE_STRING dims: [ 1 ]", "TYPE_STRING dims: [ 1, 1 ] reshape { shape: [ 1 ] }")
    assert problems(given.replace("dims: [ 10 ]", "dims: [ 2, 5 ] reshape { shape: [ 10 ] }")) == []
    (found,) = problems(given.replace("dims: [ 10 ]", "dims: [ 10 ] reshape { shape: [ 2, 5 ] }"))
    assert found.startswith(
        'output[0].dims: output "LABEL" of the ensemble has dims [2, 5], but ensemble tensor "LABEL"'
    )
    alone = CLASSIFY.replace("max_batch_size: 8", "")
    text = "; with the batch counted in, where there is one, [3, -1] and [-1, 3, 224, 224]"
    assert text in problems(classify=alone.replace("[ 3, -1, -1 ]", "[ 3, -1 ]"))[0]
    batch_counted_in = alone.replace("[ 3, -1, -1 ]", "[ -1, 3, 224, 224 ]").replace("[ 10 ]", "[ -1, 10 ]")
    assert problems(classify=batch_counted_in) == []
    assert problems(classify=batch_counted_in.replace("3, 224", "1, 224")) != []
    assert problems(PIPELINE.replace("max_batch_size: 4", "")) == [], "a batch of one is added"


def test_only_known_facts_of_a_model_are_checked() -> None:
    """A model that is not settled has its configuration completed when it is loaded."""

    def found(classify: str, decode: StepModel = member(DECODE)) -> list[str]:  # noqa: B008 - is not changed
        models = {"decode": decode, "classify": member(classify, (2,), settled=False)}
        return [problem.text for problem in check_graph(parse(PIPELINE), models)]

    assert found('name: "classify"') == []
    partial = 'name: "classify" input { name: "IN" data_type: TYPE_FP32 dims: [ -1, 3 ] }'
    assert found(partial) == [], "its dims may lose the batch dimension"
    assert found(partial.replace("FP32", "FP16")) == [f"{IN} is TYPE_FP16, but {PICTURE} is TYPE_FP32"]
    absent = StepModel(None, reason="it has 2 problems")
    assert found(CLASSIFY, absent) == ['model "decode" cannot be served: it has 2 problems']


ONE = 'input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }'
STREAM = "model_transaction_policy { decoupled: true }"


def flow(name: str, *steps: str, inputs: str = "a", outputs: str, more: str = "") -> str:
    """An ensemble of steps such as "model x=a -> y=b", in which all tensors have the same type."""
    tensors = [("input", tensor) for tensor in inputs.split()] + [("output", tensor) for tensor in outputs.split()]
    text = " ".join(f'{kind} {{ name: "{tensor}" data_type: TYPE_FP32 dims: [ 1 ] }}' for kind, tensor in tensors)
    graph = ""
    for step in steps:
        model, *words = step.split()
        field, maps = "input_map", ""
        for word in words:
            key, _, value = word.partition("=")
            if word == "->":
                field = "output_map"
            else:
                maps += f' {field} {{ key: "{key}" value: "{value}" }}'
        graph += f'step {{ model_name: "{model}"{maps} }} '
    return f'name: "{name}" platform: "ensemble" {text} ensemble_scheduling {{ {graph}{more} }} '


def test_ensembles_that_depend_on_each_other() -> None:
    models = {
        name: member(flow(name, f"{other} x=a -> y=b", outputs="b"))
        for name, other in (("a", "b"), ("b", "c"), ("c", "a"), ("d", "a"))
    }
    circles = {"a": "a -> b -> c -> a", "b": "b -> c -> a -> b", "c": "c -> a -> b -> c", "d": ""}
    for name, circle in circles.items():
        config: Any = models[name].config
        texts = [problem.text for problem in check_graph(config, models) if "depends on" in problem.text]
        assert texts == ([f'model "{circle[5]}" depends on this ensemble: {circle}'] if circle else [])
    assert dependency_path("d", "c", models) == ["d", "a", "b", "c"]
    assert dependency_path("a", "d", models) == []


def test_every_circle_of_steps_is_reported_once() -> None:
    text = PIPELINE.replace('key: "IN" value: "RAW"', 'key: "IN" value: "RAW" } input_map { key: "Z" value: "LABEL"')
    decode = DECODE + 'input { name: "Z" data_type: TYPE_FP32 dims: [ 10 ] }'
    assert problems(text, decode) == [
        f'{STEP}[0].input_map["Z"]: ensemble tensor "LABEL" waits for itself: step 0 needs step 1, which needs step 0'
    ]
    # Cycles 0 <-> 1, 2 -> 2, 3 <-> 4; and step 5, which only waits for the others.
    reads = ("t1", "t0", "t2", "t4", "t3", "t0")
    config = flow("e", *(f"m x={name} -> y=t{index}" for index, name in enumerate(reads)), outputs="t5")
    models = {"m": StepModel(ModelConfig(name="m"), settled=False)}
    assert [problem.step for problem in check_graph(parse(config), models)] == [0, 2, 3]


TWO = ONE.replace('"x"', '"x2"').partition("output")[0] + ONE
MANY = {
    "left": member(f'name: "left" {ONE} {STREAM}'),
    "right": member(f'name: "right" {ONE} {STREAM}'),
    "pass": member(f'name: "pass" {ONE}'),
    "add": member(f'name: "add" {TWO}'),
    "inner": member(flow("inner", "left x=x -> y=y", inputs="x", outputs="y")),
}
STILL = "step 2 needs the output that step 0 is still producing"
BOTH = '"b" from step 0, model "left", "d" from step 1, model '
INPUTS = f'step 3 receives inputs originated from different decoupled models: {BOTH}"inner"'
OUTPUTS = f'the outputs originate from different decoupled models: {BOTH}"right"'


@cases(
    (("left x=a -> y=b", "right x=b -> y=c", "pass x=c -> y=d"), "b d", "", ""),
    (("left x=a -> y=b", "pass x=a -> y=c"), "b c", "", ""),
    (("pass x=c -> y=d", "pass x=b -> y=c", "pass x=a -> y=b"), "d", "", ""),
    (("inner x=a -> y=b", "right x=b -> y=c"), "c", "", ""),
    (("left x=a -> y=b", "pass x=a -> y=c", "pass x=c -> y=d", "add x=b x2=d -> y=e"), "e", "", ""),
    (("left x=a -> y=b", "inner x=a -> y=c", "pass x=c -> y=d", "add x=b x2=d -> y=e"), "e", "3 input_map", INPUTS),
    (("left x=a -> y=b", "right x=a -> y=c", "pass x=c -> y=d"), "b d", "output", OUTPUTS),
    (("left x=a -> y=b", "pass x=b -> y=c", "left x=c -> y=d"), "d", "2 model_name", STILL),
    (("left x=a -> y=b", "right x=b -> y=c", "inner x=c -> y=d"), "d", "2 model_name", STILL),
)
def test_decoupled_models(steps: tuple[str, ...], outputs: str, place: str, text: str) -> None:
    found = check_graph(parse(flow("e", *steps, outputs=outputs)), MANY)
    number, _, field = place.rpartition(" ")
    paths = [f"{STEP}[{number}].{field}" if number else field] if place else []
    assert [entry.path for entry in found] == paths
    assert all(text in entry.text for entry in found)
    assert all((entry.step, entry.model) == (int(number), steps[-1].split()[0]) for entry in found if number)


@cases(
    ("step[0].map", "c", 'step 0 does not read ensemble tensor "c"'),
    ("step[2].map", "a", "no step 2; the steps are 0 to 1"),
    ("step[0].when", "a", 'expected "step[INDEX].map" or "step[INDEX].if"'),
    ("step[0].if", "d", 'ensemble tensor "d" is neither an input nor produced by a step'),
    ("step[0].if", "a", "expected a TYPE_BOOL of one element"),
    ("step[1].map", "b", 'model "left" is decoupled: its responses to rows cannot be combined'),
)
def test_parameters_of_steps(key: str, tensor: str, problem: str) -> None:
    more = f'parameters {{ key: "{key}" value {{ string_value: "{tensor}" }} }}'
    config = parse(flow("e", "pass x=a -> y=b", "left x=b -> y=c", outputs="c") + more)
    found: list[tuple[str, str]] = []
    validate_scheduler(config, lambda path, text: found.append((path, text)))
    found += [(entry.path, entry.text) for entry in check_graph(config, MANY)]
    assert [path for path, _ in found] == [f'parameters["{key}"]']
    assert problem in found[0][1]


def test_decoupled_ensembles() -> None:
    assert [name for name in MANY if decoupled_in(name, MANY)] == ["left", "right", "inner"]
    more = "} response_cache { enable: true "
    assert not check_graph(parse(flow("e", "pass x=a -> y=b", outputs="b", more=more)), MANY)
    (found,) = check_graph(parse(flow("e", "pass x=a -> y=b", "inner x=b -> y=c", outputs="c", more=more)), MANY)
    assert found.path == "response_cache.enable"
    assert found.text.startswith(
        "Response Cache does not currently support model e with 'decoupled' transaction policy"
    )
    assert found.text.endswith('Step 1, model "inner", is decoupled')
    for more, ahead in (("", 0), ("max_inflight_requests: 3", 3)):
        assert compile_policy(parse(flow("e", "left x=a -> y=b", outputs="b", more=more)), 1).ahead == ahead
