"""PyTorch: TorchScript (`model.pt`), torch.export programs and compiled packages (`model.pt2`).

Invariant: on the CPU, the model reads the tensors of requests in place, and its results are copied once, to where they
will be read. Only inputs that a program may write to or keep are copied. On a GPU, `gpu_batches` queues the batches.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from shmserve.dtypes import TO_CONFIG
from shmserve.errors import Internal, InvalidRequest, ModelFailed, Unavailable, Unsupported
from shmserve.workers.backends.base import Backend, Context, OverlappingModel
from shmserve.workers.backends.model_facts import completed, match
from shmserve.workers.backends.parameters import Parameters
from shmserve.workers.backends.pytorch import device
from shmserve.workers.backends.pytorch.programs import DTYPES, Program, arrange, open_program, picker
from shmserve.workers.batch.specs import Spec, model_inputs_of, model_outputs_of
from shmserve.workers.process.device import device_of
from shmserve.workers.process.log import log_message

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.workers.backends.base import Computation, GpuTensor
    from shmserve.workers.backends.device_inputs import DeviceInputs
    from shmserve.workers.backends.pytorch.gpu_batches import GpuBatches
    from shmserve.workers.batch.gather import GatherGroup
    from shmserve.workers.batch.results import Results

Array = np.ndarray[Any, np.dtype[Any]]
_BITS16 = np.dtype(np.int16)


class OpenProgram(NamedTuple):
    program: Program
    place: torch.device


class Torch(Backend):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._opened: OpenProgram | None = None

    def complete(self, config: ModelConfig) -> ModelConfig:
        if config.input and config.output:
            return config
        facts = self._open(config).program.facts()
        if facts is None:
            raise InvalidRequest(
                f"model '{config.name}' needs input and output in its config.pbtxt: a TorchScript file does not "
                "describe their shapes; a torch.export package (model.pt2) does"
            )
        inputs, outputs = ([fact for fact in side if fact is not None] for side in facts)
        return completed(config, inputs, outputs, self.context.default_max_batch("pytorch"))

    def load(self, config: ModelConfig) -> TorchModel:
        opened = self._open(config)
        return TorchModel(self.context, config, *opened, on_gpu=opened.place.type == "cuda")

    def _open(self, config: ModelConfig) -> OpenProgram:
        if self._opened is None:
            path = self.context.model_file(config, "model.pt")
            place = _device(config, self.context.instance)
            self._set_threads(Parameters(config))
            for library in self.context.operator_libraries(config):
                _load(config.name, library)
            self._opened = OpenProgram(open_program(path, place), place)
        return self._opened

    def _set_threads(self, parameters: Parameters) -> None:
        """Called before any computation: the pools cannot be resized afterwards."""
        torch.set_num_threads(parameters.whole("INTRA_OP_THREAD_COUNT", 0) or self.context.engine_threads)
        between = parameters.whole("INTER_OP_THREAD_COUNT", 0)
        if between:
            torch.set_num_interop_threads(between)
        if parameters.text("ENABLE_JIT_EXECUTOR"):
            torch._C._jit_set_profiling_executor(parameters.flag("ENABLE_JIT_EXECUTOR", True))
        if parameters.text("ENABLE_JIT_PROFILING"):
            torch._C._jit_set_profiling_mode(parameters.flag("ENABLE_JIT_PROFILING", True))
        for ineffective in ("ENABLE_NVFUSER", "ENABLE_WEIGHT_SHARING"):
            parameters.flag(ineffective, False)


class TorchModel(OverlappingModel):
    text = True

    def __init__(
        self, context: Context, config: ModelConfig, program: Program, place: torch.device, on_gpu: bool
    ) -> None:
        parameters = Parameters(config)
        self._device = place
        self._inputs = model_inputs_of(config)
        self._outputs = model_outputs_of(config)
        self._leaves = arrange(config.name, program, self._inputs)
        _match(config.name, program, self._leaves, self._inputs)
        self._pick = picker(config.name, program, self._outputs)
        self._call = program.call
        self._names = [spec.name for spec in self._inputs] if program.whole_dict else None
        changed = [argument.changed for argument in program.arguments]
        self._copied = {
            leaf
            for place, leaf in enumerate(self._leaves)
            if leaf is not None and (self._names is not None or changed[place])
        }
        self.on_device = on_gpu
        self._clean = on_gpu and parameters.flag("ENABLE_CACHE_CLEANING", False)
        with _modes(parameters) as modes:
            self._near, self._batches = self._on_gpu(context, config) if on_gpu else (None, None)
            self._modes = modes.pop_all()
        if self._batches is not None:
            self.overlaps = self._batches.overlaps

    def _on_gpu(self, context: Context, config: ModelConfig) -> tuple[DeviceInputs | None, GpuBatches | None]:
        """Returns what reads and writes tensors on the GPU: one at a time, or in queued batches."""
        # Without a GPU, these modules are not imported.
        from shmserve.workers.backends.device_inputs import DeviceInputs
        from shmserve.workers.backends.device_pipeline import Pipeline, options_of
        from shmserve.workers.backends.pytorch.gpu_batches import GpuBatches
        from shmserve.workers.gpu import api

        why = self._not_queued()
        if not why:
            try:
                cuda = api.open_device()
            except (Unavailable, Unsupported) as error:  # CuPy is missing, or needs a newer driver than PyTorch
                why = str(error)
        if why:
            log_message(f"model '{config.name}': batches do not overlap and run without CUDA graphs: {why}")
            return DeviceInputs(), None
        device.settle_all(self._device)  # the streams of the pipeline do not wait for the one that copied the weights
        pipeline = Pipeline(cuda, context.instance, options_of(config, context))
        return None, GpuBatches(pipeline, config, self._device, self._compute, self._array, self._copied)

    def _not_queued(self) -> str:
        strings = [spec.name for spec in (*self._inputs, *self._outputs) if not spec.item]
        if strings:
            return f"{', '.join(strings)}: strings are on the host"
        if self._clean:
            return "ENABLE_CACHE_CLEANING frees memory after each batch"
        if self._device.index:
            return f"the instance uses GPU {self._device.index} of several that its process sees"
        return ""

    def close(self) -> None:
        if self._batches is not None:
            self._batches.close()
        self._modes.close()
        if self._near is not None:
            self._near.close()

    def begin(self, inputs: GatherGroup, outputs: Results) -> Computation:
        assert self._batches is not None
        return self._batches.begin(inputs, outputs)

    def execute(self, inputs: GatherGroup, outputs: Results) -> None:
        if self.on_device:
            self._execute_on_gpu(inputs, outputs)
            return
        tensors = [self._tensor(index, spec, inputs.array(index)) for index, spec in enumerate(self._inputs)]
        inputs.computing()
        for index, value in enumerate(self._compute(tensors)):
            if outputs.needed(index):
                outputs.put(index, self._array(self._outputs[index], value, inputs.rows))

    def _execute_on_gpu(self, inputs: GatherGroup, outputs: Results) -> None:
        if self._near is None:
            super().execute(inputs, outputs)
            return
        with self._near.copies():
            located = [self._near.locate(inputs, index, spec) for index, spec in enumerate(self._inputs)]
        tensors = [self._tensor_of(index, source, inputs) for index, source in enumerate(located)]
        inputs.computing()
        try:
            for index, value in enumerate(self._compute(tensors)):
                if outputs.needed(index) and not self._stays(index, value, outputs):
                    outputs.put(index, self._array(self._outputs[index], value, inputs.rows))
        finally:
            device.settle(self._device)  # also after an error: what is queued reads memory of callers
        if self._clean:
            device.free_cached()

    def _compute(self, tensors: list[Any]) -> list[Any]:
        """Runs the model. Returns its results in the order of the configuration."""
        if self._names is not None:
            named = zip(self._names, tensors, strict=True)
            return self._pick(self._call([{name: tensor for name, tensor in named if tensor is not None}]))
        return self._pick(self._call([None if place is None else tensors[place] for place in self._leaves]))

    def _tensor_of(self, index: int, source: GpuTensor | None, inputs: GatherGroup) -> Any:
        """Returns an input as a tensor over its memory, on the host or the GPU."""
        if source is None:
            return self._tensor(index, self._inputs[index], inputs.array(index))
        tensor = device.over(source.address, source.shape, self._inputs[index], self._device)
        return tensor.clone() if index in self._copied else tensor

    def _stays(self, index: int, value: Any, outputs: Results) -> bool:
        """Copies a result on the GPU to where all its readers want it. Returns False if that is not on this GPU."""
        spec = self._outputs[index]
        if not isinstance(value, torch.Tensor) or value.device.type != self._device.type:
            return False
        if DTYPES.get(value.dtype) != spec.dtype:
            return False  # `put` raises the error
        shape = tuple(value.shape)
        address = outputs.near(index, shape)
        if address is None:
            return False
        device.over(address, shape, spec, self._device).copy_(value.detach())
        return True

    def _tensor(self, index: int, spec: Spec, array: Array | None) -> Any:
        """Returns an input as a tensor: over the memory of the array, or a copy if the program may write to it."""
        if array is None:
            return None
        if not spec.item:
            return array.ravel().tolist()
        if spec.dtype == "BF16":
            tensor = torch.from_numpy(array.view(_BITS16)).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(array)
        if self._device.type != "cpu":
            return tensor.to(self._device)  # a copy, so the program may write to it
        return tensor.clone() if index in self._copied else tensor

    def _array(self, spec: Spec, value: Any, rows: int) -> Array:
        """Returns a result as a host array, after checking its type."""
        if not spec.item:
            return _strings(spec, value, rows)
        if not isinstance(value, torch.Tensor):
            raise ModelFailed(f"output '{spec.name}' is a {type(value).__name__}; expected a tensor")
        dtype = DTYPES.get(value.dtype)
        if dtype != spec.dtype:
            provided = TO_CONFIG.get(dtype or "", str(value.dtype))
            raise Internal(
                f"configuration expects datatype {TO_CONFIG[spec.dtype]} for output '{spec.name}', model provides "
                f"{provided}"
            )
        if value.requires_grad:
            value = value.detach()
        if value.device.type != "cpu":
            value = value.cpu()
        if value.dtype == torch.bfloat16:
            bits: Array = value.view(torch.int16).numpy()
            return bits.view(spec.numpy)
        array: Array = value.resolve_conj().resolve_neg().numpy()
        return array


def _match(model: str, program: Program, leaves: Sequence[int | None], inputs: Sequence[Spec]) -> None:
    """Checks the inputs of the configuration against the file, if the file describes them."""
    facts = program.facts()
    for fact, leaf in zip(facts[0], leaves, strict=True) if facts is not None else ():
        if fact is not None and leaf is not None:
            spec = inputs[leaf]
            match(model, "input", [spec], [fact._replace(name=spec.name)])


def _modes(parameters: Parameters) -> ExitStack:
    """Sets the modes for all computation of this thread, until the result is closed."""
    with warnings.catch_warnings():
        # Use up the warning about tensors over read-only memory, which is issued once per process. It does not
        # apply: inputs that may be written to are copied (`_copied`).
        warnings.simplefilter("ignore", UserWarning)
        fixed = np.zeros(1, np.uint8)
        fixed.flags.writeable = False
        torch.from_numpy(fixed)
    modes = ExitStack()
    torch.backends.cudnn.enabled = not parameters.flag("DISABLE_CUDNN", False)
    if parameters.flag("DISABLE_OPTIMIZED_EXECUTION", False):
        modes.enter_context(torch.jit.optimized_execution(False))
    if parameters.flag("INFERENCE_MODE", True):
        modes.enter_context(torch.inference_mode())
    else:
        modes.enter_context(torch.no_grad())
    return modes


def _load(model: str, library: Path) -> None:
    """Loads a library that registers operators."""
    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise ModelFailed(f"unable to load model '{model}': {library.name}: {error}") from error


def _strings(spec: Spec, value: Any, rows: int) -> Array:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ModelFailed(f"output '{spec.name}' is a {type(value).__name__}; expected a list of strings")
    texts = np.empty(len(value), object)
    texts[:] = value
    shape = spec.expected(rows)
    try:
        return texts.reshape(shape)
    except ValueError:
        raise ModelFailed(
            f"output '{spec.name}' has {len(value)} strings, which do not fill the shape {shape}"
        ) from None


def _device(config: ModelConfig, instance: str) -> torch.device:
    kind, number = device_of(config, instance)
    if kind != "GPU":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise Unsupported(
            f"instance '{instance}' is to run on GPU {number}, and the PyTorch that is installed sees none: it needs "
            "a build of PyTorch with CUDA and a driver; or choose KIND_CPU"
        )
    # With CUDA_VISIBLE_DEVICES, the process sees its GPU as number 0.
    return torch.device("cuda", 0 if torch.cuda.device_count() == 1 else number)
