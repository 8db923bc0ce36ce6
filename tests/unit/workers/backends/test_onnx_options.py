"""Tests of configurations and the resulting plans, as tables. No engine is needed: a plan has the options that it would
get."""

from __future__ import annotations

from typing import Any

import pytest

from shmserve.errors import InvalidRequest, ServeError, Unsupported
from shmserve.repo.config.schema import (
    ModelConfig,
    ModelInstanceGroup,
    ModelOptimizationPolicy,
    ModelOptimizationPolicyExecutionAccelerators,
    ModelOptimizationPolicyExecutionAcceleratorsAccelerator,
    ModelOptimizationPolicyGraph,
    ModelParameter,
)
from shmserve.workers.backends.onnx.facts import engine_text
from shmserve.workers.backends.onnx.options import SETTINGS, SessionPlan, plan
from shmserve.workers.backends.onnx.providers import (
    CPU,
    CUDA,
    DNNL,
    OPENVINO,
    TENSORRT,
    XNNPACK,
)
from shmserve.workers.process.device import device_of, visible_number
from tests.support.cases import cases

ALL = (TENSORRT, CUDA, OPENVINO, XNNPACK, DNNL, CPU)
Accelerator = ModelOptimizationPolicyExecutionAcceleratorsAccelerator


def options(text: str) -> dict[str, str]:
    """ "a=1 b=2" as a dict."""
    return dict(word.split("=", 1) for word in text.split())


def accelerators(text: str) -> tuple[Any, ...]:
    """ "cuda a=1 | tensorrt b=2" as entries of the configuration."""
    entries = (entry.partition(" ") for entry in text.split(" | ") if entry)
    return tuple(Accelerator(name, options(rest)) for name, _, rest in entries)


def config(
    parameters: dict[str, str] | str = "", *, gpu: str | Any = "", cpu: str = "", level: int | None = None
) -> ModelConfig:
    given = options(parameters) if isinstance(parameters, str) else parameters
    listed = ModelOptimizationPolicyExecutionAccelerators(
        gpu_execution_accelerator=accelerators(gpu) if isinstance(gpu, str) else gpu,
        cpu_execution_accelerator=accelerators(cpu),
    )
    return ModelConfig(
        name="m",
        parameters={key: ModelParameter(string_value=value) for key, value in given.items()},
        optimization=ModelOptimizationPolicy(
            execution_accelerators=listed, graph=None if level is None else ModelOptimizationPolicyGraph(level=level)
        ),
    )


def planned(
    wanted: ModelConfig,
    kind: str = "KIND_CPU",
    *,
    device: int = 0,
    available: tuple[str, ...] = ALL,
    settings: dict[str, str] | None = None,
) -> SessionPlan:
    return plan(wanted, kind, device, available, 3, lambda key: (settings or {}).get(key, ""))


def test_defaults_without_any_parameter() -> None:
    found = planned(ModelConfig(name="m"))
    assert found.providers == ((CPU, {}),)
    assert found.attributes == DEFAULTS
    assert found.entries == {"session.intra_op.allow_spinning": "0", "session.inter_op.allow_spinning": "0"}
    assert (found.required, found.run, found.pool, found.arena, found.notes) == ((), {}, None, None, ())
    assert found.on_host
    assert not found.captures


DEFAULTS: dict[str, Any] = {
    "intra_op_num_threads": 3, "inter_op_num_threads": 0, "execution_mode": "ORT_SEQUENTIAL",
    "enable_cpu_mem_arena": 1, "enable_mem_pattern": 1, "graph_optimization_level": "ORT_ENABLE_ALL",
}  # fmt: skip


