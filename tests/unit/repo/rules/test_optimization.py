"""Rules that backends apply when they load a model, and `check` without loading it."""

from __future__ import annotations

import pytest

from shmserve.repo.config.complete import complete
from shmserve.repo.load import parse
from shmserve.repo.rules.optimization import setting_problems
from tests.support.cases import cases
from tests.support.model_files import parameters

X = 'input { name: "x" data_type: TYPE_FP32 dims: 3 }'
Y = 'output { name: "y" data_type: TYPE_FP32 dims: 3 }'
GPU_GROUP = " instance_group { kind: KIND_GPU }"
BOUND = "graph_lower_bound { batch_size: %s }"


def found(text: str, gpus: tuple[int, ...] = (0,)) -> list[str]:
    config = complete(parse(text), "m", gpus=gpus)
    return [f"{problem.path}: {problem.text}" for problem in setting_problems(config)]


def graph(spec: str, rest: str = f"max_batch_size: 8 {X} {Y}", backend: str = "tensorrt") -> str:
    return f'backend: "{backend}" {rest} optimization {{ cuda {{ graphs: true graph_spec {{ {spec} }} }} }}'


@cases(
    (graph("batch_size: 8"), ""),
    (graph("batch_size: 9"), "batch_size: batch_size is 9, expected 1 to 8"),
    (graph("batch_size: 9", backend="pytorch"), "batch_size: batch_size is 9, expected 1 to 8"),
    (graph("batch_size: 9", backend="python"), ""),
    (graph("batch_size: 1", f"{X} {Y}"), "batch_size: batch_size is 1, expected 0, as the model has no batch dim"),
    (graph("batch_size: 1", ""), ""),
    (graph('batch_size: 1 input { key: "z" }'), "input: the model has no input z"),
    (graph("batch_size: 4 " + BOUND % 2), ""),
    (graph("batch_size: 4 " + BOUND % 5), "graph_lower_bound.batch_size: batch_size of graph_lower_bound is 5, exp"),
    (
        graph('batch_size: 4 graph_lower_bound { batch_size: 1 input { key: "x" value { dim: 3 } } }'),
        "graph_lower_bound.input: graph_lower_bound may have a smaller batch, but the dims of input 'x' must be",
    ),
)
def test_graphs_of_cuda(text: str, expected: str) -> None:
    problems = found(text)
    if expected:
        assert problems[0].startswith(f"optimization.cuda.graph_spec[0].{expected}")
    assert len(problems) == bool(expected)
    assert found(text, gpus=()) == [], "without a GPU, there are no graphs"


