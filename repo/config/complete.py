"""Completes configurations: defaults, and the inputs and outputs that the model file declares.

Invariant: pure functions from one configuration to the next. Given values are not changed, except that KIND_AUTO
becomes the kind it stands for; invalid values are kept for `rules` to report. Workers use this module too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from shmserve.dtypes import TO_CONFIG
from shmserve.errors import InvalidRequest, Unsupported
from shmserve.repo.config import schema
from shmserve.repo.config.schema import ModelConfig, ModelInput, ModelInstanceGroup, ModelOutput, ModelTensorReshape
from shmserve.repo.gpus import GpuNumbers

ENSEMBLE = "ensemble"
DEFAULT_MAX_BATCH = 4
"""max_batch_size of a model with a dynamic first dimension whose configuration gives none."""
SEQUENCE_IDLE_US = 1_000_000


class BackendFile(NamedTuple):
    """A backend, its older platform name, and the file it expects in a version directory."""

    backend: str
    platform: str
    file: str


TREE_FILES = {
    "xgboost": "xgboost.model",
    "xgboost_json": "xgboost.json",
    "xgboost_ubj": "xgboost.ubj",
    "lightgbm": "model.txt",
    "treelite_checkpoint": "checkpoint.tl",
    "sklearn": "model.joblib",
}
"""Parameter model_type of tree models (backend "fil") -> the file."""
TREE_ROWS = 8192
"""max_batch_size of a tree model whose configuration gives none. A row takes microseconds, so small batches would only
refuse requests with many rows."""
ENGINES = (
    BackendFile("onnxruntime", "onnxruntime_onnx", "model.onnx"),
    BackendFile("python", "", "model.py"),
    BackendFile("tensorrt", "tensorrt_plan", "model.plan"),
    BackendFile("pytorch", "pytorch_libtorch", "model.pt"),
    BackendFile("pytorch", "torch_aoti", "model.pt2"),
    BackendFile("tensorflow", "tensorflow_graphdef", "model.graphdef"),
    BackendFile("tensorflow", "tensorflow_savedmodel", "model.savedmodel"),
    BackendFile("tflite", "", "model.tflite"),
    BackendFile("openvino", "", "model.xml"),
    BackendFile("llamacpp", "", "model.gguf"),
    BackendFile("dali", "", "model.dali"),
    BackendFile("dali", "", "dali.py"),
    BackendFile("paddle", "", "model.pdmodel"),
    *(BackendFile("fil", "", file) for kind, file in TREE_FILES.items() if kind != "sklearn"),
    BackendFile("paddle", "", "model.json"),
)

COMPLETING = frozenset(
    {"dali", "fil", "llamacpp", "onnxruntime", "python", "tensorrt", "tensorflow", "tflite", "openvino", "paddle"}
)
"""Backends that can read inputs and outputs from the model file."""
_Entry = TypeVar("_Entry", ModelInput, ModelOutput)
_BUILT_IN = frozenset({"", "identity", *(engine.backend for engine in ENGINES)})

_NAME_IN_GROUP = 112
"""Length to which a model's name is cut in the names of its groups, so that instance names stay within the limit."""

_TWO_ON_CPU = frozenset({"onnxruntime", "tensorflow"})


class TensorFacts(NamedTuple):
    """A tensor as declared by the model: wire data type, and dims with the batch dimension; -1 is any size."""

    name: str
    dtype: str
    dims: tuple[int, ...]


def is_ensemble(config: ModelConfig) -> bool:
    return config.platform == ENSEMBLE or config.ensemble_scheduling is not None


def can_complete(config: ModelConfig) -> bool:
    """Whether the backend may be able to complete inputs and outputs. A custom backend may."""
    if config.backend == "pytorch":
        return config.default_model_filename.endswith(".pt2")
    return config.backend in COMPLETING or config.backend not in _BUILT_IN


def needs_completion(config: ModelConfig) -> bool:
    """Whether inputs or outputs must be read from the model (complete_from_model)."""
    return can_complete(config) and not (config.input and config.output)


