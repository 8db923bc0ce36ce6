"""PyTorch: TorchScript (`model.pt`), torch.export programs and compiled packages (`model.pt2`).

Invariant: the model reads the tensors of requests in place, and its results are copied once, to where they will be
read. Only inputs that a program may write to or keep are copied.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shmserve.dtypes import FROM_CONFIG
from shmserve.errors import Internal, InvalidRequest, ModelFailed, Unsupported
from shmserve.workers.backends.base import Context, StackedBackend
from shmserve.workers.backends.model_facts import completed, match
from shmserve.workers.backends.parameters import Parameters
from shmserve.workers.backends.pytorch import device
from shmserve.workers.backends.pytorch.programs import DTYPES, Program, arrange, open_program, picker
from shmserve.workers.batch.specs import Spec, model_inputs_of, model_outputs_of
from shmserve.workers.process.device import device_of

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.workers.backends.device_inputs import DeviceInputs
    from shmserve.workers.batch.gather import GatherGroup
    from shmserve.workers.batch.results import Results

Array = np.ndarray[Any, np.dtype[Any]]
_CONFIG_TYPES = {wire: name for name, wire in FROM_CONFIG.items()}
_BITS16 = np.dtype(np.int16)


class Torch(StackedBackend):
    text = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._program: Program | None = None
        self._modes = ExitStack()
        self._near: DeviceInputs | None = None

    def complete(self, config: ModelConfig) -> ModelConfig:
        if config.input and config.output:
            return config
        facts = self._open(config).facts()
        if facts is None:
            raise InvalidRequest(
                f"model '{config.name}' needs input and output in its config.pbtxt: a TorchScript file does not say "
                "what shapes it takes; a torch.export package (model.pt2) does"
            )
        inputs, outputs = ([fact for fact in found if fact is not None] for found in facts)
        return completed(config, inputs, outputs)

    def load(self, config: ModelConfig) -> None:
        parameters = Parameters(config)
        self._inputs = model_inputs_of(config)
        self._outputs = model_outputs_of(config)
        program = self._open(config)
        self._leaves = arrange(config.name, program, self._inputs)
        self._match(config.name, program)
        self._pick = picker(config.name, program, self._outputs)
        self._call = program.call
        self._names = [spec.name for spec in self._inputs] if program.whole_dict else None
        changed = [argument.changed for argument in program.arguments]
        self._copied = {
            given
            for place, given in enumerate(self._leaves)
            if given is not None and (self._names is not None or changed[place])
        }
        self._clean = self._device.type == "cuda" and parameters.flag("ENABLE_CACHE_CLEANING", False)
        if self._device.type == "cuda":
            from shmserve.workers.backends.device_inputs import DeviceInputs  # without a GPU it is not imported

            self.on_device, self._near = True, DeviceInputs()
        self._set_modes(parameters)

    def close(self) -> None:
        self._modes.close()
        self._program = None
        near, self._near = self._near, None
        if near is not None:
            near.close()

    # ------------------------------------------------------------------------------------ batches

    def execute(self, inputs: GatherGroup, outputs: Results) -> None:
        tensors = [self._given(index, spec, inputs) for index, spec in enumerate(self._inputs)]
        inputs.computing()
        if self._names is not None:
            leaves: list[Any] = [
                {name: tensor for name, tensor in zip(self._names, tensors, strict=True) if tensor is not None}
            ]
        else:
            leaves = [None if place is None else tensors[place] for place in self._leaves]
        values = self._pick(self._call(leaves))
        try:
            for index, value in enumerate(values):
                if outputs.needed(index) and not (self._near is not None and self._stays(index, value, outputs)):
                    outputs.put(index, self._array(self._outputs[index], value, inputs.rows))
        finally:
            if self._near is not None:
                device.settle(self._device)
        if self._clean:
            torch.cuda.empty_cache()

    def _given(self, index: int, spec: Spec, inputs: GatherGroup) -> Any:
        """Returns an input as a tensor over its memory, on the host or the GPU."""
        there = self._near.locate(inputs, index, spec) if self._near is not None else None
        if there is None:
            return self._tensor(index, spec, inputs.array(index))
        tensor = device.over(there.address, there.shape, spec, self._device)
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
        found = DTYPES.get(value.dtype)
        if found != spec.dtype:
            provided = _CONFIG_TYPES.get(found or "", str(value.dtype))
            raise Internal(
                f"configuration expects datatype {_CONFIG_TYPES[spec.dtype]} for output '{spec.name}', model provides "
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

    # ------------------------------------------------------------------------------------ loading

    def _open(self, config: ModelConfig) -> Program:
        if self._program is None:
            path = self.context.model_file(config, "model.pt")
            self._device = _device(config, self.context.instance)
            self._set_threads(Parameters(config))
            self._program = open_program(path, self._device)
        return self._program

    def _match(self, model: str, program: Program) -> None:
        """Checks the inputs of the configuration against the file, if the file describes them."""
        facts = program.facts()
        for fact, given in zip(facts[0], self._leaves, strict=True) if facts is not None else ():
            if fact is not None and given is not None:
                spec = self._inputs[given]
                match(model, "input", [spec], [fact._replace(name=spec.name)])

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

    def _set_modes(self, parameters: Parameters) -> None:
        """Sets the modes for all computation of this thread, until `close`."""
        with warnings.catch_warnings():
            # Use up the warning about tensors over read-only memory, which is issued once per process. It does not
            # apply: inputs that may be written to are copied (`_copied`).
            warnings.simplefilter("ignore", UserWarning)
            fixed = np.zeros(1, np.uint8)
            fixed.flags.writeable = False
            torch.from_numpy(fixed)
        torch.backends.cudnn.enabled = not parameters.flag("DISABLE_CUDNN", False)
        if parameters.flag("DISABLE_OPTIMIZED_EXECUTION", False):
            self._modes.enter_context(torch.jit.optimized_execution(False))
        if parameters.flag("INFERENCE_MODE", True):
            self._modes.enter_context(torch.inference_mode())
        else:
            self._modes.enter_context(torch.no_grad())


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
