"""Validation of a completed configuration: every violated rule is reported.

Invariant: a check reports and continues; it never raises and never changes anything. Tensors, instance groups and
general rules are here; `schedulers`, `data` and `padding` have the others. Nothing here parses configuration files, so
that a worker with its own interpreter can use it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from shmserve.dtypes import FROM_CONFIG, ITEM_BYTES
from shmserve.protocol.messages import DIMS, NAME_LENGTH, TENSORS
from shmserve.repo.backends import BACKENDS, MODEL
from shmserve.repo.config.complete import ENGINES, ENSEMBLE, can_complete, complete, is_ensemble, needs_completion
from shmserve.repo.config.outline import escaped
from shmserve.repo.config.problems import ProblemFunction, Report, meant, nearest
from shmserve.repo.config.schema import ModelConfig, ModelInput, ModelInstanceGroup, ModelOutput
from shmserve.repo.config.support import NOT_SUPPORTED
from shmserve.repo.files.safe_paths import MODEL_NAME, NAME_RULE
from shmserve.repo.parameters import INSTANCES, validate_values
from shmserve.repo.rules.data import file_name, uncached, validate_warmup
from shmserve.repo.rules.padding import validate_padding
from shmserve.repo.rules.parameter_rules import validate_scaling, validate_traffic
from shmserve.repo.rules.schedulers import validate_scheduler

PYTHON_NAME = re.compile(r"[^;|&$`<>()\[\]{}\\\"'*?~#!]*")
"""Valid names of Python models: Triton derives a process name from it."""
BAD_STUB_NAME = "Invalid stub name: contains invalid characters"
OTHER_NAMES = {
    "forest": "fil",
    "gguf": "llamacpp",
    "libtorch": "pytorch",
    "lightgbm": "fil",
    "litert": "tflite",
    "llama": "llamacpp",
    "onnx": "onnxruntime",
    "onnxrt": "onnxruntime",
    "ort": "onnxruntime",
    "py": "python",
    "tf": "tensorflow",
    "torch": "pytorch",
    "torchscript": "pytorch",
    "treelite": "fil",
    "trt": "tensorrt",
    "vino": "openvino",
    "xgboost": "fil",
}
"""Other names of engines, which people write for the names of backends."""
_LANGUAGE_MODELS = (
    'only Triton loads its engines; serve the checkpoint that they were made from with backend: "vllm", or its GGUF '
    'file with backend: "llamacpp"'
)
_INSTEAD = {"fastertransformer": _LANGUAGE_MODELS, "tensorrtllm": _LANGUAGE_MODELS, "tensorrt_llm": _LANGUAGE_MODELS}
"""What to use instead of backends that only Triton has."""
GROUP_NAME_LENGTH = NAME_LENGTH - 8
"""Leaves room for the number that an instance's name appends."""
_LARGEST = 2**63 - 1


class HostFacts(NamedTuple):
    """What the server has: backend names and GPU numbers."""

    backends: Collection[str]
    gpus: Collection[int] = ()


def validate(config: ModelConfig, host: HostFacts, problem: ProblemFunction) -> None:
    """Reports every rule that a completed configuration violates."""
    if not MODEL_NAME.fullmatch(config.name):
        problem("name", f'found "{escaped(config.name)}", expected {NAME_RULE}')
    elif config.backend == "python" and not PYTHON_NAME.fullmatch(config.name):
        text = "a Python model's name cannot contain ; | & $ ` < > ( ) [ ] { } \" ' * ? ~ # !"
        problem("name", f'found "{escaped(config.name)}"; {BAD_STUB_NAME}: {text}')
    _engine(config, host, problem)
    _runtime(config, problem)
    if config.max_batch_size < 0:
        problem("max_batch_size", f"found {config.max_batch_size}, expected 0 or more")
    _tensors(config, "input", config.input, problem)
    _tensors(config, "output", config.output, problem)
    _batch_tensors(config, problem)
    _instance_groups(config, host, problem)
    validate_scheduler(config, problem)
    validate_warmup(config, problem)
    validate_values(config, problem)
    validate_padding(config, config.max_batch_size == 0 and needs_completion(config), problem)
    validate_traffic(config, problem)
    validate_scaling(config, problem)
    _others(config, problem)


