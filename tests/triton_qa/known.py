"""The tests of Triton that fail with shmserve, and why. A test is named by suite, class and method; `*` is any text."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

from tests.triton_qa.runner import Result


@dataclass(frozen=True)
class Known:
    suite: str
    tests: str
    """Patterns, separated by blanks."""
    reason: str
    here: bool = True
    """Whether the tests can run here at all: tests that need a GPU, a C++ backend or another service do not count."""
    sometimes: bool = False
    """The test may also pass: its outcome depends on timing, or on which server of the suite it meets."""


def _cannot(suite: str, tests: str, reason: str) -> Known:
    return Known(suite, tests, reason, here=False)


GPU = "needs a GPU or TensorRT models"
SERVICE = "needs another service: nginx in front of the server"
PRIVATE = "needs internals of Triton: a C++ test backend, a variable that delays its gRPC endpoint, or its log lines"
INSIDE = "runs the unit tests inside of a model, which are counted one by one"

KNOWN: tuple[Known, ...] = (
    _cannot("L0_lifecycle", """
        *.test_dynamic_model_modify *.test_dynamic_file_delete *.test_load_same_model_different_platform
        *.test_multiple_model_repository_control_startup_models *.test_model_repository_index *.test_load_gpu_limit
        *.test_parse_error_model_no_version
    """, GPU),
    _cannot("L0_backend_python/io", """
        *.test_empty_gpu_output *.test_variable_gpu_output *.test_ensemble_io *.test_requested_output_decoupled
    """, GPU),
    _cannot("L0_backend_python/bls", """
        *.test_bls_sequence *.test_bls_tensor_lifecycle *.test_gpu_bls *.test_preferred_memory
        *.test_shm_leak?bls_async?
    """, GPU),
    _cannot("L0_backend_python/bls", "*.test_shm_leak?bls?", INSIDE),
    _cannot("L0_backend_python/custom_metrics", "TestInferShmLeak.*", INSIDE),
    Known("L0_backend_python/custom_metrics", "*.test_metric_lifetime_error",
          "a metric can be used when its MetricFamily object has been deleted, too"),
    _cannot("L0_backend_python/decoupled", "*.test_decoupled_bls", GPU),
    Known("L0_backend_python/decoupled", "*.test_decoupled_bls_ignore_cancel",
          "cancel() of a BLS call ends it at once, whatever the called model still sends"),
    Known("L0_backend_python/parameters", "*.test_setting_float_response_parameters",
          "parameters of responses may also be floats"),
    _cannot("L0_backend_python/restart", "*", PRIVATE),
    Known("L0_iterative_sequence", "*.test_reschedule_error", "a sequence is not idle while one of its requests runs"),
    _cannot("L0_lifecycle", "*.test_concurrent_model_instance_load_sanity", GPU),
    _cannot("L0_lifecycle", "*.test_model_reload_fail *.test_load_new_model_version", PRIVATE),
    Known("L0_lifecycle", "*.test_shutdown_with_live_connection",
          "at a stop, idle connections are closed at once, and new ones are refused"),
    _cannot("L0_model_update", """
        *.test_gpu_instance_update *.test_gpu_cpu_instance_update *.test_instance_name_update
        *.test_instance_signature *.test_*_scheduler_update_with_ongoing_sequences
    """, GPU),
    Known("L0_model_update", "*.test_instance_resource_decrease", PRIVATE, here=False, sometimes=True),
    _cannot("L0_server_status", """
        *.test_model_latest_infer *.test_model_specific_infer *.test_infer_stats_no_model *.test_model_versions_added
    """, GPU),
    _cannot("L0_buffer_attributes", "*", GPU),
    _cannot("L0_libtorch_instance_group_kind_model", "*", GPU),
    _cannot("L0_backend_onnxruntime", "BFloat16Test.*", GPU),
    Known("L0_client_timeout", "*.test_grpc_load_model *.test_grpc_unload_model", PRIVATE, here=False, sometimes=True),
    _cannot("L0_client_timeout", "ClientNonInferTimeoutTest.*", PRIVATE),
    _cannot("L0_sequence_corrid_batcher", "*.test_skip_batch", GPU),
    _cannot("L0_implicit_state", """
        *.test_implicit_state_growable_memory *.test_implicit_state_single_buffer *.test_no_update
    """, PRIVATE),
    Known("L0_implicit_state", """
        *.test_no_implicit_state *.test_wrong_implicit_state_name
    """, PRIVATE, here=False, sometimes=True),
    _cannot("L0_request_cancellation", """
        *_cancellation_at_step_start *_cancellation_before_finish_*
        *_cancellation_before_response_complete_and_process_after_final_response
    """, PRIVATE),
    _cannot("L0_backend_python", "*.test_gpu_tensor_error *.test_dlpack_tensor_error", GPU),
    _cannot("L0_backend_python", "*.test_growth_error", PRIVATE),
    _cannot("L0_http", "*BasicAuth*", SERVICE),
    _cannot("L0_grpc", "*BasicAuth*", SERVICE),
    _cannot("L0_warmup", "*.test_shm_leak* PBBLSONNXWarmupTest.*", GPU),
    _cannot("L0_input_validation", "*.test_wrong_input_shape_tensor_size", GPU),
    _cannot("L0_output_name", "*.test_grpc", GPU),
    _cannot("L0_infer_variable", "*.test_class_fff *.test_class_iii *.test_mix_iii *.test_raw_fff *.test_raw_iii", GPU),
    _cannot("L0_infer_reshape", "*.test_ff2 *.test_ff4", GPU),
    _cannot("L0_metrics", "*.test_pinned_memory_metrics*", GPU),
    _cannot("L0_trace", "*.test_sagemaker_*", "there is no SageMaker endpoint"),
    _cannot("L0_trace", "*.test_custom_backend_tracing*", PRIVATE),
    Known("L0_trace", "*.test_trace_context_exposed_to_pbe",
          "a model gets the trace context of the caller, and none if the caller has sent none"),
    Known("L0_trace", "*.test_grpc_trace_all_input_required_model_cancel",
          "a request that was cancelled while its batch ran has no span `compute`", sometimes=True),
    Known("L0_http", "HttpTest.test_content_encoding_chunked_manually",
          "both Content-Length and Transfer-Encoding are refused: they allow request smuggling (RFC 9112, 6.1)"),
    Known("L0_http", "HttpTest.test_load_oversized_file_parameter",
          "the name of a file in a load call that no file system takes is the caller's mistake: 400, not 500"),
    Known("L0_metrics", "TestCpuMetrics.test_cpu_metrics_during_inference",
          "needs an otherwise idle machine: with all cores busy the utilization stays 1", here=False, sometimes=True),
    Known("L0_input_validation", "*.test_input_string_shape_validation",
          "both inputs of the request are wrong: the first one is reported, and not the first one of a hash table"),
    Known("L0_metrics", "*.test_model_namespacing_label_with_namespace_on",
          "the label `namespace` is the name of the repository's directory, not its path"),
    Known("L0_logging", "TestLogFormat.test_injection*unescaped*",
          "what a request says does not come into the log, so it cannot forge a record, escaped or not"),
    Known("L0_model_queue", "*.test_policy_reject",
          "a failed request of an ensemble counts once in nv_inference_request_failure, and not again for its step"),
    Known("L0_server_status", "*.test_basic",
          "the metadata names the extensions of shared memory only where --allow-client-shm allows them"),
    Known("L0_lifecycle", """
        *.test_concurrent_model_load_unload
        *.test_concurrent_same_model_load_unload_stress
    """, "an unload overtakes a load under way, whose caller is told so", sometimes=True),
    Known("L0_lifecycle", "*.test_parse_error_modelfail*",
          "versions that can be loaded are served, though another version of the model cannot"),
    Known("L0_lifecycle", "*.test_parse_error_no_model_config",
          "a model whose configuration cannot be read keeps the server from being ready"),
    Known("L0_lifecycle", "*.test_multiple_model_repository_polling",
          "mode poll: a model that can no longer be loaded goes on, e.g. after a copy in a second repository"),
    Known("L0_lifecycle", "*.test_model_config_overwite *.test_shutdown_while_background_unloading",
          "a model of backend 'identity' needs inputs and outputs in its configuration"),
    Known("L0_grpc_state_cleanup", "*infer*_shutdownserver *.test_simple_infer_shut*",
          "at a stop, requests sent before the gateway or the client knew of it are answered", sometimes=True),
    _cannot("L0_simple_ensemble", "*.test_ensemble_partial_add_sub", PRIVATE),
    Known("L0_parameters", "*.test_headers",
          "white space around the value of an HTTP header is not part of it (RFC 9110, 5.5)"),
    Known("L0_passive_instance", "*",
          "a backend in C cannot reach the other instances of its model, which are other processes", sometimes=True),
    Known("L0_backend_python", "PythonTest.test_init_args",
          "args['model_repository'] is the version's private copy in the runtime directory"),
    Known("L0_backend_python", "PythonTest.test_bf16",
          "as_numpy() of a BF16 tensor gives an array (of ml_dtypes), and no exception"),
)  # fmt: skip


@cache
def known(result: Result) -> Known | None:
    for one in KNOWN:
        if fnmatchcase(result.suite, one.suite) and any(fnmatchcase(result.test, test) for test in one.tests.split()):
            return one
    return None
