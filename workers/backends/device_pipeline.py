"""The batches of a backend on its GPU: three streams, and a set of buffers and events for each batch.

Inputs are copied in one stream, the model computes in another, and outputs are copied in a third, so that the copies of
one batch and the computation of another overlap.

Invariants: the computation waits for the copies of its inputs (the event `copied`), and the copies of outputs wait for
the computation (`computed`). The host waits for the last copy (`end`) before anything of the batch is used again: its
buffers, its sources in callers' memory, and the memory that its outputs were copied to.

Outputs are copied to pinned memory: a copy to other memory would block `begin` until the computation has ended. A copy
of inputs from other memory waits at most for earlier copies in its stream.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from shmserve.dtypes import elements
from shmserve.errors import Internal, Unavailable
from shmserve.repo.backends import PINNED_LIMIT
from shmserve.repo.parameters import OVERLAP, RETRY
from shmserve.shm.views import address_of
from shmserve.workers.backends.device_buffers import Feed, Pinned, Staging, pinned_limit
from shmserve.workers.gpu.api import PRIORITIES
from shmserve.workers.process.exit_codes import Exit
from shmserve.workers.process.log import log_message

if TYPE_CHECKING:
    from shmserve.gpu.interface import GpuDevice
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.workers.backends.base import Context
    from shmserve.workers.batch.results import Results
    from shmserve.workers.batch.specs import Spec

Array = np.ndarray[Any, np.dtype[Any]]
SLOTS = 2
end_process = os._exit
"""Called after the device was lost. The broker starts a new process and identifies the request that caused the loss."""


class PipelineOptions(Struct, frozen=True):
    """The settings of a model. `overlap`: batches may overlap. `pinned_bytes`: of callers' memory. `threshold`: see
    Feed."""

    overlap: bool
    pinned_bytes: int
    priority: int = 0
    copy_stream: bool = False
    spin: bool = False
    staged_inputs: bool = True
    staged_outputs: bool = True
    threshold: int = 0


def options_of(config: ModelConfig, context: Context) -> PipelineOptions:
    # A request that has begun early counts as waiting: it is run again if the worker dies.
    overlap = OVERLAP.read(config) and RETRY.read(config)
    pinned_bytes = pinned_limit(context.settings)
    optimization = config.optimization
    if optimization is None:
        return PipelineOptions(overlap, pinned_bytes)
    cuda, pinned_in, pinned_out = optimization.cuda, optimization.input_pinned_memory, optimization.output_pinned_memory
    return PipelineOptions(
        overlap,
        pinned_bytes,
        PRIORITIES[optimization.priority],
        cuda is not None and cuda.output_copy_stream,
        cuda is not None and cuda.busy_wait_events,
        pinned_in is None or pinned_in.enable,
        pinned_out is None or pinned_out.enable,
        optimization.gather_kernel_buffer_threshold,
    )


class DeviceSlot:
    """The buffers and events of one batch. `inputs` and `outputs`: the addresses of the buffers, by the index of the
    tensor; 0: it has none."""

    def __init__(self, cuda: GpuDevice, pinned: Pinned, options: PipelineOptions, number: int, copy_in: int) -> None:
        self.number = number
        self.busy = False
        self.inputs: list[int] = []
        self.outputs: list[int] = []
        self.feed = Feed(cuda, pinned, options.staged_inputs, options.threshold, copy_in)
        self._cuda = cuda
        self._pinned = pinned
        self._stage_all = options.overlap and options.staged_outputs
        """Stage outputs whose final place is not pinned. Without the overlap, nothing waits behind their copies."""
        self._staging = Staging(cuda, options.staged_outputs)
        self._moves: list[tuple[Array, Array]] = []
        """(final place, staging) of outputs whose final place is not pinned."""
        self._sizes: dict[int, int] = {}
        """The bytes of each buffer, by its address."""
        self._fixed: set[int] = set()
        """Buffers that a CUDA graph uses: they stay when a larger one takes their place."""
        self.copied, self.computed = cuda.event(), cuda.event()
        self.end = cuda.event(spin=options.spin)

    def allocate(self, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Allocates buffers of these sizes; 0: none. Raises Unavailable if the GPU has too little memory."""
        for sizes, addresses in ((inputs, self.inputs), (outputs, self.outputs)):
            for index, size in enumerate(sizes):
                addresses.append(0)
                if size:
                    self.grow(addresses, index, size)

    def grow(self, addresses: list[int], index: int, size: int) -> int:
        """Returns the address of a buffer of `inputs` or `outputs` with at least this size."""
        address = addresses[index]
        if address and self._sizes[address] >= size:
            return address
        if address and address not in self._fixed:
            addresses[index] = 0
            del self._sizes[address]
            self._cuda.free(address)
        address = addresses[index] = self._cuda.allocate(size)
        self._sizes[address] = size
        return address

    def fix(self) -> None:
        """A CUDA graph uses the buffers."""
        self._fixed.update(filter(None, (*self.inputs, *self.outputs)))

    def target(self, index: int, spec: Spec, shape: tuple[int, ...], outputs: Results) -> tuple[Array, bool]:
        """Returns where to copy an output: its final place if it is pinned, else staging. True: the output needs no
        `put`, but `move`."""
        if not outputs.direct(index, shape):
            return self._staging.bytes(index, elements(shape) * spec.item).view(spec.numpy).reshape(shape), False
        array = outputs.place(index, shape)
        if self._pinned.ensure(array) or not self._stage_all or not array.nbytes:
            return array, True
        try:
            staged = self._staging.bytes(index, array.nbytes).view(array.dtype).reshape(array.shape)
        except Unavailable as error:
            self._stage_all = False
            log_message(
                f"copies of outputs block the next batch: {error}; set a higher --{PINNED_LIMIT}, so that they need "
                "no staging",
                "warning",
            )
            return array, True
        self._moves.append((array, staged))
        return staged, True

    def move(self) -> None:
        """Copies staged outputs to their final places, after the last copy of the batch."""
        moves, self._moves = self._moves, []
        for place, staged in moves:
            place[...] = staged

    def release(self) -> None:
        """The batch has ended."""
        self._moves.clear()
        self.busy = False

    def close(self) -> None:
        for address in self._sizes:
            self._cuda.free(address)
        self._sizes.clear()
        self._fixed.clear()
        self.inputs, self.outputs = [], []
        self._moves.clear()
        self.feed.close()
        self._staging.close()
        for event in (self.copied, self.computed, self.end):
            self._cuda.destroy_event(event)