@cases(
    (config("intra_op_thread_count=2"), {"intra_op_num_threads": 2}),
    (config("intra_op_thread_count=0 enable_mem_arena=true execution_mode=0"), {}),
    (config("inter_op_thread_count=4"), {"inter_op_num_threads": 4}),
    (config("execution_mode=1"), {"execution_mode": "ORT_PARALLEL", "enable_mem_pattern": 0}),
    (config("enable_mem_arena=0"), {"enable_cpu_mem_arena": 0}),
    (config("enable_mem_pattern=0"), {"enable_mem_pattern": 0}),
    (config(level=-1), {"graph_optimization_level": "ORT_ENABLE_BASIC"}),
    (config(level=0), {}),
    (config(level=1), {"graph_optimization_level": "ORT_ENABLE_EXTENDED"}),
    (config(level=2), {"graph_optimization_level": "ORT_DISABLE_ALL"}),
)
def test_attributes_of_the_session(given: ModelConfig, changed: dict[str, Any]) -> None:
    assert planned(given).attributes == DEFAULTS | changed


def test_session_entries_are_passed_on_and_take_precedence() -> None:
    given = "session.intra_op.allow_spinning=1 session.disable_prepacking=1"
    expected = options(f"session.inter_op.allow_spinning=0 {given}")
    assert planned(config(f"{given} other=x")).entries == expected


def test_server_settings_are_defaults_for_models() -> None:
    settings = options("intra_op_thread_count=5 inter_op_thread_count=6")
    found = planned(config("intra_op_thread_count=2"), settings=settings)
    assert (found.attributes["intra_op_num_threads"], found.attributes["inter_op_num_threads"]) == (2, 6)
    found = planned(config(), settings=settings | {"enable-global-threadpool": "true"})
    assert found.pool == (5, 6)
    assert found.attributes["use_per_session_threads"] == 0


@pytest.mark.parametrize(("more", "strategy"), [("", 0), (" arena_extend_strategy=kSameAsRequested", 1)])
def test_the_limit_of_host_memory(more: str, strategy: int) -> None:
    found = planned(config(f"cpu_mem_limit=1048576{more}"))
    assert found.arena == {"max_mem": 1 << 20, "arena_extend_strategy": strategy}
    assert found.entries["session.use_env_allocators"] == "1"


@cases(
    ("KIND_CPU", "cpu:0", "cpu:0"),
    ("KIND_CPU", "gpu:0; cpu:0", "cpu:0"),
    ("KIND_CPU", "gpu:0", None),
    ("KIND_GPU", "gpu:0;cpu:0", "cpu:0;gpu:2"),
    ("KIND_GPU", "gpu:0;gpu:1", "gpu:2"),
)
def test_only_arenas_of_the_device_of_the_instance_shrink(kind: str, text: str, run: str | None) -> None:
    key = "memory.enable_memory_arena_shrinkage"
    assert planned(config({key: text}), kind, device=2).run.get(key) == run


NEW = "trt_profile_min_shapes=x:1x3x8x8,y:1 trt_some_new_option=7"
INT8 = "precision_mode=int8 int8_calibration_table_name=t int8_use_native_calibration_table=True"
TRT_INT8 = "trt_int8_enable=1 trt_int8_calibration_table_name=t trt_int8_use_native_calibration_table=1"


OLD = "arena_extend_strategy=1 cudnn_conv_algo_search=1"
OLD_NAMES = "arena_extend_strategy=kSameAsRequested cudnn_conv_algo_search=HEURISTIC do_copy_in_default_stream=1"


@cases(
    ("", "", [(CUDA, "")]),
    ("", f"gpu_mem_limit=1000 {OLD} do_copy_in_default_stream=1", [(CUDA, f"gpu_mem_limit=1000 {OLD_NAMES}")]),
    ("", "cudnn_conv_use_max_workspace=0", [(CUDA, "cudnn_conv_use_max_workspace=0")]),
    (
        "cuda cudnn_conv_algo_search=default use_tf32=false some_new_option=x",
        "cudnn_conv_algo_search=0",
        [(CUDA, "cudnn_conv_algo_search=DEFAULT use_tf32=0 some_new_option=x")],
    ),
    (
        "tensorrt precision_mode=FP16 max_workspace_size_bytes=1073741824",
        "",
        [(TENSORRT, "trt_fp16_enable=1 trt_max_workspace_size=1073741824"), (CUDA, "")],
    ),
    (
        f"CUDA prefer_nhwc=1 | TensorRT {INT8} trt_engine_cache_enable=true {NEW}",
        "",
        [(TENSORRT, f"{TRT_INT8} trt_engine_cache_enable=1 {NEW}"), (CUDA, "prefer_nhwc=1")],
    ),
    ("tensorrt precision_mode=FP32", "", [(TENSORRT, ""), (CUDA, "")]),
    ids=["nothing", "old parameters", "workspace", "cuda", "tensorrt", "both", "FP32"],
)
def test_providers_on_a_gpu(gpu: str, parameters: str, expected: list[tuple[str, str]]) -> None:
    found = planned(config(parameters, gpu=gpu, cpu="openvino"), "KIND_GPU", device=2)
    assert found.providers == (*((name, {"device_id": "2"} | options(text)) for name, text in expected), (CPU, {}))
    assert found.required == tuple(name for name, _ in expected)
    assert not found.on_host


