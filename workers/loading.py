"""Handles Load: turns the order into a model that is ready to run, and the completed configuration to report."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from shmserve.errors import ServeError, Unavailable
from shmserve.protocol.messages import Failure
from shmserve.protocol.worker_messages import Load, Probed
from shmserve.repo.backends import BACKEND_PINS, CUDA_POOL_LIMIT, DIRECTORY, OUTPUT_LIMIT, PINS
from shmserve.repo.config.schema import ModelConfig, decode_config
from shmserve.repo.files.companions import read_labels
from shmserve.repo.storage.snapshot import Look, changed
from shmserve.shm.mapped import DeviceSegments, Mapped
from shmserve.workers.backends.base import Backend, BackendModel, Context
from shmserve.workers.backends.registry import kind_of
from shmserve.workers.batch.gather import Gather
from shmserve.workers.batch.scatter import Scatter
from shmserve.workers.batch.specs import inputs_of, outputs_of
from shmserve.workers.hidden_tensors import hidden_tensors_of
from shmserve.workers.inbox import WorkerInbox
from shmserve.workers.model_calls.answer import Trace
from shmserve.workers.output_arenas import LIMIT_BYTES, Arenas, near_limit
from shmserve.workers.process.device import device_of
from shmserve.workers.process.log import log_traceback, missing_module, public, text_of
from shmserve.workers.runner import Runner, runner_of

if TYPE_CHECKING:
    from shmserve.workers.outbox import Outbox

THREADS = "SHMSERVE_THREADS"
"""The environment variable with the number of threads that an engine may use."""


class LoadedModel(Struct):
    config: ModelConfig
    backend: Backend
    model: BackendModel
    arenas: Arenas
    mapped: Mapped
    runner: Runner[Any]
    inbox: WorkerInbox | None
    """None without a broker."""

    def close(self) -> None:
        """Finalizes the model. May raise the model's own exceptions."""
        try:
            self.model.close()
        finally:
            self.backend.close()


def load(
    order: Load,
    config_bytes: bytes,
    outbox: Outbox | None,
    trace: Trace = log_traceback,
) -> LoadedModel:
    """Loads a model. If that fails, closes the backend and the arenas and raises the error. `trace` is called for
    failed batches. `outbox`: None without a broker. With one, the model can make calls to the server, also while it is
    loading."""
    config = decode_config(config_bytes)
    device = device_of(config, order.instance)
    mapped = Mapped(_open_device if device.kind == "GPU" else None)
    folder = Path(order.model_dir)
    versioned = folder / str(order.version)
    context = Context(order.model, order.version, order.instance, folder, versioned, order.settings, _threads())
    limit = int(order.settings.get(OUTPUT_LIMIT, LIMIT_BYTES))
    pins = _pins(order, config)
    _check_unchanged(pins)
    kind = kind_of(config, context)
    on_gpu = near_limit(order.settings.get(CUDA_POOL_LIMIT, ""), device.number)
    arenas = Arenas(order.owner, outbox, mapped, limit, on_gpu)
    inbox: WorkerInbox | None = None
    if outbox is not None:
        inbox = WorkerInbox(order.owner, outbox.link, outbox, mapped, arenas)
        if kind.asks:
            from shmserve.workers.model_calls.calls import OutgoingCalls  # few backends need it

            calls = OutgoingCalls(outbox, arenas, mapped, outbox.link.fileno(), inbox.read)
            inbox.add(calls.handlers)
            context = replace(context, calls=calls)
    with ExitStack() as undo:
        undo.callback(arenas.close)
        backend = kind(context)
        undo.callback(backend.close)
        if context.auto_complete:
            config = backend.complete(config)
        config = backend.fitted(config)
        inputs, outputs = inputs_of(config), outputs_of(config)
        labels = [read_labels(folder, entry.label_filename) if entry.label_filename else () for entry in config.output]
        model = backend.load(config)
        undo.callback(model.close)
        gather = Gather(order.model, inputs, mapped, model.text, model.on_device, model.stored)
        hidden = hidden_tensors_of(config, folder, model)
        if config.model_warmup:
            from shmserve.workers.warmup import warm_up  # few models need it

            warm_up(config, order.instance, folder, model, gather, limit, trace)
        _check_unchanged(pins)
        undo.pop_all()
    if model.probes and outbox is not None:
        outbox.add(Probed(0, True))
    scatter = Scatter(order.model, outputs, arenas, mapped, labels, context.calls, model.strict)
    runner = runner_of(order.instance, order.model_dir, model, gather, scatter, trace, hidden)
    return LoadedModel(config, backend, model, arenas, mapped, runner, inbox)


def _open_device(mapped: Mapped) -> DeviceSegments:
    from shmserve.workers.gpu.shared import DeviceMemory  # most models run on the CPU

    return DeviceMemory(mapped)


def _pins(order: Load, config: ModelConfig) -> list[tuple[Path, dict[str, Look]]]:
    """Returns, for the directories of the model and its backend, the size, mtime and inode of files that were not
    copied."""
    folders = {PINS: Path(order.model_dir), BACKEND_PINS: Path(order.settings.get(DIRECTORY, "")) / config.backend}
    return [
        (folder, json.loads(Path(order.settings[key]).read_bytes()))
        for key, folder in folders.items()
        if key in order.settings
    ]


def _check_unchanged(pins: list[tuple[Path, dict[str, Look]]]) -> None:
    for folder, looks in pins:
        change = changed(folder, looks)
        if change:
            raise Unavailable(f"{change}; load the model again to serve what is there now")


def _threads() -> int:
    """Returns the number of threads that an engine may use; 0: the engine decides."""
    text = os.environ.get(THREADS, "")
    return int(text) if text.isdecimal() else 0


def load_error(error: Exception, model_dir: str) -> Failure:
    """Converts an error to the reason, for callers, why the model is not served."""
    if isinstance(error, ServeError):
        return Failure(error.code, public(str(error), model_dir))
    if isinstance(error, ModuleNotFoundError):
        return Failure("MODEL_FAILED", public(missing_module(error), model_dir))
    return Failure("MODEL_FAILED", public(f"{type(error).__name__}: {text_of(error)}", model_dir))