def verify_completed(config: ModelConfig, *, backends: Collection[str], gpus: Collection[int] = ()) -> ModelConfig:
    """Fills in the defaults of a configuration completed by its model, and validates it. Raises ConfigError with all
    problems.
    """
    config = complete(config, config.name, (), backends, gpus)
    report = Report(f"{config.name}, as completed by the model")
    validate(config, HostFacts(backends, gpus), report.problem)
    report.raise_problems()
    return config


def completion_warnings(written: ModelConfig, final: ModelConfig) -> list[str]:
    """Messages about completed values that the user may not expect."""
    if written.max_batch_size or final.max_batch_size <= 0 or is_ensemble(final) or final.backend == "python":
        # A Python model sets its own max_batch_size.
        return []
    dynamic = written.dynamic_batching is None and final.dynamic_batching is not None
    batched = ", and requests are batched dynamically" if dynamic else ""
    return [
        f"max_batch_size was not given, or 0; the model can batch, so it is set to {final.max_batch_size}{batched}. "
        f"To change it, set max_batch_size in config.pbtxt (1 for no batching), or start the server with "
        f"--backend-config={final.backend},default-max-batch-size=N"
    ]


def _nearest_backend(name: str, available: Collection[str]) -> str | None:
    """The backend that is meant by another name of its engine, by the name of a platform, or by a misspelling."""
    platforms = {engine.platform: engine.backend for engine in ENGINES if engine.platform}
    other = (OTHER_NAMES | platforms).get(name.lower())
    return other if other in available else nearest(name, available)


def _engine(config: ModelConfig, host: HostFacts, problem: ProblemFunction) -> None:
    platforms = [engine.platform for engine in ENGINES if engine.platform]
    if is_ensemble(config):
        if config.backend:
            problem("backend", f'found "{escaped(config.backend)}", but an ensemble has no backend')
        return
    if config.platform and config.platform not in platforms:
        platform = config.platform.lower()
        backend = platform if platform in host.backends else OTHER_NAMES.get(platform)
        hint = f'did you mean backend: "{backend}"?' if backend else meant(config.platform, [*platforms, ENSEMBLE])
        problem("platform", f'found "{escaped(config.platform)}", not a platform; {hint}')
    for engine in ENGINES:
        if engine.platform and engine.platform == config.platform and engine.backend != config.backend:
            text = f'found "{escaped(config.backend)}", but platform "{config.platform}" is backend "{engine.backend}"'
            problem("backend", text)
            return
    if not config.backend:
        if not config.platform:
            files = ", ".join(engine.file for engine in ENGINES if engine.backend in host.backends)
            text = "not given, and no file in the version directory determines it"
            problem("backend", f"{text}; set one of {_listed(host.backends)}, or add one of {files}")
    elif config.backend not in host.backends:
        near = _nearest_backend(config.backend, host.backends)
        hint = f'did you mean "{near}"?' if near else f"it has {_listed(host.backends)}"
        hint = _INSTEAD.get(config.backend.lower(), hint)
        problem("backend", f'found "{escaped(config.backend)}", which this server does not have; {hint}')
    elif not can_complete(config):
        text = f'not given, and backend "{config.backend}" cannot determine it'
        if config.backend == "pytorch":
            text += "; `shmserve init NAME --from FILE` finds it out for a TorchScript file, by running that"
        for field, tensors in (("input", config.input), ("output", config.output)):
            if not tensors:
                problem(field, text)


def _runtime(config: ModelConfig, problem: ProblemFunction) -> None:
    if not config.runtime:
        return
    if config.backend in BACKENDS or not (config.runtime == MODEL or config.runtime.endswith(".so")):
        problem("runtime", f"{NOT_SUPPORTED}only a backend that is not built in loads `{MODEL}` or a library")
    file_name("runtime", config.runtime, problem)


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"


# ------------------------------------------------------------------------------------------------------- tensors


