"""A minimal broker: starts one real worker process, sends it orders over a socketpair and reads its reports.

It only knows what the worker reports. Timeouts only end failing tests.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from shmserve.dtypes import from_numpy, to_numpy
from shmserve.protocol import codec, worker_messages
from shmserve.protocol.messages import INLINE_BYTES, Failure, Handle, Map, Options, Tensor, Unmap, Wanted
from shmserve.repo.config.schema import (
    ModelConfig,
    ModelInput,
    ModelOutput,
    ModelParameter,
    decode_config,
    encode_config,
)
from shmserve.shm.arena import Arena, Segment
from shmserve.shm.extents import memfd
from shmserve.shm.mapped import Mapped
from shmserve.shm.strings import decode_bytes, encode_bytes
from tests.support.patience import PATIENCE_S

CLIENT = 1
WORKER = 7

Array = np.ndarray[Any, np.dtype[Any]]
Report = TypeVar("Report")


class WorkerProcess:
    """One worker. As a context manager, it is stopped at the end and must exit with status 0."""

    def __init__(
        self,
        config: ModelConfig,
        folder: Path,
        *,
        settings: dict[str, str] | None = None,
        cpus: str = "",
        instance: str = "m_0_0",
        packages: str = "",
    ) -> None:
        """`packages`: a directory that precedes all others on the import path."""
        self.codec = codec.Codec(worker_messages.WorkerReport)
        self.reports: deque[tuple[Any, int | None]] = deque()
        self.mapped = Mapped()
        self.maps: list[Map] = []
        self.unread: list[int] = []
        """Requests for whose callers the model has waited."""
        self.arena = Arena(CLIENT, memfd.create, limit_bytes=1 << 30, announce=self._announce)
        self._owned = ExitStack()
        self.stderr = self._owned.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 (close does it)
        self.number = 0
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(PATIENCE_S)
        command = [sys.executable, "-m", "shmserve.workers.main", "--link", str(theirs.fileno()), "--name", instance]
        if cpus:
            command += ["--cpus", cpus]
        places = os.pathsep.join(filter(None, (packages, os.environ.get("PYTHONPATH", ""))))
        self.process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # the worker redirects it to stderr
            stderr=self.stderr,
            env=os.environ | ({"PYTHONPATH": places} if packages else {}),
        )
        theirs.close()
        descriptor = os.memfd_create("config")
        os.pwrite(descriptor, encode_config(config), 0)
        load = worker_messages.Load(WORKER, config.name, 1, instance, str(folder), settings or {})
        self.send(load, descriptors=[descriptor])
        os.close(descriptor)

    def loaded(self) -> ModelConfig:
        """Waits until the model is loaded. Returns the completed configuration."""
        message, descriptor = self.next()
        assert isinstance(message, worker_messages.Loaded), f"{message}\n{self.said()}"
        assert descriptor is not None
        data = os.pread(descriptor, 1 << 22, 0)
        os.close(descriptor)
        return decode_config(data)

    def failed(self) -> worker_messages.LoadFailed:
        return self.expect(worker_messages.LoadFailed)

    # ------------------------------------------------------------------------------------ the link

    def send(self, *messages: Any, descriptors: Sequence[int] = ()) -> None:
        packet = codec.encode(list(messages))
        assert len(packet) < 192 * 1024
        socket.send_fds(self.sock, [packet], list(descriptors))

    def next(self) -> tuple[Any, int | None]:
        """The next report, with its descriptor. Maps and Unreads are processed on the way."""
        while not self.reports:
            self._receive()
        return self.reports.popleft()

    def expect(self, kind: type[Report]) -> Report:
        message, _ = self.next()
        assert isinstance(message, kind), f"expected {kind.__name__}: {message}\n{self.said()}"
        return message

    def ended(self) -> int:
        """Waits for the end of the link and of the process. Returns the exit code."""
        while True:
            try:
                self._receive()
            except EOFError:
                return self.process.wait(PATIENCE_S)

    def _receive(self) -> None:
        data, descriptors, flags, _ = socket.recv_fds(self.sock, 1 << 18, 64)
        assert not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
        if not data:
            raise EOFError(self.said())
        for message in self.codec.decode(data):
            descriptor = None
            if isinstance(message, (worker_messages.Loaded, worker_messages.Counted)) or (
                isinstance(message, Map) and message.name is None
            ):
                descriptor = descriptors.pop(0)
            if isinstance(message, Map):
                self.maps.append(message)
                self.mapped.add(message.segment, message.size, fd=descriptor, name=message.name)
            elif isinstance(message, Unmap):
                self.mapped.remove(message.segment)
            elif isinstance(message, worker_messages.Unread):
                self.unread.append(message.request)
            else:
                self.reports.append((message, descriptor))
        assert not descriptors

    def _announce(self, segment: Segment) -> None:
        self.send(segment.map(), descriptors=[segment.fd])

    # ------------------------------------------------------------------------------------ tensors

    def place(self, size: int) -> Handle:
        return self.arena.allocate(size).handle()

    def tensor(self, name: str, array: Array, *, dtype: str = "", shared: bool | None = None) -> Tensor:
        """A tensor with the array's bytes: inline if small, else (or with `shared`) by handle."""
        dtype = dtype or from_numpy(array.dtype)
        data = encode_bytes(array) if dtype == "BYTES" else array.tobytes()
        if shared is None:
            shared = len(data) > INLINE_BYTES
        if not shared:
            return Tensor(name, dtype, array.shape, data)
        block = self.arena.allocate(len(data))
        block.memory()[: len(data)] = data
        return Tensor(name, dtype, array.shape, (Handle(block.segment, block.offset, len(data)),))

    def array(self, tensor: Tensor, dtype: Any) -> Array:
        """A copy of an output, whose memory is returned."""
        data = tensor.data
        if isinstance(data, tuple):
            memory = [
                self.mapped.memory(handle).tobytes() if handle.segment >> 32 == WORKER else self.own(handle).tobytes()
                for handle in data
            ]
            data = b"".join(memory)
        assert isinstance(data, bytes)
        return array_of(tensor, data, dtype)

    def value(self, row: worker_messages.Row, index: int = 0) -> Array:
        """A copy of an output of a request, which must have succeeded."""
        assert row.error is None, row.error
        return self.array(row.outputs[index], to_numpy(row.outputs[index].dtype))

    def own(self, handle: Handle) -> memoryview:
        segment = next(segment for segment in self.arena.segments if segment.id == handle.segment)
        return segment.memory[handle.offset : handle.offset + handle.size]

    # ------------------------------------------------------------------------------------ batches

    def execute(self, *work_items: worker_messages.Work, join: int = 0, more: bool = False, open: bool = False) -> int:
        self.number += 1
        self.send(worker_messages.Execute(self.number, join, work_items, more, open))
        return self.number

    def done(self) -> tuple[list[worker_messages.Row], worker_messages.Done]:
        """The results of the next batch to finish, from all its messages."""
        rows: list[worker_messages.Row] = []
        while True:
            message, _ = self.next()
            assert isinstance(message, (worker_messages.Rows, worker_messages.Done)), f"{message}\n{self.said()}"
            if isinstance(message, worker_messages.Done):
                return [*rows, *worker_messages.rows_of(message.columns or message.rows)], message
            rows += message.rows

    def run(self, *work_items: worker_messages.Work) -> list[worker_messages.Row]:
        number = self.execute(*work_items)
        rows, done = self.done()
        assert done.batch == number
        assert [row.request for row in rows] == [work.request for work in work_items]
        assert list(done.times) == sorted(done.times)
        return rows

    # ------------------------------------------------------------------------------------ the end

    def said(self) -> str:
        self.stderr.seek(0)
        return self.stderr.read().decode()

    def stop(self) -> int:
        self.send(worker_messages.Stop())
        return self.ended()

    def close(self) -> None:
        self.sock.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE_S)
        for _, descriptor in self.reports:
            if descriptor is not None:
                os.close(descriptor)
        self.mapped.close()
        self.arena.close()
        self._owned.close()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and self.process.poll() is None:
                assert self.stop() == 0, self.said()
        finally:
            self.close()


