"""Backends in the backend directory: the example of docs/backends.md in a server, and invalid backends."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

import shmserve
from shmserve.broker.config import settings
from shmserve.clients.cli import main
from shmserve.errors import InvalidRequest, Unsupported
from shmserve.extras import install_command
from shmserve.repo.backends import DIRECTORY, backend_directory_problem, folder_of, installed
from shmserve.repo.config.complete import can_complete
from shmserve.repo.config.schema import ModelConfig, ModelParameter
from shmserve.workers.backends import Context, registry
from shmserve.workers.backends.registry import from_directory
from tests.support.docs import pages
from tests.support.launch import Launched
from tests.support.workers.worker_harness import WorkerProcess, config, work

PAGE = pages.page("backends")
WEIGHTS = np.array([[1, 2], [3, 4], [5, 6]], np.float32)


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores what importing a backend changes in this process."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "beside", raising=False)


def block(begin: str) -> str:
    (found,) = [text for text in pages.blocks(PAGE) if text.startswith(begin)]
    return found


def backend_of_the_page(folder: Path) -> Path:
    text = block("# backends/linear/backend.py")
    assert len(text.splitlines()) <= 40
    (folder / "linear").mkdir(parents=True)
    (folder / "linear" / "backend.py").write_text(text)
    return folder


def model_of_the_page(root: Path, weights: np.ndarray[tuple[int, int], np.dtype[np.float32]] = WEIGHTS) -> Path:
    (root / "lin" / "1").mkdir(parents=True)
    (root / "lin" / "config.pbtxt").write_text(block('backend: "linear"'))
    np.save(root / "lin" / "1" / "weights.npy", weights)
    return root


@pytest.mark.process
def test_the_backend_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = backend_of_the_page(tmp_path / "backends")
    models = model_of_the_page(tmp_path / "models")
    options = ("--backend-directory", str(directory), "--backend-config", "linear,scale=10")
    x = np.arange(1200, dtype=np.float32).reshape(400, 3)
    runtime = tmp_path / "run"
    with Launched(models, runtime, *options) as server, shmserve.Client(runtime_dir=runtime) as client:
        for rows in (x[:1], x[:64]):
            found = client.infer("lin", {"x": rows})
            assert np.array_equal(np.asarray(found["y"]), rows @ WEIGHTS * 10)
    assert server.code == 0
    assert main.main(["check", str(models), *options[:2]]) == 0
    assert main.main(["check", str(models)]) == 1
    assert 'found "linear", which this server does not have' in capsys.readouterr().out


def test_a_model_can_be_refused_by_the_backend(tmp_path: Path) -> None:
    kind = from_directory(str(backend_of_the_page(tmp_path)), "linear")
    assert kind is not None
    context = Context("m", 1, "m_0_0", tmp_path, tmp_path, {})
    with pytest.raises(shmserve.ServeError, match="model 'm' has no file weights"):
        kind(context).load(ModelConfig(name="m"))


@pytest.mark.process
def test_the_python_based_backend_of_the_page(tmp_path: Path) -> None:
    for name in ("model.py", "utils/text.py"):
        path = tmp_path / "backends" / "repeat" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block(f"# backends/repeat/{name}"))
    files = re.findall(r"`(models/shout/.*?)` is `(.*?)`[.,]", PAGE)
    assert len(files) == 2
    for name, text in files:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with (
        Launched(tmp_path / "models", tmp_path / "run", "--backend-directory", str(tmp_path / "backends")),
        shmserve.Client(runtime_dir=tmp_path / "run") as client,
    ):
        found = client.infer("shout", {"text": np.array(["hey"], object)}, timeout=60)
    assert found["texts"].tolist() == [b"hey"] * 3


SCALE = """\
import os
import numpy as np
import triton_python_backend_utils as pb_utils
import helper


class TritonPythonModel:
    def initialize(self, args):
        path = os.path.join(args["model_repository"], args["model_version"], "scale.npy")
        self.scale = helper.number(path)

    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x * self.scale)]) for x in inputs]
"""


STACKED = """
    def execute(self, inputs):
        return {"y": inputs["x"] * self.scale}
