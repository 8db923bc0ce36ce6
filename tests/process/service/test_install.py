"""What users get: a wheel built from a clean clone of HEAD, installed into an empty environment outside the checkout.

Its dependencies are not downloaded again: a .pth file shows the new environment those of this one. A .pth file in a
folder that a .pth file names is not followed, so that the editable install of the checkout is not seen there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("wheel")]

ENGINES = ("onnxruntime", "onnx", "torch", "tensorflow", "tensorrt", "openvino", "cupy")
MODULES = """
import json, sys
import shmserve
shmserve.Client, shmserve.AsyncClient, shmserve.ServeError
print(json.dumps({"file": shmserve.__file__, "version": shmserve.__version__, "modules": sorted(sys.modules)}))
"""
SAMPLES = """
import sys
from pathlib import Path
from shmserve.repo import ocr, samples
print(samples.EXAMPLES)
print(*samples.build(Path(sys.argv[1]), lambda line: None))
print(ocr.sample_picture().shape)
assert "onnx" not in sys.modules
"""
CONFIG = """
import shmserve.repo.config.protos as protos
print(protos.new_config().DESCRIPTOR.full_name)
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Outside the checkout, and knowing nothing of it from the environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_"))}
    ended = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", place / "venv", cwd=place)
    found = place / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", found, "--quiet", "--disable-pip-version-check", "--no-input")
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=place)
    site = Path(run(found, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=place).strip())
    (site / "dependencies.pth").write_text(
        "\n".join(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))
    )
    return found


def test_the_wheel_has_every_file(wheel: Path) -> None:
    packaged = set(zipfile.ZipFile(wheel).namelist())
    clone = wheel.parent / "clone"
    missing = set()
    for folder in ("shmserve", "workers", "repo", "clients"):
        for path in (clone / folder).rglob("*"):
            name = path.relative_to(clone).as_posix()
            if path.is_file() and not path.is_symlink() and not name.startswith("repo/examples/make_"):
                expected = name if folder == "shmserve" else f"shmserve/{name}"
                if expected not in packaged:
                    missing.add(name)
    assert not missing
    assert "shmserve/py.typed" in packaged
    assert any(name.endswith("/LICENSE") for name in packaged)
    assert not [name for name in packaged if name.startswith(("tests/", "bench/", "workers/", "repo/", "clients/"))]


def test_importing_the_client_is_light(python: Path, tmp_path: Path) -> None:
    found = json.loads(run(python, "-c", MODULES, cwd=tmp_path))
    assert Path(found["file"]).is_relative_to(python.parents[1])
    assert found["version"] == "0.1.0"
    tops = {name.partition(".")[0] for name in found["modules"]}
    assert not tops & set(ENGINES)
    assert "google.protobuf" not in found["modules"]
    assert not [
        name for name in found["modules"] if name.startswith(("shmserve.broker", "shmserve.workers", "shmserve.core"))
    ]


def test_the_command(python: Path, tmp_path: Path) -> None:
    command = python.with_name("shmserve")
    assert "0.1.0" in run(command, "version", cwd=tmp_path)
    assert "serve" in run(command, "--help", cwd=tmp_path)


def test_the_samples_come_from_the_wheel(python: Path, tmp_path: Path) -> None:
    examples, names, shape = run(python, "-c", SAMPLES, tmp_path / "samples", cwd=tmp_path).splitlines()
    assert Path(examples).is_relative_to(python.parents[1])
    assert {"add_sub", "cnn", "mlp"} <= set(names.split())
    assert shape == "(48, 800, 3)"


def test_configurations_can_be_read_there(python: Path, tmp_path: Path) -> None:
    assert run(python, "-c", CONFIG, cwd=tmp_path).strip() == "inference.ModelConfig"