@cases(
    ("openvino", OPENVINO, "device_type=CPU num_of_threads=3 precision=FP32", 3),
    ("xnnpack", XNNPACK, "intra_op_num_threads=3 precision=FP32", 1),
    ("dnnl", DNNL, "precision=FP32", 3),
)
def test_providers_on_the_cpu(cpu: str, name: str, expected: str, threads: int) -> None:
    found = planned(config(cpu=f"{cpu} precision=FP32", gpu="tensorrt"))
    assert found.providers == ((name, options(expected)), (CPU, {}))
    assert found.required == (name,)
    assert found.attributes["intra_op_num_threads"] == threads
    assert found.on_host


@pytest.mark.parametrize(
    ("gpu", "captures"),
    [("cuda enable_cuda_graph=1", 1), ("tensorrt trt_cuda_graph_enable=True", 1), ("cuda enable_cuda_graph=0", 0)],
)
def test_cuda_graphs(gpu: str, captures: bool) -> None:
    """Ordinary runs are not recorded."""
    found = planned(config(gpu=gpu), "KIND_GPU")
    assert found.captures == captures
    assert found.run == ({"gpu_graph_id": "-1"} if captures else {})


def test_kind_auto_uses_the_gpu_if_the_engine_supports_it() -> None:
    found = planned(config(), "KIND_AUTO")
    assert [name for name, _ in found.providers] == [CUDA, CPU]
    assert found.required == ()
    assert planned(config(), "KIND_AUTO", available=(CPU,)).providers == ((CPU, {}),)


