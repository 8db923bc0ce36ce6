"""Fixtures of several unit tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.support.broker.running_broker import broker, client

__all__ = ["broker", "client"]


@pytest.fixture
def own_log() -> Iterator[None]:
    """The root's handlers are the test's: those that it had are the test runner's."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
