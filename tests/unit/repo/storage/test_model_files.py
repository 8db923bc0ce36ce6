"""Single files as models: their names, what is linked, and how changes are followed."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from shmserve.errors import InvalidRequest
from shmserve.repo.storage.model_files import TARGETS, ModelFile, ModelFiles, model_file, models_of
from shmserve.repo.storage.store import scan_model
from tests import ROOT

MLP = ROOT / "repo" / "examples" / "mlp" / "1" / "model.onnx"
APP = """
import shmserve

@shmserve.model
def {}(x: float) -> float:
    return x
"""


def served(folder: Path) -> dict[str, str]:
    """Links and files below the folder -> the target's name, or the text."""
    return {
        path.relative_to(folder).as_posix(): os.readlink(path) if path.is_symlink() else path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def files_of(tmp_path: Path, *paths: Path) -> ModelFiles:
    (tmp_path / "run").mkdir()
    files = ModelFiles([ModelFile(path) for path in paths], tmp_path / "run")
    files.refresh(strict=True)
    return files


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("resnet50-v1.5.onnx", "resnet50-v1.5"),
        ("my net (2).onnx", "my_net_2"),
        (".hidden.onnx", "hidden"),
        ("modèle.onnx", "mod_le"),
        ("x" * 200 + ".onnx", "x" * 128),
    ],
)
def test_name_from_the_stem(name: str, model: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.touch()
    assert list(models_of(model_file(str(path)))) == [model]


def test_a_name_may_precede_the_path(tmp_path: Path) -> None:
    path = tmp_path / "日本.onnx"
    path.touch()
    assert list(models_of(model_file(f"net={path}"))) == ["net"]
    with pytest.raises(InvalidRequest, match="does not give its model a name: write NAME="):
        models_of(model_file(str(path)))
    equals = tmp_path / "a=b.onnx"
    equals.touch()
    assert model_file(str(equals)).path == equals


def test_a_python_file_is_a_model_of_the_python_backend() -> None:
    assert (TARGETS[".py"], TARGETS[".dali"]) == ("model.py", "model.dali")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("photo.jpg", r"the suffix '.jpg' is not that of a model file; known are .onnx, .py, .plan, .*, .savedmodel, "),
        ("clf.pkl", "`shmserve init NAME --from clf.pkl` makes a model that loads it"),
        ("net.pth", "`shmserve init NAME --from torch` makes a model.py for a network and its weights"),
        ("a/b=m.onnx", "'a/b' cannot be the name of a model"),
        ("missing.onnx", "missing.onnx: no such file or directory"),
    ],
)
def test_unsupported_files_are_refused(name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("photo.jpg", "clf.pkl", "net.pth", "m.onnx"):
        Path(file).touch()
    with pytest.raises(InvalidRequest, match=text):
        model_file(name)


def test_onnx_file_is_a_model_that_completes_itself(tmp_path: Path) -> None:
    files_of(tmp_path, MLP.with_name("model.onnx"))
    scanned = scan_model(tmp_path / "run" / "model")
    assert scanned.problems == ()
    assert scanned.versions == (1,)
    assert scanned.config is not None
    assert scanned.config.backend == "onnxruntime"


def test_external_weights_are_linked(tmp_path: Path) -> None:
    weights = [numpy_helper.from_array(np.ones((4, 4), np.float32), name) for name in "vw"]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "v"], ["h"]), helper.make_node("MatMul", ["h", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
        weights,
    )
    path = tmp_path / "big.onnx"
    (tmp_path / "data").mkdir()
    for weight, location in zip(graph.initializer, ("data/v.bin", "w.bin"), strict=True):
        onnx.external_data_helper.set_external_data(weight, location)
    onnx.save(helper.make_model(graph), path)
    files_of(tmp_path, path)
    assert served(tmp_path / "run" / "big") == {
        "1/data/v.bin": str(tmp_path / "data" / "v.bin"),
        "1/model.onnx": str(path),
        "1/w.bin": str(tmp_path / "w.bin"),
    }


def test_weights_of_openvino_and_a_configuration_beside_the_file(tmp_path: Path) -> None:
    for name in ("net.xml", "net.bin", "net.pbtxt", "other.bin"):
        (tmp_path / name).touch()
    files = files_of(tmp_path, tmp_path / "net.xml")
    expected = {"1/model.xml": "net.xml", "1/model.bin": "net.bin", "config.pbtxt": "net.pbtxt"}
    assert served(tmp_path / "run" / "net") == {name: str(tmp_path / to) for name, to in expected.items()}
    (tmp_path / "net.pbtxt").unlink()
    files.refresh()
    assert "config.pbtxt" not in served(tmp_path / "run" / "net")


def test_a_directory_of_tensorflow_is_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "net.savedmodel"
    folder.mkdir()
    (folder / "saved_model.pb").touch()
    files_of(tmp_path, folder)
    assert served(tmp_path / "run" / "net") == {"1/model.savedmodel": str(folder)}
    scanned = scan_model(tmp_path / "run" / "net")
    assert scanned.problems == ()
    assert scanned.config is not None
    assert scanned.config.platform == "tensorflow_savedmodel"


@pytest.mark.parametrize(
    ("file", "link"), [("fraud.json", "xgboost.json"), ("fraud.txt", "model.txt"), ("fraud.tl", "checkpoint.tl")]
)
def test_tree_models(file: str, link: str, tmp_path: Path) -> None:
    (tmp_path / file).touch()
    files_of(tmp_path, tmp_path / file)
    assert served(tmp_path / "run" / "fraud") == {f"1/{link}": str(tmp_path / file)}
    scanned = scan_model(tmp_path / "run" / "fraud")
    assert scanned.config is not None
    assert (scanned.config.backend, scanned.config.default_model_filename) == ("fil", link)


def test_weights_of_paddle(tmp_path: Path) -> None:
    for name in ("net.pdmodel", "net.pdiparams"):
        (tmp_path / name).touch()
    files_of(tmp_path, tmp_path / "net.pdmodel")
    expected = {"1/model.pdmodel": "net.pdmodel", "1/model.pdiparams": "net.pdiparams"}
    assert served(tmp_path / "run" / "net") == {name: str(tmp_path / to) for name, to in expected.items()}


def test_functions_may_be_added_and_removed(tmp_path: Path) -> None:
    app = tmp_path / "app.py"
    app.write_text(APP.format("first"))
    before = sorted(os.listdir(tmp_path))
    files = files_of(tmp_path, app)
    assert list(files.names()) == ["first"]
    assert files.source((tmp_path / "run" / "first").resolve()) == app
    app.write_text(APP.format("second") + APP.format("third"))
    files.refresh()
    assert list(files.names()) == ["second", "third"]
    assert sorted(os.listdir(tmp_path / "run")) == ["second", "third"]
    assert sorted(os.listdir(tmp_path)) == [*before, "run"], "nothing is written beside the file"


def test_broken_file_keeps_its_models(tmp_path: Path) -> None:
    app = tmp_path / "app.py"
    app.write_text(APP.format("add"))
    files = files_of(tmp_path, app)
    folder = (tmp_path / "run" / "add").resolve()
    assert files.problem(folder) == ""
    app.write_text("def broken(:\n")
    files.refresh()
    assert files.problem(folder) == "app.py, line 1: invalid syntax"
    assert list(files.names()) == ["add"]
    app.write_text(APP.format("add") + "\n")
    files.refresh()
    assert files.problem(folder) == ""


def test_two_files_of_the_same_name_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for folder in (tmp_path, other):
        (folder / "net.onnx").touch()
    with pytest.raises(InvalidRequest, match=r"both give a model 'net'; choose another name for one: NAME=net.onnx"):
        files_of(tmp_path, tmp_path / "net.onnx", other / "net.onnx")


def test_problem_of_another_file_ends_when_that_one_changes(tmp_path: Path) -> None:
    first, second = tmp_path / "a.py", tmp_path / "b.py"
    first.write_text(APP.format("one"))
    second.write_text(APP.format("two"))
    files = files_of(tmp_path, first, second)
    second.write_text(APP.format("one"))
    files.refresh()
    assert "both give a model 'one'" in files.problem((tmp_path / "run" / "two").resolve())
    first.write_text(APP.format("three"))
    files.refresh()
    assert list(files.names()) == ["three", "one"]
