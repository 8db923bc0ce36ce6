"""Warm-up: runs the samples of `model_warmup` before the model is reported ready, so that the first requests
do not incur one-time costs.

Invariant: samples take the same path as requests and leave nothing behind. Their outputs are written to separate
arenas, which are not announced to the broker and are closed after warm-up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shmserve.dtypes import FROM_CONFIG, elements
from shmserve.errors import InvalidRequest, from_wire
from shmserve.protocol.messages import Options, Tensor
from shmserve.protocol.worker_messages import Work
from shmserve.shm.mapped import Mapped
from shmserve.shm.strings import decode_bytes
from shmserve.workers.batch.data_files import read_tensor
from shmserve.workers.batch.gather import Gather
from shmserve.workers.batch.scatter import Scatter
from shmserve.workers.batch.specs import controls_of, inputs_of, matches, outputs_of
from shmserve.workers.hidden_tensors import hidden_tensors_of
from shmserve.workers.output_arenas import INTERNAL, Arenas
from shmserve.workers.process.log import log_message
from shmserve.workers.runner import runner_of

if TYPE_CHECKING:
    from pathlib import Path

    from shmserve.repo.config.schema import ModelConfig, ModelWarmup, ModelWarmupInput
    from shmserve.workers.backends.base import BackendModel
    from shmserve.workers.batch.specs import Spec
    from shmserve.workers.model_calls.answer import Trace
    from shmserve.workers.runner import Runner

FOLDER = "warmup"
"""Directory of the data files, below the model's directory."""
RANDOM_BELOW = 100
"""Exclusive upper bound of random integers; small, because the model may use them as indices."""


def warm_up(
    config: ModelConfig, instance: str, folder: Path, model: BackendModel, gather: Gather, limit: int, trace: Trace
) -> None:
    """Runs all samples. Raises a ServeError that names the failed sample and the reason."""
    mapped = Mapped()
    arenas = Arenas(0, None, mapped, limit)
    scatter = Scatter(config.name, outputs_of(config), arenas, mapped, strict=model.strict)
    hidden = hidden_tensors_of(config, folder, model, controls=False)
    if hidden is not None:  # samples provide the sequence controls as inputs
        gather = Gather(config.name, (*inputs_of(config), *controls_of(config)), mapped, model.text)
    runner = runner_of(instance, str(folder), model, gather, scatter, trace, hidden)
    try:
        for number, sample in enumerate(config.model_warmup):
            name = title(sample, number)
            if not sample.batch_size:
                log_message(f"{name} of model '{config.name}' has batch_size 0 and is skipped", "info")
                continue
            work_items = requests_of(name, sample, config, folder, gather.specs)
            _run(name, work_items, max(1, sample.count), config.name, runner)
    finally:
        arenas.close()
        mapped.close()


def _run(name: str, work_items: list[Work], count: int, model: str, runner: Runner[Any]) -> None:
    started = time.monotonic()
    for repetition in range(1, count + 1):
        rows, _, _ = runner.run(work_items)
        for row in rows:
            runner.discard(row)
        failure = next((row.error for row in rows if row.error is not None), None)
        if failure is not None:
            where = f" in run {repetition} of {count}" if count > 1 else ""
            raise from_wire(failure.code, f"{name} of model '{model}' failed{where}: {failure.text}")
    took = (time.monotonic() - started) * 1e3
    log_message(f"{name} of model '{model}' took {took:.1f} ms: {count} run(s) of {len(work_items)} request(s)", "info")


# ------------------------------------------------------------------------------------------ samples


def title(sample: ModelWarmup, number: int) -> str:
    return f"warm-up sample '{sample.name}'" if sample.name else f"warm-up sample number {number}"


def requests_of(name: str, sample: ModelWarmup, config: ModelConfig, folder: Path, specs: Sequence[Spec]) -> list[Work]:
    """Returns the batch of a sample: `batch_size` identical requests of one row each."""
    largest = max(1, config.max_batch_size)
    if sample.batch_size > largest:
        raise InvalidRequest(
            f"{name} of model '{config.name}' has batch_size {sample.batch_size}; max_batch_size is "
            f"{config.max_batch_size}, so it can be {largest} at most"
        )
    known = {spec.name: spec for spec in specs}
    tensors = []
    for key, entry in sample.inputs.items():
        what = f"{name} of model '{config.name}': input '{key}'"
        spec = known.get(key)
        if spec is None:
            raise InvalidRequest(f"{what} is not an input of the model; its inputs are: {', '.join(known)}")
        tensors.append(_tensor(what, entry, spec, folder))
    missing = [spec.name for spec in specs if not spec.optional and spec.name not in sample.inputs]
    if missing:
        raise InvalidRequest(f"{name} of model '{config.name}' lacks input(s) {', '.join(missing)}: all must be given")
    rows = int(config.max_batch_size > 0)
    sequence = config.sequence_batching is not None  # each request is one of its own
    # The data may exceed the limit for inline tensors, because these requests are never encoded.
    work_items = []
    for number in range(1, sample.batch_size + 1):
        options = Options(sequence=number, sequence_start=True, sequence_end=True) if sequence else None
        work_items.append(Work(number, rows, tuple(tensors), None, INTERNAL, options))
    return work_items


def _tensor(what: str, entry: ModelWarmupInput, spec: Spec, folder: Path) -> Tensor:
    if FROM_CONFIG.get(entry.data_type) != spec.dtype:
        raise InvalidRequest(f"{what} has data_type {entry.data_type}; the model's is {spec.dtype}")
    dims = tuple(entry.dims)
    if any(dim < 0 for dim in dims):
        raise InvalidRequest(f"{what} has dims {list(dims)}: all dims of a sample must be known")
    if not matches(dims, spec.dims):
        raise InvalidRequest(
            f"{what} has dims {list(dims)}; the model's are {list(spec.dims)}"
            + (", without the dimension of the batch" if spec.batched else "")
        )
    shape = (1, *dims) if spec.batched else dims
    try:
        data = _data(what, entry, spec, shape, folder)
    except (MemoryError, OverflowError):
        raise InvalidRequest(
            f"{what} with dims {list(dims)} has {elements(dims)} elements, more than memory can hold"
        ) from None
    return Tensor(spec.name, spec.dtype, shape, data)


def _data(what: str, entry: ModelWarmupInput, spec: Spec, shape: tuple[int, ...], folder: Path) -> bytes:
    count = elements(shape)
    name = entry.input_data_file
    if name is not None:
        data = read_tensor(folder, FOLDER, name, f"{what}: file '{name}'", spec, shape)
        if not spec.item:
            decode_bytes(data, shape, f"{what}: file '{name}'")  # raises if they are not these strings
        return data
    if entry.random_data is not None:
        return _random(spec, count)
    if entry.zero_data is not None:
        return bytes(count * (spec.item or 4))  # an empty string is encoded as its length, four zero bytes
    raise InvalidRequest(f"{what} has no data: give zero_data, random_data or input_data_file")


def _random(spec: Spec, count: int) -> bytes:
    """Returns random values, the same at each load; strings are empty. Floats are from 0 to 1."""
    if not spec.item:
        return bytes(4 * count)
    generator = np.random.default_rng(0)
    if spec.dtype == "BOOL":
        return generator.integers(0, 2, count, np.uint8).tobytes()
    if spec.dtype == "BF16":  # the upper half of an FP32
        return (generator.random(count, np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    if spec.dtype in ("FP16", "FP32", "FP64"):
        return generator.random(count, np.float32).astype(spec.numpy).tobytes()
    return generator.integers(0, RANDOM_BELOW, count, np.uint8).astype(spec.numpy).tobytes()
