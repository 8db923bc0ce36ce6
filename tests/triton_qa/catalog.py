"""The suites of Triton's repository (qa/L0_*) whose Python tests can run here, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Suite:
    name: str
    """The suite's folder below qa/."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the script reads: backends and variants to run."""
    limit_s: int = 600
    layout: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Directory in the suite's folder -> models to put there: of docs/examples, of `parts`, or of its own models/.
    `simple/1 as simple/2` copies a version."""
    flags: tuple[str, ...] = ()
    """Additional flags for the server."""
    script: str = "test.sh"
    quick: bool = False
    """Whether `--quick` includes it, whose suites take less than three minutes in all on two idle cores."""


SIMPLE = ("simple", "simple_int8", "simple_string", "simple_sequence", "simple_dyna_sequence", "simple_identity")
DECOUPLED = ("repeat_int32", "square_int32")
ENSEMBLES = ("identity_int32", "repeat_square", "sequence_repeat", "fan_repeat", "nested_square", "simple_repeat")
LENIENT = ("--exit-on-error=false", "--strict-readiness=false")
"""With these, a model that differs in shmserve only fails its own tests."""
PYTHON = """
    argument_validation async_execute bls custom_metrics decoupled ensemble io lifecycle logging model_control
    model_readiness parameters python_based_backends request_rescheduling response_sender restart
