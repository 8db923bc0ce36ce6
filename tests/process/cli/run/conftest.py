"""Models that the tests of a file run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.workers.models.run_models import build


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    build(root)
    return root
