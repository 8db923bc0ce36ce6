"""The fake broker for the duration of a test, in a separate folder whose name is short enough for a socket."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

import shmserve
from tests.support.broker.fake_broker import FakeBroker

Made = TypeVar("Made", bound=FakeBroker)


@contextmanager
def running(kind: Callable[[Path], Made]) -> Iterator[Made]:
    with tempfile.TemporaryDirectory(prefix="shmserve-test-") as folder:
        made = kind(Path(folder))
        made.start()
        yield made
        made.stop()


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    with running(FakeBroker) as made:
        yield made


@pytest.fixture(params=["lane", "ipc"])
def client(request: pytest.FixtureRequest, broker: FakeBroker) -> Iterator[shmserve.Client]:
    with shmserve.Client(getattr(broker, request.param)) as made:
        yield made
