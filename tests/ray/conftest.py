"""A cluster of three nodes on this machine, for the whole session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ray import cluster
from tests.ray.load import PID, write_times
from tests.support.load import write_sums

REASON = "Ray is not installed; `make test-fleet` installs it"
LOAD_S = 1.0
"""How long a restarted server accepts connections before it can serve."""


@pytest.fixture(scope="session")
def place() -> Iterator[cluster.Place]:
    pytest.importorskip("ray", reason=REASON)
    with cluster.started(3) as made:
        yield made


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_times(root, "twice", load_seconds=LOAD_S)
    write_sums(root, PID)
    return root
