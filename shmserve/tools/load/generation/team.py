"""The measuring process's view of the generator processes of a run.

Invariant: no generator process outlives the `async with` block.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Callable, Sequence
from types import TracebackType

from shmserve.errors import BY_CODE, UnknownError
from shmserve.paths import python
from shmserve.system import interrupts
from shmserve.terminal.errors import Misuse
from shmserve.tools.load.generation.messages import (
    Begin,
    Broken,
    End,
    Ended,
    Prepare,
    Prepared,
    Samples,
    read_report,
    write,
)
from shmserve.tools.load.plan import SECOND, Load, LoadPlan

END_S = 40.0
BEGIN_NS = SECOND // 20
"""Time from the order to the first request."""
OnSamples = Callable[[int, Samples], None]


class _Process:
    """A generator process and the connection to it. `received` is called with its samples."""

    def __init__(
        self,
        index: int,
        received: OnSamples,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.index = index
        self._received = received
        self._process = process
        self._reader, self._writer = reader, writer
        self._answers: asyncio.Queue[Prepared | Ended | Broken] = asyncio.Queue()
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        try:
            while True:
                report = await read_report(self._reader)
                if isinstance(report, Samples):
                    self._received(self.index, report)
                else:
                    self._answers.put_nowait(report)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:  # even if an interrupt ends this task: a caller must not wait for an answer that cannot come
            self._answers.put_nowait(Broken("INTERNAL", "a generator process has ended unexpectedly"))

    def order(self, order: Prepare | Begin | End) -> None:
        write(self._writer, order)

    async def answer(self) -> Prepared | Ended:
        return _answer(await self._answers.get())

    def check(self) -> None:
        """Raises the error that has ended the process."""
        while not self._answers.empty():
            _answer(self._answers.get_nowait())

    async def stop(self) -> None:
        self._reading.cancel()
        self._writer.close()
        await asyncio.gather(self._reading, return_exceptions=True)
        try:
            await asyncio.to_thread(self._process.wait, END_S)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise


async def _started(index: int, received: OnSamples) -> _Process:
    ours, theirs = socket.socketpair()
    try:
        command = [*python(), "-m", "shmserve.tools.load.generation.process", str(theirs.fileno())]
        with interrupts.blocked_in_children():  # this process ends it by closing the socket
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return _Process(index, received, process, *await asyncio.open_connection(sock=ours))


def _answer(report: Prepared | Ended | Broken) -> Prepared | Ended:
    if isinstance(report, Broken):
        raise BY_CODE.get(report.code, UnknownError)(report.text) if report.code else Misuse(report.text)
    return report


class Generators:
    """Processes are added as needed; the first `processes` of them share a load."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self._on_samples: OnSamples | None = None
        """Receives the samples of the current load."""
        self._processes: list[_Process] = []
        self._active: Sequence[_Process] = ()
        self._rows = 1.0
        """Mean number of rows of a request, as the latest process has reported it."""

    async def __aenter__(self) -> Generators:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(process.stop() for process in self._processes))

    async def ensure(self, count: int) -> float:
        """Starts processes until there are `count`, and lets them prepare. Returns the mean number of rows of a
        request."""
        added = []
        for index in range(len(self._processes), count):
            process = await _started(index, self._received)
            added.append(process)
            self._processes.append(process)
            process.order(Prepare(self._plan, index))
        for process in added:
            answer = await process.answer()
            if isinstance(answer, Prepared):
                self._rows = answer.rows
        return self._rows

    def _received(self, process: int, samples: Samples) -> None:
        if self._on_samples is not None:
            self._on_samples(process, samples)

    def begin(self, load: Load, processes: int, now: int, on_samples: OnSamples) -> int:
        """Starts the load, whose samples go to `on_samples`. Returns the time of its start."""
        start = now + BEGIN_NS
        self._on_samples = on_samples
        self._active = self._processes[:processes]
        for process in self._active:
            process.order(Begin(load, start, process.index, processes))
        return start

    async def end(self, patience_s: float) -> int:
        """Stops the load. Returns the number of requests that were not answered within this time."""
        for process in self._active:
            process.order(End(patience_s))
        answers = [await process.answer() for process in self._active]
        self._active = ()
        return sum(answer.unanswered for answer in answers if isinstance(answer, Ended))

    def check(self) -> None:
        for process in self._processes:
            process.check()