def test_accelerators() -> None:
    def listed(backend: str, place: str, text: str) -> str:
        lists = f"{place}_execution_accelerator {text}"
        return f'backend: "{backend}" optimization {{ execution_accelerators {{ {lists} }} }}'

    text = listed("onnxruntime", "gpu", '{ name: "xpu" }')
    path = "optimization.execution_accelerators"
    unknown = "unknown Execution Accelerator"
    assert found(text) == [
        f"{path}.gpu_execution_accelerator[0].name: {unknown} 'xpu' is requested; known here are tensorrt, cuda"
    ]
    assert found(text, gpus=()) == [], "they have no effect, which is a warning"
    (problem,) = found(listed("tensorflow", "gpu", '{ name: "auto_mixed_precision" }') + GPU_GROUP)
    assert problem.startswith(f"{path}.gpu_execution_accelerator[0].name: 'auto_mixed_precision' is not supported")
    for gpus in ((), (0,)):  # PaddlePaddle always runs on the CPU
        (problem,) = found(listed("paddle", "gpu", '{ name: "tensorrt" }'), gpus)
        assert problem.startswith(f"{path}.gpu_execution_accelerator[0].name: 'tensorrt' is not supported")
    both = '[ { name: "mkldnn" parameters { key: "speed" value: "1" } }, { name: "dnnl" }, { name: "ort" } ]'
    place = f"{path}.cpu_execution_accelerator"
    assert found(listed("paddle", "cpu", both)) == [
        f"{place}[0].parameters[\"speed\"]: 'mkldnn' has no parameter 'speed'; it has capacity, cpu_threads, "
        "use_fp16, use_int8",
        f"{place}[1].name: unknown cpu_execution_accelerator name 'dnnl' is provided. Available choices are "
        "[mkldnn, ort]",
        f"{place}[2].name: 'ort' is not supported: packages of PaddlePaddle are built without ONNX Runtime; "
        "leave it out",
    ]
    for backend, name, key, value, expected in (
        ("onnxruntime", "tensorrt", "speed", "1", "unknown parameter 'speed' is provided for TensorRT Execution"),
        ("onnxruntime", "tensorrt", "precision_mode", "FP8", "tensorrt parameter precision_mode must be one of FP32, "),
        ("onnxruntime", "tensorrt", "trt_fp16_enable", "1", ""),
        ("onnxruntime", "CUDA", "device_id", "1", "cuda parameter device_id cannot be given"),
        ("onnxruntime", "cuda", "use_tf32", "2", "cuda parameter use_tf32 must be true or false, not '2'"),
        ("onnxruntime", "openvino", "gpu_external_alloc", "1", "openvino parameter gpu_external_alloc cannot be given"),
        ("paddle", "mkldnn", "capacity", "-1", "the value must be an integer of at least 0, not '-1'"),
        ("paddle", "mkldnn", "use_fp16", "1", ""),
    ):
        place = "cpu" if name in ("openvino", "mkldnn") else "gpu"
        entry = f'{{ name: "{name}" parameters {{ key: "{key}" value: "{value}" }} }}'
        problems = found(listed(backend, place, entry), gpus=() if place == "cpu" else (0,))
        start = f'{path}.{place}_execution_accelerator[0].parameters["{key}"]: {expected}'
        assert [problem[: len(start)] for problem in problems] == ([start] if expected else [])


@cases(
    ("onnxruntime", {"intra_op_thread_count": "many"}, "the value must be an integer of at least 0, not 'many'"),
    ("onnxruntime", {"intra_op_threads_count": "2"}, "unknown to onnxruntime; did you mean 'intra_op_thread_count'?"),
    (
        "onnxruntime",
        {"cpu_mem_limit": "9", "enable_mem_arena": "0"},
        "parameter cpu_mem_limit 9 limits the memory pool, which enable_mem_arena 0 turns off: remove one of the two",
    ),
    ("onnxruntime", {"enable_mem_arena": "0", "session.whatever": "x", "mine": "y"}, ""),
    ("paddle", {"enable_mkldnn": "perhaps"}, "the value must be true or false, not 'perhaps'"),
    ("paddle", {"cpu_threads": "2", "mine": "y"}, ""),
)
def test_parameters_of_engines(backend: str, given: dict[str, str], expected: str) -> None:
    text = f'backend: "{backend}" {parameters(**given)}'
    assert found(text) == ([f'parameters["{next(iter(given))}"]: {expected}'] if expected else [])


def test_templates_that_jinja_cannot_compile() -> None:
    """llama.cpp ignores a tag for training; for the others, the gateway renders the template and does not know it."""
    pytest.importorskip("jinja2")
    training = "{% generation %}{{ messages }}{%- endgeneration -%}"
    nested = "{% for m in messages %}" * 25 + "{% endfor %}" * 25
    for backend, template, expected in (
        ("llamacpp", training, ""),
        ("python", training, "not a Jinja template: line 1: Encountered unknown tag 'generation'."),
        ("python", nested, "not a template that Jinja can run: too many statically nested blocks"),
        ("python", "{% break %}", "not a template that Jinja can run: 'break' outside loop"),
    ):
        text = f'backend: "{backend}" {parameters(chat_template=template)}'
        assert found(text) == ([f'parameters["chat_template"]: {expected}'] if expected else [])