def complete(
    config: ModelConfig,
    name: str,
    files: Collection[str] = (),
    backends: Collection[str] = (),
    gpus: Collection[int] = (),
) -> ModelConfig:
    """Fills in all defaults.

    `files` are the names in the first version directory; `backends` and `gpus` are those of the server.
    """
    config = replace(config, name=config.name or name, version_policy=_version_policy(config.version_policy))
    if is_ensemble(config):
        return config
    config = _engine(config, files, backends)
    return replace(
        _batching(config), instance_group=_instance_groups(config, gpus), optimization=_pinned(config.optimization)
    )


def complete_from_model(
    config: ModelConfig,
    inputs: Sequence[TensorFacts],
    outputs: Sequence[TensorFacts],
    can_batch: bool | None = None,
    default_max_batch: int = DEFAULT_MAX_BATCH,
) -> ModelConfig:
    """Adds what the model declares; unchanged if inputs and outputs are already given.

    Unless `can_batch` is given, the model can batch if the first dimension of every tensor is dynamic. Then that
    dimension is the batch, max_batch_size 0 becomes `default_max_batch`, and dynamic batching is enabled.
    """
    if config.input and config.output:
        return config
    if can_batch is None:
        can_batch = all(tensor.dims and tensor.dims[0] == -1 for tensor in (*inputs, *outputs))
    if can_batch:
        config = _batched(config, default_max_batch)
    elif config.max_batch_size > 0:
        raise InvalidRequest(_cannot_batch(config, inputs, outputs))
    skip = 1 if config.max_batch_size > 0 else 0
    if not config.input:
        config = replace(config, input=tuple(_entry(ModelInput, config, tensor, skip) for tensor in inputs))
    if not config.output:
        config = replace(config, output=tuple(_entry(ModelOutput, config, tensor, skip) for tensor in outputs))
    return config


def _batched(config: ModelConfig, default_max_batch: int) -> ModelConfig:
    if config.max_batch_size == 0:
        config = replace(config, max_batch_size=default_max_batch)
    if config.max_batch_size > 1 and config.dynamic_batching is None and config.sequence_batching is None:
        config = replace(config, dynamic_batching=schema.ModelDynamicBatching())
    return _batching(config)


def _cannot_batch(config: ModelConfig, inputs: Sequence[TensorFacts], outputs: Sequence[TensorFacts]) -> str:
    text = (
        f"autofill failed for model '{config.name}': model does not support batching while non-zero max_batch_size "
        "is specified"
    )
    fixed = next((tensor for tensor in (*inputs, *outputs) if not tensor.dims or tensor.dims[0] != -1), None)
    if fixed is not None:
        dimension = f"is {fixed.dims[0]}" if fixed.dims else "does not exist"
        text += f"; the first dimension of tensor '{fixed.name}' {dimension}, a batch needs -1"
    return f"{text}. Set max_batch_size: 0 (it is {config.max_batch_size})"


def _dims(tensor: TensorFacts, skip: int) -> tuple[tuple[int, ...], ModelTensorReshape | None]:
    dims = tuple(tensor.dims[skip:])
    return (dims, None) if dims else ((1,), ModelTensorReshape())


def _data_type(config: ModelConfig, tensor: TensorFacts) -> schema.DataType:
    known = TO_CONFIG.get(tensor.dtype)
    if known is None:
        raise Unsupported(
            f"model '{config.name}': tensor '{tensor.name}' has the data type {tensor.dtype}, which is not supported"
        )
    data_type: schema.DataType = known  # type: ignore[assignment]
    return data_type


def _entry(kind: type[_Entry], config: ModelConfig, tensor: TensorFacts, skip: int) -> _Entry:
    dims, reshape = _dims(tensor, skip)
    return kind(name=tensor.name, data_type=_data_type(config, tensor), dims=dims, reshape=reshape)


def with_scalars(config: ModelConfig, inputs: Sequence[TensorFacts], outputs: Sequence[TensorFacts]) -> ModelConfig:
    """Maps dims of 1 to a scalar tensor of the model by an empty reshape, as in Triton."""
    if config.max_batch_size > 0:
        return config
    scalars = {tensor.name for tensor in (*inputs, *outputs) if not tensor.dims}
    return replace(
        config,
        input=tuple(_scalar(entry) if entry.name in scalars else entry for entry in config.input),
        output=tuple(_scalar(entry) if entry.name in scalars else entry for entry in config.output),
    )


def _scalar(entry: _Entry) -> _Entry:
    stands_for_one = entry.reshape is None and set(entry.dims) == {1}
    return replace(entry, reshape=ModelTensorReshape()) if stands_for_one else entry


