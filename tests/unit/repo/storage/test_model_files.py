"""Single files as models: their names, what is linked, how changes are followed, and functions with @shmserve.model."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest

from shmserve.errors import InvalidRequest
from shmserve.repo.load import parse
from shmserve.repo.storage.model_files import ModelFile, ModelFiles, model_file, models_of
from shmserve.repo.storage.model_functions import functions_in
from tests.support.cases import cases
from tests.support.workers.models.worker_models import Graph

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


@cases(
    ("resnet50-v1.5.onnx", "resnet50-v1.5"),
    ("my net (2).onnx", "my_net_2"),
    (".hidden.onnx", "hidden"),
    ("modèle.onnx", "mod_le"),
    ("x" * 200 + ".onnx", "x" * 128),
    ("net=日本.onnx", "net"),
)
def test_names_of_models(name: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in (name.rpartition("=")[2], "a=b.onnx"):
        Path(file).touch()
    assert list(models_of(model_file(name))) == [model]
    assert model_file("a=b.onnx").path.name == "a=b.onnx"
    if "=" in name:
        with pytest.raises(InvalidRequest, match="does not give its model a name: write NAME="):
            models_of(model_file("日本.onnx"))


def test_a_directory_in_the_format_of_hugging_face(tmp_path: Path) -> None:
    network = tmp_path / "Net-0.5B"
    network.mkdir()
    with pytest.raises(InvalidRequest, match="no such file"):
        model_file(str(network))
    for name in ("config.json", "model.safetensors"):
        (network / name).touch()
    files = files_of(tmp_path, model_file(str(network)).path)
    links = {f"Net-0.5B/1/{name}": str(network / name) for name in ("config.json", "model.safetensors")}
    assert served(files.folder) == {**links, "Net-0.5B/config.pbtxt": 'backend: "vllm"\n'}


@cases(
    ("photo.jpg", r"the suffix '.jpg' is not that of a model file; known are .onnx, .py, .plan, .*, .savedmodel, "),
    ("clf.pkl", "`shmserve init NAME --from clf.pkl` makes a model that loads it"),
    ("net.pth", "`shmserve init NAME --from torch` makes a model.py for a network and its weights"),
    ("a/b=m.onnx", "'a/b' cannot be the name of a model"),
    ("missing.onnx", "missing.onnx: no such file or directory"),
)
def test_unsupported_files_are_refused(name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("photo.jpg", "clf.pkl", "net.pth", "m.onnx"):
        Path(file).touch()
    with pytest.raises(InvalidRequest, match=text):
        model_file(name)


def test_external_weights_are_linked(tmp_path: Path) -> None:
    graph = Graph().input("x", "FP32", [-1, 4]).output("y", "FP32", [-1, 4])
    for name in "vw":
        graph.weight(name, np.ones((4, 4), np.float32))
    model = onnx.load(graph.node("MatMul", ["x", "v"], ["h"]).node("MatMul", ["h", "w"], ["y"]).save(tmp_path / "net"))
    path = tmp_path / "big.onnx"
    (tmp_path / "data").mkdir()
    for weight, location in zip(model.graph.initializer, ("data/v.bin", "w.bin"), strict=True):
        onnx.external_data_helper.set_external_data(weight, location)
    onnx.save(model, path)
    files_of(tmp_path, path)
    assert served(tmp_path / "run" / "big") == {
        "1/data/v.bin": str(tmp_path / "data" / "v.bin"),
        "1/model.onnx": str(path),
        "1/w.bin": str(tmp_path / "w.bin"),
    }


@cases(
    (("fraud.json",), ("xgboost.json",)),
    (("fraud.txt",), ("model.txt",)),
    (("fraud.tl",), ("checkpoint.tl",)),
    (("net.pdmodel", "net.pdiparams"), ("model.pdmodel", "model.pdiparams")),
    (("net.xml", "net.bin"), ("model.xml", "model.bin")),
    (("net.savedmodel",), ("model.savedmodel",)),
    (("net.lin",), ("model.lin",)),
)
def test_files_of_other_backends(files: tuple[str, ...], links: tuple[str, ...], tmp_path: Path) -> None:
    """With the weights beside them, and a configuration."""
    for name in (*files, "other.bin"):
        (tmp_path / name).mkdir() if name.endswith("savedmodel") else (tmp_path / name).touch()
    model = tmp_path / files[0]
    found = files_of(tmp_path, model)
    expected = {f"1/{link}": str(tmp_path / name) for link, name in zip(links, files, strict=True)}
    assert served(tmp_path / "run" / model.stem) == expected
    config = model.with_suffix(".pbtxt")
    config.touch()
    assert model_file(str(model)).path == model
    found.refresh()
    assert served(tmp_path / "run" / model.stem) == expected | {"config.pbtxt": str(config)}
    config.unlink()
    found.refresh()
    assert served(tmp_path / "run" / model.stem) == expected


def test_changes_of_files_of_functions(tmp_path: Path) -> None:
    app, other = tmp_path / "app.py", tmp_path / "other.py"
    app.write_text(APP.format("first"))
    other.write_text(APP.format("two"))
    before = sorted(os.listdir(tmp_path))
    files = files_of(tmp_path, app, other)
    folder = (tmp_path / "run" / "first").resolve()
    assert list(files.names()) == ["first", "two"]
    assert (files.source(folder), files.problem(folder)) == (app, "")
    app.write_text("def broken(:\n")
    files.refresh()
    assert files.problem(folder) == "app.py, line 1: invalid syntax"
    assert list(files.names()) == ["first", "two"], "a broken file keeps its models"
    app.write_text(APP.format("second") + APP.format("third"))
    files.refresh()
    assert list(files.names()) == ["second", "third", "two"]
    assert sorted(os.listdir(tmp_path / "run")) == ["second", "third", "two"]
    assert sorted(os.listdir(tmp_path)) == [*before, "run"], "nothing is written beside the file"
    other.write_text(APP.format("third"))
    files.refresh()
    text = "both give a model 'third'; choose another name for one: NAME=other.py"
    assert text in files.problem((tmp_path / "run" / "two").resolve())
    app.write_text(APP.format("first"))
    files.refresh()
    assert list(files.names()) == ["first", "third"], "the problem ends when the first file changes"


def found(tmp_path: Path, source: str) -> dict[str, str]:
    path = tmp_path / "app.py"
    path.write_text(source)
    return {model.name: model.config for model in functions_in(path)}


def test_modules_beside_the_file_belong_to_its_models(tmp_path: Path) -> None:
    package = tmp_path / "words"
    package.mkdir()
    (package / "__init__.py").write_text("import os, app")
    (package / "long.py").write_text("from . import short")
    (tmp_path / "texts.py").write_text("import missing, broken")
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "other.py").touch()
    path = tmp_path / "app.py"
    path.write_text("import shmserve, texts\nfrom words.long import word\n@shmserve.model\ndef f(x): ...")
    (model,) = functions_in(path)
    assert model.modules == ("app.py", "broken.py", "texts.py", "words/__init__.py", "words/long.py")


@cases(
    "import shmserve\n@shmserve.model\ndef f(x): ...",
    "import shmserve as s\n@s.model()\ndef f(x): ...",
    "from shmserve import model\n@model\nasync def f(x): ...",
    "from shmserve import model as serve\n@serve()\nclass f: ...",
    "import functools, shmserve\n@shmserve.model\n@functools.cache\ndef f(x): ...\ndef g(x): ...",
)
def test_decorated_functions_are_found_in_all_forms(source: str, tmp_path: Path) -> None:
    assert list(found(tmp_path, source)) == ["f"]


def test_decorator_arguments_become_the_configuration(tmp_path: Path) -> None:
    texts = found(
        tmp_path,
        "import shmserve\n"
        '@shmserve.model(name="my model", batch=True, max_batch_size=8, instances=2)\ndef f(x): ...\n'
        "@shmserve.model(batch=True)\ndef g(x): ...\n@shmserve.model\ndef h(x): ...",
    )
    config, default, alone = (parse(texts[name]) for name in ("my model", "g", "h"))
    assert (config.backend, config.max_batch_size, config.instance_group[0].count) == ("python", 8, 2)
    values = {key: value.string_value for key, value in config.parameters.items()}
    assert values == {"function": "f", "strict_outputs": "true", "stacked": "true"}
    assert [one.max_batch_size for one in (default, alone)] == [32, 0]
    assert [one.dynamic_batching is None for one in (config, default, alone)] == [False, False, True]
    assert "stacked" not in alone.parameters


@cases(
    ("def f(x): ...", "app.py has no model: put @shmserve.model above a function or class"),
    ("def f(:", "app.py, line 2: invalid syntax"),
    ("@shmserve.model(8)\ndef f(x): ...", "line 2: @shmserve.model takes keywords only: name, batch,"),
    ("@shmserve.model(size=8)\ndef f(x): ...", "line 2: @shmserve.model has no option 'size'; it has name, batch"),
    ("N = 8\n@shmserve.model(batch=True, max_batch_size=N)\ndef f(x): ...", "line 3: write max_batch_size=... as"),
    ("@shmserve.model(batch=1)\ndef f(x): ...", "line 2: batch=1 is not of type bool"),
    ("@shmserve.model(max_batch_size=8)\ndef f(x): ...", "max_batch_size=8 needs batch=True"),
    ("@shmserve.model(instances=0)\ndef f(x): ...", "must be at least 1"),
    ("@shmserve.model(name='a/b')\ndef f(x): ...", "line 2: 'a/b' cannot be the name of a model"),
    (
        "@shmserve.model\ndef f(x): ...\n@shmserve.model(name='f')\ndef g(x): ...",
        "line 4: model 'f' is defined twice",
    ),
    ("def g():\n    @shmserve.model\n    def f(x): ...", "line 4: 'f' must be defined at the top level"),
    ("@shmserve.model\ndef f(x): ...\nclass TritonPythonModel: ...", "keep one form"),
)
def test_invalid_decorators_are_refused(body: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        found(tmp_path, f"import shmserve\n{body}")
    assert text in str(caught.value)
