"""Workers that all tests of a file share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.workers.models.stream_models import SOURCES, quiet, serving
from tests.support.workers.worker_harness import WorkerProcess


@pytest.fixture(scope="module")
def sending(sender: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    with serving(tmp_path_factory.mktemp("model"), SOURCES[sender]) as worker:
        yield worker


@pytest.fixture
def worker(sending: WorkerProcess) -> Iterator[WorkerProcess]:
    """A worker with the decoupled model that the mark `senders` names. A test must end its requests and read all
    reports."""
    yield sending
    quiet(sending)
