"""Models for the tests of `check`, and its findings as text."""

from __future__ import annotations

from pathlib import Path

from shmserve.repo.check import Checked, CheckFinding, check
from shmserve.repo.onnx.protobuf import Node, wrapped

BACKENDS = ("identity", "onnxruntime", "python")
TENSOR = "data_type: TYPE_FP32 dims: [ 3 ]"
GOOD = f"""backend: "identity"
max_batch_size: 8
input [ {{ name: "x" {TENSOR} }} ]
output [ {{ name: "y" {TENSOR} }} ]
"""
PYTHON = """backend: "python"
input [ { name: "x" data_type: TYPE_FP32 dims: [ 3 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 3 ] } ]
"""
SOURCE = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"


def network(batch: int | str = "batch") -> bytes:
    """An ONNX file of y = x, with the inputs and outputs of GOOD."""
    return wrapped(b"\x3a\x00", [Node("Identity", ["x"], ["y"])], [], {"x": (batch, 3)}, {"y": (batch, 3)}, {})


Files = dict[str, str | bytes]


def model(root: Path, name: str, config: str = GOOD, files: Files | None = None, version: str = "1") -> Path:
    folder = root / name
    (folder / version).mkdir(parents=True)
    for file, text in {"config.pbtxt": config, **(files or {})}.items():
        path = folder / file
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def run(*roots: Path, config_name: str = "") -> Checked:
    return check(roots, backends=BACKENDS, config_name=config_name)


def line_of(finding: CheckFinding) -> str:
    place = f"{finding.file}:{finding.line}" if finding.line else finding.file
    return ": ".join(part for part in (finding.severity, place, finding.path, finding.text) if part)


def lines(checked: Checked) -> list[str]:
    return [line_of(finding) for finding in checked.all()]


ENSEMBLE = f"""platform: "ensemble"
max_batch_size: 4
input [ {{ name: "IN" {TENSOR} }} ]
output [ {{ name: "OUT" {TENSOR} }} ]
ensemble_scheduling {{
  step [
    {{
      model_name: "good"
      model_version: -1
      input_map {{ key: "x" value: "IN" }}
      output_map {{ key: "y" value: "OUT" }}
    }}
  ]
}}
"""
STEP = "ensemble_scheduling.step[0]"