def _tensors(
    config: ModelConfig, field: str, tensors: Sequence[ModelInput | ModelOutput], problem: ProblemFunction
) -> None:
    if len(tensors) > TENSORS:
        problem(field, f"found {len(tensors)}, expected at most {TENSORS}")
    first: dict[str, int] = {}
    for index, tensor in enumerate(tensors):
        path = f"{field}[{index}]"
        _name(path, tensor.name, problem)
        earlier = first.setdefault(tensor.name, index)
        if earlier != index and tensor.name:
            problem(f"{path}.name", f'"{tensor.name}" is already the name of {field}[{earlier}]')
        if tensor.data_type == "TYPE_INVALID":
            problem(f"{path}.data_type", f'"{tensor.name}" has none; expected one of {", ".join(FROM_CONFIG)}')
        _dims(config, path, tensor, problem)
        _reshape(path, tensor, problem)
        if isinstance(tensor, ModelInput) and tensor.format != "FORMAT_NONE" and len(tensor.dims) != 3:
            problem(f"{path}.format", f"{tensor.format} needs 3 dims, found {len(tensor.dims)}")
        if tensor.is_non_linear_format_io and len(tensor.dims) != 3:
            problem(f"{path}.is_non_linear_format_io", f"needs 3 dims, found {len(tensor.dims)}")
        if isinstance(tensor, ModelInput) and tensor.allow_ragged_batch and config.max_batch_size == 0:
            problem(f"{path}.allow_ragged_batch", "needs max_batch_size > 0")
        if isinstance(tensor, ModelOutput):
            file_name(f"{path}.label_filename", tensor.label_filename, problem)


def _name(path: str, name: str, problem: ProblemFunction) -> None:
    if not name:
        problem(f"{path}.name", "not given")
    elif len(name) > NAME_LENGTH:
        problem(f"{path}.name", f"found {len(name)} characters, expected at most {NAME_LENGTH}")
    elif not name.isprintable():
        problem(f"{path}.name", f"{name!a} has non-printable characters")


def _dims(config: ModelConfig, path: str, tensor: ModelInput | ModelOutput, problem: ProblemFunction) -> None:
    limit = DIMS - (1 if config.max_batch_size > 0 else 0)
    if not tensor.dims:
        problem(f"{path}.dims", f'"{tensor.name}" needs at least one dim')
    elif len(tensor.dims) > limit:
        problem(f"{path}.dims", f"found {len(tensor.dims)}, expected at most {limit}")
    size = ITEM_BYTES.get(FROM_CONFIG.get(tensor.data_type, ""), 1) or 1
    for index, dim in enumerate(tensor.dims):
        if dim < 1 and dim != -1:
            problem(f"{path}.dims[{index}]", f"found {dim}, expected 1 or more, or -1 for any size")
        elif dim > 0:
            size *= dim
    if size > _LARGEST:
        problem(f"{path}.dims", f"the fixed dims alone take more than {_LARGEST} bytes")


def _reshape(path: str, tensor: ModelInput | ModelOutput, problem: ProblemFunction) -> None:
    if tensor.reshape is None:
        return
    shape = tensor.reshape.shape
    wrong = [index for index, dim in enumerate(shape) if dim < 1 and dim != -1]
    for index in wrong:
        problem(f"{path}.reshape.shape[{index}]", f"found {shape[index]}, expected 1 or more, or -1 for any size")
    if not shape:
        # Also allowed without batching, so that a scalar can be described.
        if set(tensor.dims) != {1}:
            problem(f"{path}.reshape", "empty; that requires dims of 1")
    elif not wrong and _chunks(shape) != _chunks(tensor.dims):
        text = f"{list(shape)} does not have as many elements as dims {list(tensor.dims)}"
        if -1 in shape or -1 in tensor.dims:
            text += ", between -1s as well"
        problem(f"{path}.reshape", text)


def _chunks(dims: Sequence[int]) -> list[int]:
    """Numbers of elements before, between and after dims of -1."""
    counts = [1]
    for dim in dims:
        if dim == -1:
            counts.append(1)
        else:
            counts[-1] *= dim
    return counts


def _batch_tensors(config: ModelConfig, problem: ProblemFunction) -> None:
    inputs = [tensor.name for tensor in config.input]
    outputs = [tensor.name for tensor in config.output]
    for index, entry in enumerate(config.batch_input):
        path = f"batch_input[{index}]"
        if entry.data_type not in ("TYPE_INT32", "TYPE_FP32"):
            problem(f"{path}.data_type", f"found {entry.data_type}, expected TYPE_INT32 or TYPE_FP32")
        if not entry.target_name:
            problem(f"{path}.target_name", "not given; expected at least one")
        _source(f"{path}.source_input", entry.source_input, inputs, problem)
    used: dict[str, str] = {}
    for index, cut in enumerate(config.batch_output):
        path = f"batch_output[{index}]"
        if not cut.target_name:
            problem(f"{path}.target_name", "not given; expected at least one")
        for place, name in enumerate(cut.target_name):
            target = f"{path}.target_name[{place}]"
            if outputs and name not in outputs:
                problem(target, f'"{name}" is not an output; {meant(name, outputs)}')
            elif used.setdefault(name, target) != target:
                problem(target, f'"{name}" is already used by {used[name]}')
        _source(f"{path}.source_input", cut.source_input, inputs, problem)