def _version_policy(policy: schema.ModelVersionPolicy | None) -> schema.ModelVersionPolicy:
    if policy is None or (policy.latest is None and policy.all is None and policy.specific is None):
        return schema.ModelVersionPolicy(latest=schema.ModelVersionPolicyLatest(num_versions=1))
    if policy.latest is not None and policy.latest.num_versions == 0:
        return replace(policy, latest=schema.ModelVersionPolicyLatest(num_versions=1))
    return policy


def _engine(config: ModelConfig, files: Collection[str], backends: Collection[str]) -> ModelConfig:
    """Derives backend, platform and default_model_filename from each other, the files, and the model's name."""
    if config.platform:
        engine = next((known for known in ENGINES if known.platform == config.platform), None)
    elif config.backend:
        engine = _engine_of(config, files)
    else:
        engine = next((known for known in ENGINES if known.file in files), None)
        backend = engine.backend if engine else _from_name(config, backends)
        config = replace(config, backend=backend)
        engine = engine or _engine_of(config, files)
    backend = config.backend or (engine.backend if engine else "")
    if engine is None or engine.backend != backend:
        return replace(config, backend=backend)
    return replace(
        config,
        backend=backend,
        platform=config.platform or engine.platform,
        default_model_filename=config.default_model_filename or engine.file,
    )


def _engine_of(config: ModelConfig, files: Collection[str]) -> BackendFile | None:
    same = [known for known in ENGINES if known.backend == config.backend]
    if config.backend == "fil" and "model_type" in config.parameters:
        file = TREE_FILES.get(config.parameters["model_type"].string_value)
        same = [BackendFile("fil", "", file)] if file else same
    return next((known for known in same if known.file in files), same[0] if same else None)


def _from_name(config: ModelConfig, backends: Collection[str]) -> str:
    suffix = config.name.rpartition(".")[2] if "." in config.name else ""
    return suffix if suffix in backends or any(known.backend == suffix for known in ENGINES) else ""


def _batching(config: ModelConfig) -> ModelConfig:
    """Fills in the defaults of the scheduler's block."""
    dynamic, sequence = config.dynamic_batching, config.sequence_batching
    if dynamic is not None and not dynamic.preferred_batch_size and config.max_batch_size > 0:
        return replace(config, dynamic_batching=replace(dynamic, preferred_batch_size=(config.max_batch_size,)))
    if sequence is not None and sequence.max_sequence_idle_microseconds == 0:
        idle = replace(sequence, max_sequence_idle_microseconds=SEQUENCE_IDLE_US)
        return replace(config, sequence_batching=idle)
    return config


def _instance_groups(config: ModelConfig, gpus: Collection[int]) -> tuple[ModelInstanceGroup, ...]:
    groups = config.instance_group or (ModelInstanceGroup(),)
    return tuple(_instance_group(config, group, index, gpus) for index, group in enumerate(groups))


def _instance_group(
    config: ModelConfig, group: ModelInstanceGroup, index: int, gpus: Collection[int]
) -> ModelInstanceGroup:
    if group.kind == "KIND_AUTO":
        able = not (isinstance(gpus, GpuNumbers) and config.backend in gpus.cpu_only)
        if gpus and able and all(gpu in gpus for gpu in group.gpus):
            group = replace(group, kind="KIND_GPU")
        else:
            group = replace(group, kind="KIND_CPU", gpus=())
    if group.kind == "KIND_GPU" and not group.gpus:
        group = replace(group, gpus=tuple(sorted(gpus)))
    default_count = 2 if group.kind == "KIND_CPU" and config.backend in _TWO_ON_CPU else 1
    return replace(
        group, name=group.name or f"{config.name[:_NAME_IN_GROUP]}_{index}", count=group.count or default_count
    )


def _pinned(optimization: schema.ModelOptimizationPolicy | None) -> schema.ModelOptimizationPolicy:
    """Enables pinned staging unless it was turned off."""
    policy = optimization or schema.ModelOptimizationPolicy()
    on = schema.ModelOptimizationPolicyPinnedMemoryBuffer(enable=True)
    return replace(
        policy,
        input_pinned_memory=policy.input_pinned_memory or on,
        output_pinned_memory=policy.output_pinned_memory or on,
    )
