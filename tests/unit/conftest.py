"""Fixtures shared by unit tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.support.broker.running_broker import broker, client

__all__ = ["broker", "client"]


@pytest.fixture
def own_log() -> Iterator[None]:
    """Replaces the root logger's handlers, which belong to the test runner."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
