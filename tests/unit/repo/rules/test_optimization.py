"""Rules that backends apply when they load a model, and `check` without loading it."""

from __future__ import annotations

import pytest

from shmserve.repo.config.complete import complete
from shmserve.repo.load import parse
from shmserve.repo.rules.optimization import setting_problems

X = 'input { name: "x" data_type: TYPE_FP32 dims: 3 }'
Y = 'output { name: "y" data_type: TYPE_FP32 dims: 3 }'
BOUND = "graph_lower_bound { batch_size: %s }"


def found(text: str, gpus: tuple[int, ...] = (0,)) -> list[str]:
    config = complete(parse(text), "m", gpus=gpus)
    return [f"{problem.path}: {problem.text}" for problem in setting_problems(config)]


def graph(spec: str, rest: str = f"max_batch_size: 8 {X} {Y}", backend: str = "tensorrt") -> str:
    return f'backend: "{backend}" {rest} optimization {{ cuda {{ graphs: true graph_spec {{ {spec} }} }} }}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (graph("batch_size: 8"), ""),
        (graph("batch_size: 9"), "batch_size: batch_size is 9, expected 1 to 8"),
        (graph("batch_size: 9", backend="pytorch"), "batch_size: batch_size is 9, expected 1 to 8"),
        (graph("batch_size: 9", backend="python"), ""),
        (graph("batch_size: 1", f"{X} {Y}"), "batch_size: batch_size is 1, expected 0, as the model has no batch dim"),
        (graph("batch_size: 1", ""), ""),
        (graph('batch_size: 1 input { key: "z" }'), "input: the model has no input z"),
        (graph("batch_size: 4 " + BOUND % 2), ""),
        (
            graph("batch_size: 4 " + BOUND % 5),
            "graph_lower_bound.batch_size: batch_size of graph_lower_bound is 5, exp",
        ),
        (
            graph('batch_size: 4 graph_lower_bound { batch_size: 1 input { key: "x" value { dim: 3 } } }'),
            "graph_lower_bound.input: graph_lower_bound may have a smaller batch, but the dims of input 'x' must be",
        ),
    ],
)
def test_graphs_of_cuda(text: str, expected: str) -> None:
    problems = found(text)
    if expected:
        assert problems[0].startswith(f"optimization.cuda.graph_spec[0].{expected}")
    assert len(problems) == bool(expected)
    assert found(text, gpus=()) == [], "without a GPU, there are no graphs"


def test_accelerators_on_a_gpu() -> None:
    text = (
        'backend: "onnxruntime" optimization { execution_accelerators { gpu_execution_accelerator { name: "xpu" } } }'
    )
    path = "optimization.execution_accelerators.gpu_execution_accelerator[0].name"
    assert found(text) == [f"{path}: unknown Execution Accelerator 'xpu' is requested; known here are tensorrt, cuda"]
    assert found(text, gpus=()) == [], "they have no effect, which is a warning"


def test_accelerators_of_paddle() -> None:
    listed = '{ name: "mkldnn" parameters { key: "speed" value: "1" } } cpu_execution_accelerator { name: "dnnl" }'
    text = f'backend: "paddle" optimization {{ execution_accelerators {{ cpu_execution_accelerator {listed} }} }}'
    path = "optimization.execution_accelerators.cpu_execution_accelerator"
    assert found(text) == [
        f"{path}[0].parameters[\"speed\"]: 'mkldnn' has no parameter 'speed'; it has capacity, cpu_threads, use_int8",
        f"{path}[1].name: unknown Execution Accelerator 'dnnl' is requested; known here are mkldnn, ort",
    ]


@pytest.mark.parametrize("backend", ["llamacpp", "python"])
def test_a_tag_for_training_in_a_template(backend: str) -> None:
    """llama.cpp ignores it; for the others, the gateway renders the template and does not know it."""
    pytest.importorskip("jinja2")
    template = "{% generation %}{{ messages }}{%- endgeneration -%}"
    text = f'backend: "{backend}" parameters {{ key: "chat_template" value {{ string_value: "{template}" }} }}'
    expected = "parameters[\"chat_template\"]: not a Jinja template: line 1: Encountered unknown tag 'generation'."
    assert found(text) == ([] if backend == "llamacpp" else [expected])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}" * 25 + "{% endfor %}" * 25, "too many statically nested blocks"),
        ("{% break %}", "'break' outside loop"),
    ],
)
def test_a_template_that_jinja_reads_and_cannot_compile(template: str, expected: str) -> None:
    pytest.importorskip("jinja2")
    text = f'backend: "python" parameters {{ key: "chat_template" value {{ string_value: "{template}" }} }}'
    assert found(text) == [f'parameters["chat_template"]: not a template that Jinja can run: {expected}']
