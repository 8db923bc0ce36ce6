"""The agent `convert` in its own process, with fakes of TensorRT and NVML: it has not been run on a GPU."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from shmserve.errors import InvalidRequest
from shmserve.repo.agents.chains import AgentChains, AgentSettings, PreparedModel
from shmserve.repo.config.schema import ModelRepositoryAgents
from tests import STANDINS

pytestmark = pytest.mark.process
CONFIG = """backend: "tensorrt" max_batch_size: 16
input { name: "x" data_type: TYPE_FP32 dims: 5 } output { name: "y" data_type: TYPE_FP32 dims: 5 }
model_repository_agents { agents { name: "convert" } }
"""
GPU = [{"uuid": "GPU-1", "pci": "0000:00:00.0", "name": "Stand-in A"}]


def write_onnx(path: Path, kind: str = "Identity") -> None:
    """A network with a weight in the file `weights`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 5]) for name in ("x", "y"))
    weight = numpy_helper.from_array(np.zeros(4, np.float32), "w")
    graph = helper.make_graph([helper.make_node(kind, ["x"], ["y"])], "g", [x], [y], [weight])
    (path.parent / "weights").unlink(missing_ok=True)
    onnx.save(helper.make_model(graph), path, save_as_external_data=True, location="weights", size_threshold=0)


class Converter:
    def __init__(self, root: Path) -> None:
        self.model = root / "m"
        self.cache = root / "cache"
        self.printed: list[str] = []
        self.made: list[PreparedModel | None] = []
        settings, printed = AgentSettings(), self.printed
        self.chains = AgentChains(root / "work", settings, lambda line, _: printed.append(line), lambda work: work())

    def convert(self, digest: str, **parameters: str) -> Path:
        given = {"name": "convert", "parameters": {"cache_directory": str(self.cache)} | parameters}
        agents = msgspec.convert({"agents": [given]}, ModelRepositoryAgents)
        prepared = self.chains.prepare("m", self.model, agents, digest)
        assert prepared is not None
        self.made.append(prepared)
        return prepared.folder

    def builds(self) -> int:
        return sum(line.startswith("building a plan") for line in self.printed)


@pytest.fixture
def converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Converter]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STANDINS), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("STANDIN_GPUS", json.dumps(GPU))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (tmp_path / "work").mkdir()
    write_onnx(tmp_path / "m" / "1" / "model.onnx")
    (tmp_path / "m" / "config.pbtxt").write_text(CONFIG)
    (tmp_path / "m" / "labels.txt").write_text("a\nb\n")
    made = Converter(tmp_path)
    yield made
    made.chains.close()


def test_plans_replace_onnx_files_and_are_built_once_for_each_content_and_gpu(
    converter: Converter, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = converter.convert("1")
    assert folder.name == "m"
    assert sorted(path.name for path in (folder / "1").iterdir()) == ["model.plan", "weights"]
    assert (folder / "labels.txt").read_text() == "a\nb\n"
    plan = json.loads((folder / "1" / "model.plan").read_bytes())
    assert plan["profiles"] == [{"x": [[1, 5], [16, 5], [16, 5]]}]
    assert converter.printed[0].startswith("building a plan of version 1 for TensorRT ")
    converter.convert("2")
    assert converter.builds() == 1
    converter.convert("3", build_options="--level 5")
    assert converter.builds() == 2
    write_onnx(converter.model / "1" / "model.onnx", "Relu")
    converter.convert("4")
    assert converter.builds() == 3
    monkeypatch.setenv("STANDIN_GPUS", json.dumps([GPU[0] | {"name": "Stand-in B"}]))
    converter.convert("5")
    assert converter.builds() == 4
    (converter.model / "1" / "weights").write_bytes(bytes(15) + b"x")
    converter.convert("6")
    assert converter.builds() == 5
    assert len(list(converter.cache.glob("*.plan"))) == 5


def test_models_that_cannot_be_converted_are_refused(converter: Converter, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match=r"`shmserve build` failed for version 1: (?s:.*)--levle"):
        converter.convert("1", build_options="--levle 5")
    with pytest.raises(InvalidRequest, match="expected an absolute path"):
        converter.convert("1", cache_directory="cache")
    assert not list(converter.cache.glob("*.plan"))
    monkeypatch.delenv("STANDIN_GPUS")
    with pytest.raises(InvalidRequest, match="there is no GPU to build a plan for"):
        converter.convert("1")
    (converter.model / "1" / "model.onnx").unlink()
    with pytest.raises(InvalidRequest, match=r"no version has a file 'model\.onnx'"):
        converter.convert("1")
