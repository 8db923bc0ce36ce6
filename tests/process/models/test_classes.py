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
from tests.support.living import until
from tests.support.model_files import write_model

pytestmark = pytest.mark.process

IDENTITY = """
name: "many" backend: "identity" max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ] output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] } ]
dynamic_batching { }
"""


FLAT = """
platform: "ensemble"
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
ensemble_scheduling { step {
  model_name: "many" model_version: -1
  input_map { key: "x" value: "x" } output_map { key: "y" value: "y" }
} }
"""
"""A configuration without a batch dimension, for a model that has one."""


def section(title: str) -> list[str]:
    """The code of a section of the page."""
    return pages.blocks(pages.page("models").partition(f"\n## {title}\n")[2].partition("\n## ")[0])


def test_labels_of_ensembles(tmp_path: Path) -> None:
    """The labels of the outermost ensemble that has any, else those of the step. The cache distinguishes them."""
    labels = 'label_filename: "labels.txt" }'
    for name, step, own in (("inner", "many", True), ("none", "inner", False), ("outer", "none", True)):
        text = FLAT.replace('"many"', f'"{step}"')
        head, _, rest = text.partition("output {")
        folder = write_model(tmp_path, name, f"{head}output {{{rest.replace('}', labels, 1) if own else rest}")
        if own:
            (folder / "labels.txt").write_text(f"{name} 0\n{name} 1\n")
    config = IDENTITY.replace("[ -1 ] } ]\nd", f"[ -1 ] {labels} ]\nd")
    folder = write_model(tmp_path, "many", f"{config} response_cache {{ enable: true }}")
    (folder / "labels.txt").write_text("many 0\nmany 1\n")
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
