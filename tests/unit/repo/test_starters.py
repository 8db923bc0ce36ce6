"""Directories of new models: their configurations, and refused files."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from shmserve.errors import InvalidRequest, NotFound
from shmserve.repo.check import check
from shmserve.repo.config.complete import TensorFacts
from shmserve.repo.starters.starter import KINDS, DescribedTensors, starter_of, write
from tests.support.cases import cases

FILES = {"pt": b"x", "json": b'{"learner":{}}', "gguf": struct.pack("<4sIQQ", b"GGUF", 3, 0, 0)}
"""Suffix -> a file without a network."""
SETTING = re.compile(r"^( *)#(?=\S)", re.MULTILINE)


def save(path: Path, *dims: list[Any] | None, external: str = "", name: str = "x") -> Path:
    """A model that adds its inputs "x0", "x1", ..., of these dims."""
    names = [f"{name}{place}" for place in range(len(dims))]
    infos = [
        helper.make_tensor_value_info(pair[0], TensorProto.FLOAT, pair[1]) for pair in zip(names, dims, strict=True)
    ]
    weight = numpy_helper.from_array(np.ones((1,), np.float32), "w")
    if external:
        onnx.external_data_helper.set_external_data(weight, external)
        weight.ClearField("raw_data")
        weight.data_location = TensorProto.EXTERNAL
    node = helper.make_node("Sum", [*names, "w"], ["y"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, dims[0])
    graph = helper.make_graph([node], "g", infos, [y], [weight])
    onnx.save(helper.make_model(graph), path)
    return path


def config_of(folder: Path, source: str | Path, described: DescribedTensors | None = None) -> str:
    write(starter_of(str(source), described), "m", folder)
    assert check([folder]).all() == []
    return (folder / "m" / "config.pbtxt").read_text()


def test_tensors_and_batches_of_a_file(tmp_path: Path) -> None:
    text = config_of(tmp_path / "batched", save(tmp_path / "a.onnx", ["n", 3, "h"], ["n", 1, 1]))
    assert '{ name: "x0" data_type: TYPE_FP32 dims: [ 3, -1 ] }' in text
    assert "\nmax_batch_size: 8\n" in text
    assert "\ndynamic_batching {" in text
    text = config_of(tmp_path / "alone", save(tmp_path / "b.onnx", [4, "n"], []))
    assert '{ name: "x0" data_type: TYPE_FP32 dims: [ 4, -1 ] }' in text
    assert '{ name: "x1" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } }' in text
    assert "\nmax_batch_size: 0\n" in text
    assert "dynamic_batching" not in text
    text = config_of(tmp_path / "without shapes", save(tmp_path / "c.onnx", None))
    assert "input [" not in text
    assert "the server completes them" in text
    path = tmp_path / "net.pt"
    path.write_text("x")
    assert "write them into config.pbtxt" in starter_of(str(path)).warning
    x, y = TensorFacts("x", "INT64", (-1, -1)), TensorFacts("y", "FP16", (-1, 5))
    text = config_of(tmp_path / "described", path, DescribedTensors([x], [y], True))
    assert '{ name: "x" data_type: TYPE_INT64 dims: [ -1 ] }' in text
    assert '{ name: "y" data_type: TYPE_FP16 dims: [ 5 ] }' in text


def test_external_data_is_copied(tmp_path: Path) -> None:
    path = save(tmp_path / "a.onnx", ["n", 1], external="data/w.bin")
    with pytest.raises(InvalidRequest, match=r"its weights in data/w\.bin are missing"):
        starter_of(str(path))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "w.bin").write_bytes(b"\0\0\x80\x3f")
    config_of(tmp_path / "r", path)
    assert (tmp_path / "r" / "m" / "1" / "data" / "w.bin").read_bytes() == b"\0\0\x80\x3f"
    outside = save(tmp_path / "b.onnx", ["n", 1], external="../w.bin")
    with pytest.raises(InvalidRequest, match="outside its directory"):
        starter_of(str(outside))


@pytest.mark.parametrize("kind", [*KINDS, "onnx", "pt", "json", "gguf"])
def test_every_setting_that_is_turned_off_is_valid(kind: str, tmp_path: Path) -> None:
    source = {"onnx": save(tmp_path / "a.onnx", ["n", 3, "h", "w"])}.get(kind, kind)
    if kind in FILES:
        source = tmp_path / f"net.{kind}"
        source.write_bytes(FILES[kind])
    text = config_of(tmp_path / "r", source)
    found = list(SETTING.finditer(text))
    assert len(found) >= 6
    for match in found:
        used = text[: match.start()] + match[1] + text[match.end() :]
        name = text[match.end() :].partition(" ")[0]
        if name == "instance_group":  # the other one is removed
            used = re.sub(r"^instance_group .*KIND_CPU.*\n", "", used, flags=re.MULTILINE)
        (tmp_path / "r" / "m" / "config.pbtxt").write_text(used)
        findings = [found.text for found in check([tmp_path / "r"], gpus={0}).all()]
        assert findings == [], name


@cases(
    ("keras", "--from keras: expected python, sklearn, torch, or a file with the suffix .onnx, .pt, "),
    ("app.py", "`shmserve serve app.py` serves a Python file as it is"),
    ("net.pth", "net.pth has weights and not the network: use --from torch"),
    ("broken.onnx", r"broken\.onnx: not an ONNX file"),
    ("broken.json", r"broken\.json: not a model that XGBoost has saved"),
    ("broken.gguf", r"broken\.gguf: not a GGUF file"),
)
def test_sources_that_are_refused(source: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for suffix in ("onnx", "json", "gguf"):
        Path(f"broken.{suffix}").write_bytes(b"\x0a\x01x")
    with pytest.raises(InvalidRequest, match=text):
        starter_of(source)
    with pytest.raises(NotFound, match=r"none\.onnx: no such file"):
        starter_of("none.onnx")


@pytest.mark.process
def test_names_of_tensors_are_written_in_every_locale(tmp_path: Path) -> None:
    source = save(tmp_path / "model.onnx", ["n", 4], name="größe")
    code = "import pathlib, sys; from shmserve.repo.starters.starter import starter_of, write; "
    code += "write(starter_of(sys.argv[1]), 'm', pathlib.Path(sys.argv[2]))"
    ascii_only = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "POSIX"}
    subprocess.run([sys.executable, "-c", code, source, tmp_path], env=os.environ | ascii_only, check=True)
    assert 'name: "größe0"' in (tmp_path / "m" / "config.pbtxt").read_text(encoding="utf-8")


def test_nothing_is_overwritten_or_left_behind(tmp_path: Path) -> None:
    starter = starter_of("python")
    for name in ("", ".m", "a/b", "a;b", "x" * 129):
        with pytest.raises(InvalidRequest, match="cannot be the name of a"):
            write(starter, name, tmp_path)
    with pytest.raises(FileNotFoundError):
        write(starter._replace(files={"model.py": tmp_path / "gone.py"}), "m", tmp_path)
    assert list(tmp_path.iterdir()) == []
    write(starter, "m", tmp_path)
    (tmp_path / "m" / "config.pbtxt").write_text("mine")
    with pytest.raises(InvalidRequest, match=r"m exists, and is not overwritten; choose another NAME or --repository"):
        write(starter_of("torch"), "m", tmp_path)
    assert (tmp_path / "m" / "config.pbtxt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