"""

SUITES = (
    Suite("L0_infer", {"BACKENDS": "onnx python", "ENSEMBLES": "1"}, 900),
    Suite("L0_infer_reshape", {"BACKENDS": "onnx libtorch"}, flags=LENIENT),
    Suite("L0_infer_variable", {"BACKENDS": "onnx libtorch"}, flags=LENIENT),
    Suite("L0_infer_zero", {"BACKENDS": "onnx libtorch"}),
    Suite("L0_http", limit_s=1800, layout={"models": SIMPLE}),
    Suite("L0_grpc", limit_s=900, layout={"models": (*SIMPLE, "repeat_int32")}, quick=True),
    Suite("L0_batcher", {"BACKENDS": "onnx libtorch python"}, 1800),
    Suite("L0_sequence_batcher", {"BACKENDS": "onnx custom python", "ENSEMBLES": "0"}, 3600),
    Suite("L0_dyna_sequence_batcher", {"BACKENDS": "onnx custom"}, 900),
    Suite("L0_sequence_corrid_batcher", {"BACKENDS": "onnx"}),
    Suite("L0_implicit_state", {"BACKENDS": "onnx"}, 1800, flags=LENIENT),
    Suite("L0_dyna_implicit_state", {"BACKENDS": "onnx"}, 900),
    Suite("L0_lifecycle", limit_s=3600),
    *(Suite(f"L0_backend_python/{name}", limit_s=2400) for name in PYTHON.split()),
    Suite("L0_backend_python", flags=LENIENT),
    Suite("L0_decoupled", limit_s=4 * 3600, layout={"models": DECOUPLED, "python_models": (*DECOUPLED, *ENSEMBLES)}),
    Suite("L0_iterative_sequence", quick=True),
    Suite("L0_response_cache"),
    Suite("L0_metrics"),
    Suite("L0_trace", limit_s=1200, layout={"../L0_decoupled/models": DECOUPLED}),
    Suite("L0_parameters", quick=True),
    Suite("L0_input_validation", quick=True),
    Suite("L0_output_validation", quick=True),
    Suite("L0_output_name"),
    Suite("L0_string_io", quick=True),
    Suite("L0_scalar_io", quick=True),
    Suite("L0_shared_memory", limit_s=900, layout={"models": ("simple",)}),
    Suite("L0_warmup"),
    Suite("L0_client_timeout"),
    Suite("L0_client_nobatch", flags=LENIENT, quick=True),
    Suite("L0_rate_limiter"),
    Suite("L0_model_update", limit_s=2400),
    Suite("L0_model_queue"),
    Suite("L0_model_namespacing"),
    Suite("L0_optional_input"),
    Suite("L0_batch_input", {"BACKENDS": "onnx libtorch"}, 900),
    Suite("L0_request_cancellation"),
    Suite("L0_logging"),
    Suite("L0_buffer_attributes"),
    Suite("L0_passive_instance", quick=True),
    Suite("L0_simple_ensemble", layout={"models": ("simple/1", "simple/1 as simple/2")}),
    Suite("L0_server_status", {"SERVER_TIMEOUT": "400"}, 1200, flags=LENIENT),
    Suite("L0_grpc_state_cleanup", layout={"models": ("repeat_int32",)}),
    Suite("L0_backend_onnxruntime"),
    Suite("L0_initializer_as_input", quick=True),
    Suite("L0_libtorch_io_names"),
    Suite("L0_libtorch_shared_weights"),
    Suite("L0_libtorch_instance_group_kind_model"),
)

NO_GPU = "needs a GPU or TensorRT"
CPLUSPLUS = "its tests are C++ programs, or test C++ libraries"
SERVICE = "needs a service of others, or the network"
FUZZ = "takes hours and writes gigabytes; tests/stress/fuzz has such requests"
MEMORY = "needs about 20 GB of memory: it sends tensors of 1.9 and 3 GB, also with gRPC"
CLIENTS = "tests clients, with files of their repository"
IN_PROCESS = "tests Triton's library for use inside of a Python process"
SCRIPT = "its checks are in the shell script: it has no Python tests"
_LEFT_OUT = {
    NO_GPU: """
        L0_compute_capability L0_cuda_graph L0_cuda_shared_memory L0_device_memory_tracker L0_dlpack_multi_gpu
        L0_libtorch_disable_cudnn L0_orca L0_parallel_copy L0_torch_aoti L0_torch_aoti_hstu L0_trt_bf16_dtype
        L0_trt_compat L0_trt_data_dependent_shape L0_trt_dla L0_trt_dynamic_shape L0_trt_error_propagation L0_trt_plugin
        L0_trt_reformat_free L0_trt_shape_tensors
    """,
    CPLUSPLUS: """
        L0_async_work_queue L0_backend_bls L0_backend_output_detail L0_backend_tutorial L0_client_build_variants
        L0_client_memory_growth L0_client_valgrind L0_custom_ops L0_data_compression L0_io L0_memory L0_memory_growth
        L0_batch_custom L0_multi_server L0_query L0_register L0_response_statistics L0_sdk L0_simple_lib
        L0_triton_repo_agent
    """,
    SERVICE: """
        L0_backend_python/env L0_backend_python/examples L0_https L0_long_running_stress L0_mlflow L0_openai
        L0_pytorch_python_runtime L0_sagemaker L0_secure_grpc L0_storage_S3 L0_storage_S3_local
        L0_storage_azure L0_storage_swiftstack L0_vertex_ai
    """,
    MEMORY: "L0_large_payload",
    FUZZ: "L0_http_fuzz",
    CLIENTS: """
        L0_client_java L0_perf_pyclients L0_python_client_unit_tests L0_simple_example L0_simple_go_client
        L0_simple_nodejs_client
    """,
    IN_PROCESS: "L0_python_api",
    SCRIPT: """
        L0_additional_dependency_dirs L0_backend_config L0_backend_python/variants L0_backend_release
        L0_backend_identity L0_cmdline_trace L0_config_json L0_custom_model_config
        L0_java_simple_example L0_json L0_libtorch_inference_mode L0_libtorch_io_types L0_libtorch_optimized_execution
        L0_model_config L0_nan_inf L0_nullchar_string L0_onnx_optimization L0_pinned_memory L0_priority
        L0_repoagent_checksum L0_sequence_stress L0_socket
    """,
}
LEFT_OUT = {name: reason for reason, names in _LEFT_OUT.items() for name in names.split()}