def _source(path: str, names: Sequence[str], inputs: Sequence[str], problem: ProblemFunction) -> None:
    if len(names) != 1:
        problem(path, f"found {len(names)}, expected exactly one")
    for index, name in enumerate(names):
        if inputs and name not in inputs:
            problem(f"{path}[{index}]", f'"{name}" is not an input; {meant(name, inputs)}')


# ---------------------------------------------------------------------------------------- instance groups, others


def _instance_groups(config: ModelConfig, host: HostFacts, problem: ProblemFunction) -> None:
    if is_ensemble(config):
        return
    total = sum(max(group.count, 0) * max(1, len(group.gpus)) for group in config.instance_group)
    if total > INSTANCES:
        problem("instance_group", f"{total} instances, each a process; expected at most {INSTANCES}")
    for index, group in enumerate(config.instance_group):
        _instance_group(f"instance_group[{index}]", group, host, problem)


def _instance_group(path: str, group: ModelInstanceGroup, host: HostFacts, problem: ProblemFunction) -> None:
    if group.count < 0:
        problem(f"{path}.count", f"found {group.count}, expected 1 or more")
    if len(group.name) > GROUP_NAME_LENGTH or not group.name.isprintable():
        text = f"found {len(group.name)} characters, expected printable ones, at most {GROUP_NAME_LENGTH}"
        problem(f"{path}.name", text)
    if group.kind in ("KIND_CPU", "KIND_MODEL") and group.gpus:
        problem(f"{path}.gpus", f"{group.kind} has no gpus, found {list(group.gpus)}")
    if group.kind == "KIND_GPU":
        if not host.gpus:
            problem(f"{path}.kind", "KIND_GPU, but this server runs models only on the CPU; use KIND_CPU or KIND_AUTO")
        else:
            for place, gpu in enumerate(group.gpus):
                if gpu not in host.gpus:
                    problem(f"{path}.gpus[{place}]", f"no GPU {gpu}; this machine has {sorted(host.gpus)}")
    for place, profile in enumerate(group.profile):
        if not (profile.isascii() and profile.isdigit()):
            problem(f"{path}.profile[{place}]", f'found "{escaped(profile)}", expected an integer, 0 or more')


def _others(config: ModelConfig, problem: ProblemFunction) -> None:
    if config.decoupled and config.response_cache is not None and config.response_cache.enable:
        problem("response_cache.enable", uncached(config.name, "'decoupled' transaction policy"))
    for index, control in enumerate(config.model_metrics.metric_control if config.model_metrics else ()):
        path = f"model_metrics.metric_control[{index}]"
        if control.metric_identifier is None or not control.metric_identifier.family:
            problem(f"{path}.metric_identifier.family", "not given")
        buckets = control.histogram_options.buckets if control.histogram_options is not None else None
        if buckets is not None and not buckets:
            problem(f"{path}.histogram_options.buckets", "empty; expected at least one")
        elif buckets and not all(math.isfinite(bucket) for bucket in buckets):
            problem(f"{path}.histogram_options.buckets", "expected finite numbers")
    file_name("default_model_filename", config.default_model_filename, problem)
    for capability, name in config.cc_model_filenames.items():
        file_name(f'cc_model_filenames["{capability}"]', name, problem)
    for index, name in enumerate(config.model_operations.op_library_filename if config.model_operations else ()):
        file_name(f"model_operations.op_library_filename[{index}]", name, problem)


def unknown_policies(config: ModelConfig, policies: Collection[str]) -> tuple[str, ...]:
    """Host policies that the model names but the server does not have; these instances may use all cores."""
    named = {group.host_policy for group in config.instance_group if group.host_policy}
    return tuple(sorted(named - set(policies)))
