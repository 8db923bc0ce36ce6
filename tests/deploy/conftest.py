"""The image, and the models that pods serve."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shmserve.repo import samples
from tests.deploy import image
from tests.support.load import write_times
from tests.support.model_files import python_model, write_model

CONFIG = """
backend: "python" max_batch_size: 0
input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
WAITS = """
select.select([], [], [], float(x[0]))
return self.respond(x)
"""
SAMPLES = ("add_sub", "mlp")


@pytest.fixture(scope="session")
def built() -> str:
    """The image."""
    try:
        return image.build()
    except image.Unavailable as error:
        pytest.skip(f"the image cannot be built here: {error}")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with samples, a model for a load, and "waits", which takes as many seconds as its input says."""
    root = tmp_path_factory.mktemp("models")
    for name in samples.build(root, lambda text: None):
        if name not in SAMPLES:
            shutil.rmtree(root / name)
    write_model(root, "waits", CONFIG, python_model(WAITS))
    write_times(root, "twice", "0")
    for path in (root, *root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return root