class Pipeline:
    """The streams of an instance, and its slots: one, or two if batches overlap."""

    def __init__(self, cuda: GpuDevice, instance: str, options: PipelineOptions) -> None:
        self.cuda = cuda
        self._instance = instance
        self._options = options
        self.pinned = Pinned(cuda, options.pinned_bytes)
        count = 3 if options.overlap else 2 if options.copy_stream else 1
        self._streams = [cuda.stream(options.priority) for _ in range(count)]
        self.compute, self.copy_out, self.copy_in = self._streams[0], self._streams[min(count - 1, 1)], self._streams[0]
        if options.overlap:
            self.copy_in = self._streams[2]
        self.slots: list[DeviceSlot] = []
        self.add_slot()

    def add_slot(self) -> DeviceSlot:
        slot = DeviceSlot(self.cuda, self.pinned, self._options, len(self.slots), self.copy_in)
        self.slots.append(slot)
        return slot

    def overlaps(self, prepare: Callable[[DeviceSlot], None]) -> bool:
        """Adds slots, so that batches can overlap. `prepare` allocates the memory of each. Returns False if the GPU has
        too little memory."""
        if not self._options.overlap:
            return False
        try:
            while len(self.slots) < SLOTS:
                prepare(self.add_slot())
        except Unavailable as error:
            self.slots.pop().close()
            log_message(
                f"model instance '{self._instance}': batches do not overlap, as that needs a second set of buffers: "
                f"{error}; set a lower max_batch_size, or parameter {OVERLAP.name} to false",
                "warning",
            )
            return False
        return True

    # ------------------------------------------------------------------------------------ a batch, in this order

    def take(self) -> DeviceSlot:
        for slot in self.slots:
            if not slot.busy:
                slot.busy = True
                return slot
        raise Internal(f"all {len(self.slots)} sets of buffers are in use by batches that have not ended")

    @contextmanager
    def batch(self) -> Iterator[DeviceSlot]:
        """Gives a free slot to a batch that is queued in the context. If that fails, nothing of it is left on the
        device."""
        slot = self.take()
        try:
            yield slot
        except Exception as error:
            self.failed(error)
            slot.release()
            if isinstance(error, self.cuda.errors):
                raise self.cuda.failure(error) from error
            raise

    def inputs_copied(self, slot: DeviceSlot) -> None:
        """All copies of inputs are queued. The computation, which is queued next, starts after them."""
        if self.copy_in != self.compute:
            self.cuda.record(slot.copied, self.copy_in)
            self.cuda.wait_for(self.compute, slot.copied)

    def computed(self, slot: DeviceSlot) -> None:
        """The computation is queued. The copies of outputs, which are queued next, start after it."""
        if self.copy_out != self.compute:
            self.cuda.record(slot.computed, self.compute)
            self.cuda.wait_for(self.copy_out, slot.computed)

    def copy_to_host(self, target: Array, source: int) -> None:
        if target.nbytes:
            self.cuda.copy(address_of(target), source, target.nbytes, self.cuda.to_host, self.copy_out)

    def ended(self, slot: DeviceSlot) -> None:
        """All copies of outputs are queued."""
        self.cuda.record(slot.end, self.copy_out)

    def failed(self, error: Exception) -> None:
        """Waits for everything on the device, so that memory of a failed batch can be reused. Ends the process if it
        can no longer use the device."""
        cuda = self.cuda
        lost = cuda.lost(error)
        if not lost:
            try:
                for stream in self._streams:
                    cuda.synchronize_stream(stream)
            except cuda.errors as later:
                lost = cuda.lost(later)
                error = later
        if lost:
            log_message(f"model instance '{self._instance}': this process can no longer use the GPU: {error}")
            end_process(Exit.DEVICE_LOST)

    def settle(self) -> None:
        """Waits for batches that have not ended, before what they use is released."""
        if any(slot.busy for slot in self.slots):
            self.cuda.settle()

    def close(self) -> None:
        """Releases resources in the order of their references. Not needed when the process ends."""
        self.settle()
        for slot in self.slots:
            slot.close()
        self.slots = []
        self.pinned.close()
        for stream in self._streams:
            self.cuda.destroy_stream(stream)
        self._streams = []


class DeviceBatch:
    """A batch that is queued. `kept`: what must live until its end, such as the sources of its copies."""

    def __init__(
        self, pipeline: Pipeline, slot: DeviceSlot, outputs: Results, staged: Sequence[tuple[int, Array]], kept: Any
    ):
        """`staged`: outputs by index, in memory of the slot or of the batch."""
        self._pipeline = pipeline
        self._slot = slot
        self._outputs = outputs
        self._staged = staged
        self._kept = kept

    def computed(self) -> bool:
        return self._pipeline.cuda.reached(self._slot.computed)

    def finish(self) -> None:
        cuda = self._pipeline.cuda
        try:
            cuda.synchronize(self._slot.end)
            self._slot.move()
        except cuda.errors as error:
            self._pipeline.failed(error)
            raise cuda.failure(error) from error
        finally:
            self._slot.release()
            self._kept = None
        for index, array in self._staged:
            self._outputs.put(index, array)


class NoComputation:
    """A batch of which no output is requested."""

    def computed(self) -> bool:
        return True

    def finish(self) -> None:
        pass