@pytest.mark.parametrize("kind", ["KIND_CPU", "KIND_GPU"])
@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ("intra_op_thread_count=many", "parameter intra_op_thread_count must be an integer of at least 0, not"),
        ("intra_op_thread_count=5000", "parameter intra_op_thread_count is 5000; it can be 0 to 1024"),
        (f"gpu_mem_limit={'9' * 40}", "it can be 0 to 9223372036854775807"),
        ("execution_mode=2", "parameter execution_mode must be one of 0, 1, not '2'"),
        ("enable_mem_arena=maybe", "parameter enable_mem_arena must be true or false, not 'maybe'"),
        ("cudnn_conv_algo_search=3", r"one of 0 \(EXHAUSTIVE\), 1 \(HEURISTIC\), 2 \(DEFAULT\), not '3'"),
        ("arena_extend_strategy=x", r"0 \(kNextPowerOfTwo\), 1 \(kSameAsRequested\)"),
        ("memory.enable_memory_arena_shrinkage=cpu", "must be devices like 'gpu:0;cpu:0', not 'cpu'"),
        ("memory.enable_memory_arena_shrinkage=cpu:0 enable_mem_arena=0", "which enable_mem_arena 0 turns"),
    ],
)
def test_invalid_parameters_are_refused(kind: str, parameters: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        planned(config(parameters), kind)


ONLY_CPU = ("AzureExecutionProvider", CPU)


@cases(
    ("GPU", config(gpu="openvino"), ALL, "unknown Execution Accelerator 'openvino' is .*; known here are tensor"),
    ("GPU", config(gpu="tensorrt max_workspace_size_bytes=x"), ALL, "parameter max_workspace_size_bytes must be a"),
    ("GPU", config(gpu="tensorrt trt_builder_optimization_level=6"), ALL, "it can be 0 to 5"),
    ("GPU", config(gpu="tensorrt trt_profile_opt_shapes=1x3"), ALL, "must be shapes like"),
    ("GPU", config(gpu="tensorrt trt_onnx_bytestream=1"), ALL, "it is an address in the process"),
    ("GPU", config(gpu="cuda user_compute_stream=1"), ALL, "it is an address in the process"),
    ("GPU", config(gpu="cuda | cuda"), ALL, "requested twice"),
    ("CPU", config(cpu="cuda"), ALL, "'cuda' is requested; known here are openvino"),
    ("CPU", config(level=-2), ALL, "optimization.graph.level -2 is not one of"),
    ("CPU", config(level=3), ALL, "optimization.graph.level 3 is not one of"),
    (
        "GPU",
        config(),
        ONLY_CPU,
        "KIND_GPU needs CUDAExecutionProvider, and the onnxruntime that is .* has only "
        "CPUExecutionProvider: pip install onnxruntime-gpu in place of onnxruntime",
    ),
    ("GPU", config(gpu="tensorrt"), ONLY_CPU, "needs TensorrtExecutionProvider.*onnxruntime-gpu.*tensorrt"),
    ("CPU", config(cpu="openvino"), ONLY_CPU, "it needs OpenVINOExecutionProvider.*onnxruntime-openvino"),
    ("CPU", config(cpu="xnnpack"), ONLY_CPU, "needs XnnpackExecutionProvider.*needs a build of onnxruntime"),
)
def test_accelerators_and_levels_are_refused(
    kind: str, given: ModelConfig, available: tuple[str, ...], text: str
) -> None:
    with pytest.raises(InvalidRequest if available is ALL else Unsupported, match=text):
        planned(given, f"KIND_{kind}", available=available)


@pytest.mark.parametrize("key", SETTINGS)
def test_invalid_settings_are_refused(key: str) -> None:
    with pytest.raises(ServeError, match=f"--backend-config onnxruntime,{key} must be"):
        planned(config(), settings={key: "?"})


def test_a_misspelt_parameter_is_noted() -> None:
    found = planned(config("intra_op_thread_coun=1 my_own=x session.x=1"))
    assert len(found.notes) == 1
    assert "did you mean 'intra_op_thread_count'?" in found.notes[0]


def test_the_device_of_an_instance() -> None:
    groups = (
        ModelInstanceGroup(name="a", kind="KIND_GPU", gpus=(2, 5), count=2),
        ModelInstanceGroup(name="b", kind="KIND_CPU", count=1),
        ModelInstanceGroup(name="c", kind="KIND_MODEL", count=1),
    )
    grouped = ModelConfig(name="m", instance_group=groups)
    found = [device_of(grouped, name) for name in ("a_0", "a_1", "a_2", "a_3", "b_0", "b_1", "x", "a_?", "c_0")]
    places = [(f"KIND_{kind}", number) for kind, number in found]
    assert places == [("KIND_GPU", n) for n in (2, 2, 5, 5)] + [("KIND_CPU", 0)] * 4 + [("KIND_MODEL", 0)]


@pytest.mark.parametrize(("variable", "number"), [("", 3), ("0,1,2,3", 3), ("GPU-5f2c", 0), ("7", 0), ("7, ", 0)])
def test_a_process_that_sees_one_device_only(variable: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_number(3) == number


ARENA = "/src/onnxruntime/core/bfc_arena.cc:360 void* onnxruntime::BFCArena::Allocate(size_t, bool)"


@cases(
    ("[ONNXRuntimeError] : 1 : FAIL : Load failed", "[ONNXRuntimeError] : 1 : FAIL : Load failed"),
    (f"Status Message: {ARENA} Available memory of 5\n", "Status Message: Available memory of 5"),
    ("/build/a.cc:10 std::shared_ptr<T> f(const A&, const B&) Invalid OpenVINO option", "Invalid OpenVINO option"),
)
def test_error_texts_of_the_engine_are_shortened(text: str, expected: str) -> None:
    assert engine_text(RuntimeError(text)) == expected
