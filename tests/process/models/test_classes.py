"""Classes and warm-up through a complete server, with the unchanged example of the page on models."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import shmserve
from shmserve import TopK
from shmserve.testing import Server
from tests.support.docs import pages
from tests.support.ensemble_models import config_text, ensemble
from tests.support.living import until
from tests.support.model_files import write_model

pytestmark = pytest.mark.process


def section(title: str) -> list[str]:
    """The code of a section of the page."""
    return pages.blocks(pages.page("models").partition(f"\n## {title}\n")[2].partition("\n## ")[0])


def test_labels_of_ensembles(tmp_path: Path) -> None:
    """The labels of the outermost ensemble that has any, else those of the step. The cache distinguishes them. The
    ensembles have no batch dimension, and the model has one."""
    labelled = 'y:FP32:[-1]:label_filename:"labels.txt"'
    cached = "max_batch_size: 8 dynamic_batching { } response_cache { enable: true }"
    write_model(tmp_path, "many", config_text("identity", "x", labelled, cached))
    for name, step, output in (("inner", "many", labelled), ("none", "inner", "y"), ("outer", "none", labelled)):
        ensemble(tmp_path, name, "x", output, f"{step}(x:x)->(y:y)")
    for name in ("many", "inner", "outer"):
        (tmp_path / name / "labels.txt").write_text(f"{name} 0\n{name} 1\n")
    x = np.array([3, 4], np.float32)
    with Server(tmp_path, "--cache-config", "local,size=1000000") as server, server.client() as client:
        for name, expected in (("many", "many"), ("inner", "inner"), ("none", "inner"), ("outer", "outer")):
            given = x[None] if name == "many" else x
            (found,) = client.infer(name, {"x": given}, outputs={"y": TopK(1)})["y"].ravel()
            assert found == f"4.000000:1:{expected} 1".encode()
            assert client.infer(name, {"x": given})["y"].shape == given.shape


def test_the_example_of_the_page(server: Server, root: Path, client: shmserve.Client) -> None:
    (configuration,) = section("Warm-up")
    labels, source, program = section("Labels and classes")
    pets = write_model(root, "pets", configuration, source)
    (pets / "warmup").mkdir()
    (pets / "warmup" / "x.bin").write_bytes(bytes(16))
    (pets / "labels.txt").write_text(labels)
    client.load("pets")
    (expected,) = re.findall(r"# (\[\[.*\]\])", program)
    first, *others = pages.run_program(server, program).splitlines()
    assert first == expected
    assert others == ["dog 0.610296 1", "rabbit 0.224515 3"]
    sample = "warm-up sample '{}' of model 'pets' took "
    until(client, lambda: sample.format("a real one") in server.log)  # perhaps after the answers of the worker
    assert sample.format("full batch") in server.log
    assert "2 run(s) of 8 request(s)" in server.log