@contextmanager
def running(config: ModelConfig, folder: Path, **more: Any) -> Iterator[WorkerProcess]:
    with WorkerProcess(config, folder, **more) as worker:
        worker.loaded()
        yield worker


def array_of(tensor: Tensor, data: bytes, dtype: Any = None) -> Array:
    """The array of a tensor with these bytes. `dtype`: that of numpy, if it is not the tensor's."""
    if tensor.dtype == "BYTES":
        return decode_bytes(data, tensor.shape)
    return np.frombuffer(data, dtype or to_numpy(tensor.dtype)).reshape(tensor.shape)


def work(
    request: int,
    *inputs: Tensor,
    rows: int | None = None,
    outputs: Sequence[Wanted] | None = None,
    audience: str = "internal",
    options: Options | None = None,
) -> worker_messages.Work:
    """`rows` None: the length of the first input."""
    if rows is None:
        rows = inputs[0].shape[0]
    return worker_messages.Work(
        request, rows, tuple(inputs), None if outputs is None else tuple(outputs), audience, options
    )


def assert_failed(row: worker_messages.Row, code: str, text: str = "") -> Failure:
    assert row.error is not None
    assert (row.error.code, text in row.error.text) == (code, True), row.error
    assert row.outputs == ()
    return row.error


def config(
    backend: str,
    inputs: Mapping[str, tuple[str, Sequence[int]]],
    outputs: Mapping[str, tuple[str, Sequence[int]]],
    *,
    max_batch: int = 0,
    parameters: dict[str, str] | None = None,
    optional: Sequence[str] = (),
    name: str = "m",
) -> ModelConfig:
    """A configuration; tensors are given as name: (data type without TYPE_, dims)."""
    return ModelConfig(
        name=name,
        backend=backend,
        max_batch_size=max_batch,
        input=tuple(
            ModelInput(name=key, data_type=f"TYPE_{dtype}", dims=tuple(dims), optional=key in optional)  # type: ignore[arg-type]
            for key, (dtype, dims) in inputs.items()
        ),
        output=tuple(
            ModelOutput(name=key, data_type=f"TYPE_{dtype}", dims=tuple(dims))  # type: ignore[arg-type]
            for key, (dtype, dims) in outputs.items()
        ),
        parameters={key: ModelParameter(string_value=value) for key, value in (parameters or {}).items()},
    )


def config_name(dtype: str) -> str:
    return "STRING" if dtype == "BYTES" else dtype


def echo_config(backend: str, dtypes: Sequence[str], dims: Sequence[int], max_batch: int) -> ModelConfig:
    """For each data type, an input with the prefix x and an output with the prefix y."""
    inputs, outputs = ({f"{prefix}{dtype}": (config_name(dtype), dims) for dtype in dtypes} for prefix in "xy")
    return config(backend, inputs, outputs, max_batch=max_batch)


def gone(pidfd: int) -> bool:
    """Waits until the process behind a pidfd has ended."""
    return bool(select.select([pidfd], [], [], PATIENCE_S)[0])
