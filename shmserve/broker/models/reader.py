"""The thread that reads models, and the loads that wait for a download before they are read.

Invariant: one thread reads one model after another, so that loads are deployed in the order of their requests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from typing import Any, TypeVar

from msgspec import Struct

from shmserve.broker.models.remote import NotDownloaded, RemoteModels
from shmserve.errors import NotFound, Unavailable
from shmserve.protocol.messages import Ask

T = TypeVar("T")


class OperationJob(Struct):
    """An operation whose result a client waits for."""

    peer: int
    ask: Ask
    began: float
    warnings: tuple[str, ...] = ()
    changed: bool = True
    failures: dict[str, str] = {}
    """Model -> why it could not be downloaded for this load."""
    notes: tuple[str, ...] = ()
    """Warnings about downloads."""
    over: bool = False
    """The operation ended while it waited for a download."""


class ReaderThread:
    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "reader")

    def start(self, work: Callable[[], T]) -> Future[T]:
        return self._pool.submit(work)

    def submit(self, work: Callable[[], None]) -> None:
        """Runs work without a result. May be called from any thread."""
        with suppress(RuntimeError):  # the server stops and removes everything
            self._pool.submit(work)

    def remove(self, folder: Path) -> None:
        """Removes a directory that is no longer used. May be called from any thread."""
        self.submit(lambda: rmtree(folder, ignore_errors=True))

    def close(self) -> None:
        self._pool.shutdown()


class Reader:
    """`is_served(model)`: whether it has READY versions. `failed(job, error)` reports an error; the job is None if no
    client requested the work. `remote`: the models of remote repositories."""

    def __init__(
        self,
        loop: Any,
        thread: ReaderThread,
        remote: RemoteModels | None,
        is_served: Callable[[str], bool],
        failed: Callable[[OperationJob | None, Exception], None],
    ) -> None:
        self._loop = loop
        self._remote = remote
        self._is_served = is_served
        self._failed = failed
        self._thread = thread
        self._fetching: list[OperationJob] = []
        """Loads that wait for a download."""
        self.closed = False

    def run(self, work: Callable[[], T], then: Callable[[T], None], job: OperationJob | None = None) -> None:
        """Calls `then` on the loop with the result. If the work of a job needs a model that has not been downloaded, it
        is repeated after the download."""
        self._thread.start(work).add_done_callback(
            lambda future: self._loop.call_soon_threadsafe(self._back, future, work, then, job)
        )

    def _back(
        self, future: Future[T], work: Callable[[], T], then: Callable[[T], None], job: OperationJob | None
    ) -> None:
        if self.closed:
            return
        try:
            then(future.result())
        except Exception as error:
            if job is not None and isinstance(error, NotDownloaded | NotFound):
                model = error.model if isinstance(error, NotDownloaded) else job.ask.model
                if model in job.failures:
                    error = Unavailable(job.failures[model])
                elif isinstance(error, NotDownloaded):
                    self._fetch(model, job, lambda: self.run(work, then, job))
                    return
            self._failed(job, error)

    def load(self, work: Callable[[], T], then: Callable[[T], None], job: OperationJob) -> None:
        """Like `run`, but first downloads the changes of the job's model."""
        if self._remote is None:
            self.run(work, then, job)
        else:
            self._fetch(job.ask.model, job, lambda: self.run(work, then, job))

    def _fetch(self, model: str, job: OperationJob, then: Callable[[], None]) -> None:
        """Downloads the changes of a model, then calls `then`, even if the download failed, as the model may also be in
        a local repository."""
        remote = self._remote
        assert remote is not None

        def fetched(failure: str, notes: Collection[str]) -> None:
            if self.closed:
                return
            if job.over:
                if not self._is_served(model) and all(other.ask.model != model for other in self._fetching):
                    remote.release(model)
                return
            self._fetching.remove(job)
            if failure:
                job.failures = job.failures | {model: failure}
            job.notes += tuple(notes)
            then()

        self._fetching.append(job)
        remote.fetch(model, fetched)

    def end_downloads(self, model: str) -> None:
        """Ends loads of the model that wait for a download, as it was unloaded after they were requested."""
        for job in [job for job in self._fetching if job.ask.model == model]:
            self._fetching.remove(job)
            job.over = True
            self._failed(job, Unavailable("it was unloaded while it was downloaded"))

    def close(self) -> None:
        self.closed = True
        self._thread.close()
