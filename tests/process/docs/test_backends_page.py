"""Backends in the backend directory: the example of docs/backends.md in a server, and invalid backends."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

import shmserve
from shmserve.broker.config import settings
from shmserve.clients.cli import main
from shmserve.errors import InvalidRequest, Unsupported
from shmserve.extras import install_command
from shmserve.repo.backends import DIRECTORY, folder_of, installed
from shmserve.repo.config.schema import ModelConfig
from shmserve.workers.backends import Context, registry
from shmserve.workers.backends.registry import from_directory
from tests.support.cases import cases
from tests.support.docs import pages
from tests.support.launch import Launched
from tests.support.patience import PATIENCE_S

PAGE = pages.page("backends")


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores what importing a backend changes in this process."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "beside", raising=False)


def block(begin: str) -> str:
    (found,) = [text for text in pages.blocks(PAGE) if text.startswith(begin)]
    return found


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.process
def test_the_backend_of_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "backends/linear/backend.py", block("# backends/linear/backend.py"))
    write(tmp_path, "models/lin/config.pbtxt", block('backend: "linear"'))
    (tmp_path / "models" / "lin" / "1").mkdir()
    weights = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    monkeypatch.chdir(tmp_path)
    assert main.main(["check", "models"]) == 1
    assert 'found "linear", which this server does not have' in capsys.readouterr().out
    kind = from_directory("backends", "linear")
    assert kind is not None
    with pytest.raises(shmserve.ServeError, match=r"model 'm' has no file 'model\.npy'"):
        kind(Context("m", 1, "m_0_0", tmp_path, tmp_path, {})).load(ModelConfig(name="m"))
    np.save(tmp_path / "models" / "lin" / "1" / "model.npy", weights)
    assert main.main(["check", "models", "--backend-directory", "backends"]) == 0
    options = ("--backend-directory", "backends", "--backend-config", "linear,scale=10")
    x = np.arange(192, dtype=np.float32).reshape(64, 3)
    with (
        Launched(Path("models"), tmp_path / "run", *options) as server,
        shmserve.Client(runtime_dir=tmp_path / "run") as client,
    ):
        for rows in (x[:1], x):
            assert np.array_equal(np.asarray(client.infer("lin", {"x": rows})["y"]), rows @ weights * 10)
    assert server.code == 0


@pytest.mark.process
def test_the_python_based_backend_of_the_page(tmp_path: Path) -> None:
    for name in ("model.py", "utils/text.py"):
        write(tmp_path, f"backends/repeat/{name}", block(f"# backends/repeat/{name}"))
    files = re.findall(r"`(models/shout/.*?)` is `(.*?)`[.,]", PAGE)
    assert len(files) == 2
    for name, text in files:
        write(tmp_path, name, text)
    with (
        Launched(tmp_path / "models", tmp_path / "run", "--backend-directory", str(tmp_path / "backends")),
        shmserve.Client(runtime_dir=tmp_path / "run") as client,
    ):
        found = client.infer("shout", {"text": np.array(["hey"], object)}, timeout=PATIENCE_S)
    assert found["texts"].tolist() == [b"hey"] * 3


def test_names_of_installed_backends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert registry.find("vllm", str(tmp_path)).__name__ == "Vllm"
    for name in ("linear/backend.py", ".hidden/backend.py", "empty/x", "pytorch/model.py", "vllm/model.py", "file"):
        write(tmp_path, name, "")
    assert installed(tmp_path) - installed() == {"linear"}
    assert folder_of("pytorch", tmp_path) is None
    assert folder_of("vllm", tmp_path) == tmp_path / "vllm"
    assert registry.find("vllm", str(tmp_path)).__name__ == "PythonBased", "Triton's replaces the built-in one"
    with pytest.raises(Unsupported, match="unknown backend 'other'; known are: dali, fil, identity, linear, "):
        registry.find("other", str(tmp_path))
    monkeypatch.chdir(tmp_path.parent)
    found = settings.parse(["--model-repository", ".", "--backend-directory", tmp_path.name])
    assert settings.backend_settings(found)[DIRECTORY] == str(tmp_path)
    write(tmp_path, "python/backend.py", "")
    for place, text in (
        (tmp_path, "has a backend 'python', the name of a built-in backend"),
        (tmp_path / "file", "file is not a directory"),
    ):
        with pytest.raises(SystemExit):
            settings.parse(["--model-repository", ".", "--backend-directory", str(place)])
        assert text in capsys.readouterr().err


ONE = "from shmserve.workers.backends import Backend\nRows = list[int]\nclass One(Backend): pass\n"


@cases(
    (ONE, "One"),
    (ONE + "class Two(One): pass\n", "Two"),
    (ONE + "class Two(Backend): pass\n", "it has 2: One, Two"),
    ("from shmserve.workers.backends import Backend\n", "it has none"),
    ("class One: pass\n", "it has none"),
    ids=["one", "derived", "two", "imported", "other"],
)
def test_the_backend_class_is_found_in_backend_py(text: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "beside.py").touch()
    (tmp_path / "mine" / "backend.py").write_text(f"import beside\n{text}")
    if " " not in name:
        found = from_directory(str(tmp_path), "mine")
        assert found is not None
        assert found.__name__ == name
        assert not list(tmp_path.glob("**/__pycache__")), "nothing is written there"
        return
    with pytest.raises(InvalidRequest, match=name):
        from_directory(str(tmp_path), "mine")


@cases(
    ("onnxruntime", "onnxruntime", "server", "onnx"),
    ("pytorch", "torch", "torch", "pytorch"),
    ("openvino", "openvino", "openvino", "openvino"),
    ("tensorflow", "tensorflow", "tensorflow", "tensorflow"),
    ("tflite", "ai_edge_litert", "tflite", "tflite"),
    ("dali", "nvidia", "dali", "dali"),
)
def test_a_missing_library_is_named_with_its_extra(
    name: str, library: str, extra: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten = f"{library}.", f"shmserve.workers.backends.{package}"
    for loaded in [loaded for loaded in sys.modules if loaded.startswith(forgotten)]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(Unsupported, match=rf"'{name}' needs a package.*{re.escape(install_command(extra))}"):
        registry.find(name)