"""


@pytest.mark.process
@pytest.mark.parametrize("stacked", ["false", "true"])
def test_a_backend_in_model_py_serves_all_its_models(tmp_path: Path, stacked: str) -> None:
    source = SCALE if stacked == "false" else SCALE.partition("    def execute")[0] + STACKED
    (tmp_path / "backends" / "scale").mkdir(parents=True)
    (tmp_path / "backends" / "scale" / "model.py").write_text(source)
    helper = "import numpy as np\n\n\ndef number(path):\n    return np.load(path)[0]\n"
    (tmp_path / "backends" / "scale" / "helper.py").write_text(helper)
    assert installed(tmp_path / "backends") - installed() == {"scale"}
    settings = {DIRECTORY: str(tmp_path / "backends")}
    given = config("scale", {"x": ("FP32", (3,))}, {"y": ("FP32", (3,))}, max_batch=4)
    given = replace(given, parameters={"stacked": ModelParameter(string_value=stacked)})
    (tmp_path / "m" / "1").mkdir(parents=True)
    np.save(tmp_path / "m" / "1" / "scale.npy", np.array([7], np.float32))
    x = np.array([[1, 2, 3]], np.float32)
    with WorkerProcess(given, tmp_path / "m", settings=settings) as worker:
        worker.loaded()
        (row,) = worker.run(work(1, worker.tensor("x", x)))
        assert row.error is None, row.error
        assert worker.array(row.outputs[0], np.float32).tolist() == [[7, 14, 21]]


def test_names_of_installed_backends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend_of_the_page(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "backend.py").write_text("")
    assert installed(tmp_path) - installed() == {"linear"}
    assert backend_directory_problem(tmp_path) == ""
    with pytest.raises(Unsupported, match="unknown backend 'other'; known are: dali, fil, identity, linear, "):
        registry.find("other", str(tmp_path))
    (tmp_path / "pytorch").mkdir()
    (tmp_path / "pytorch" / "model.py").write_text("")
    assert backend_directory_problem(tmp_path) == ""
    assert folder_of("pytorch", tmp_path) is None
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "backend.py").write_text("")
    assert "has a backend 'python', the name of a built-in backend" in backend_directory_problem(tmp_path)
    assert "is not a directory" in backend_directory_problem(tmp_path / "nowhere")


def test_the_backend_directory_must_be_a_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "file").touch()
    found = settings.parse(["--model-repository", ".", "--backend-directory", "mine"])
    assert settings.backend_settings(found)[DIRECTORY] == str(tmp_path / "mine")
    with pytest.raises(SystemExit):
        settings.parse(["--model-repository", ".", "--backend-directory", "file"])
    assert "--backend-directory file is not a directory" in capsys.readouterr().err


ONE = "from shmserve.workers.backends import StackedBackend, SeparateBackend\nclass One(StackedBackend): pass\n"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (ONE, "One"),
        (ONE + "class Two(One): pass\n", "Two"),
        (ONE + "class Two(SeparateBackend): pass\n", "it has 2: One, Two"),
        ("from shmserve.workers.backends import StackedBackend\n", "it has none"),
        ("class One: pass\n", "it has none"),
    ],
    ids=["one", "derived", "two", "imported", "other"],
)
def test_the_backend_class_is_found_in_backend_py(tmp_path: Path, text: str, name: str) -> None:
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


@pytest.mark.parametrize(
    ("name", "library", "extra"),
    [("onnxruntime", "onnxruntime", "server"), ("pytorch", "torch", "torch"), ("openvino",) * 3,
     ("tensorflow",) * 3, ("tflite", "ai_edge_litert", "tflite"), ("dali", "nvidia", "dali")],
)  # fmt: skip
def test_a_missing_library_is_named_with_its_extra(
    name: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = {"onnx": ["backend"], "pytorch": ["backend", "programs", "device"]}
    packages["tensorflow"] = ["backend", "engine", "files", "sessions"]
    modules = [f"{package}.{module}" for package, names in packages.items() for module in names]
    for module in (*modules, "dali", "openvino", "tflite"):
        monkeypatch.delitem(sys.modules, f"shmserve.workers.backends.{module}", raising=False)
    for loaded in [loaded for loaded in sys.modules if loaded.startswith(f"{library}.")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(Unsupported, match=rf"'{name}' needs a package.*{re.escape(install_command(extra))}"):
        registry.find(name)


@pytest.mark.parametrize(
    ("backend", "file", "known"),
    [("pytorch", "model.pt", False), ("pytorch", "model.pt2", True), ("openvino", "", True), ("linear", "", True),
     ("identity", "", False)],
)  # fmt: skip
def test_backends_that_can_complete_a_configuration(backend: str, file: str, known: bool) -> None:
    assert can_complete(ModelConfig(name="m", backend=backend, default_model_filename=file)) == known


def test_the_page_shows_the_error_of_a_missing_library() -> None:
    assert "backend 'pytorch' needs a package that is not installed (No module named 'torch'): .venv/bin/pip" in PAGE
