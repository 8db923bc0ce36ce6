"""The public methods and functions of `tritonclient`, each of which has a case.

Both environments import this module, so it contains only names. A test compares them with the package.
"""

from __future__ import annotations

_CLIENT = (
    "close", "get_cuda_shared_memory_status", "get_inference_statistics", "get_log_settings", "get_model_config",
    "get_model_metadata", "get_model_repository_index", "get_server_metadata", "get_system_shared_memory_status",
    "get_trace_settings", "infer", "is_model_ready", "is_server_live", "is_server_ready", "load_model", "plugin",
    "register_cuda_shared_memory", "register_plugin", "register_system_shared_memory", "unload_model",
    "unregister_cuda_shared_memory", "unregister_plugin", "unregister_system_shared_memory", "update_log_settings",
    "update_trace_settings",
)  # fmt: skip
_BODIES = ("generate_request_body", "parse_response_body")

CLIENTS = {
    "http": (*_CLIENT, *_BODIES, "async_infer"),
    "http.aio": (*_CLIENT, *_BODIES),
    "grpc": (*_CLIENT, "async_infer", "start_stream", "async_stream_infer", "stop_stream"),
    "grpc.aio": (*_CLIENT, "stream_infer"),
}
"""Module -> the methods of its InferenceServerClient."""

_INPUT = ("datatype", "name", "set_data_from_numpy", "set_shape", "set_shared_memory", "shape")
_OUTPUT = ("name", "set_shared_memory", "unset_shared_memory")
_RESULT = ("as_numpy", "get_output", "get_response")

CLASSES = {
    "http.InferInput": _INPUT,
    "http.InferRequestedOutput": _OUTPUT,
    "http.InferResult": (*_RESULT, "from_response_body"),
    "http.InferAsyncRequest": ("get_result",),
    "http.auth.BasicAuth": (),
    "grpc.InferInput": _INPUT,
    "grpc.InferRequestedOutput": _OUTPUT,
    "grpc.InferResult": _RESULT,
    "grpc.KeepAliveOptions": (),
    "grpc.CallContext": ("cancel",),
    "grpc.auth.BasicAuth": (),
}
"""Classes of arguments and results of a client -> their methods."""

FUNCTIONS = {
    "utils": (
        "deserialize_bytes_tensor", "np_to_triton_dtype", "raise_error", "serialize_byte_tensor",
        "serialized_byte_size", "triton_to_np_dtype",
    ),
    "utils.shared_memory": (
        "create_shared_memory_region", "destroy_shared_memory_region", "get_contents_as_numpy",
        "mapped_shared_memory_regions", "set_shared_memory_region",
    ),
}  # fmt: skip

METHODS = [f"{face}.{method}" for face, methods in CLIENTS.items() for method in methods]
METHODS += [f"{name}.{method}" for name, methods in CLASSES.items() for method in methods or ("use",)]
METHODS += [f"{module}.{function}" for module, functions in FUNCTIONS.items() for function in functions]
"""The names of the cases."""
