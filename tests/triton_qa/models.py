"""The model repositories that the suites share, written by the checkout's own generators (qa/common/gen_qa_*.py)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GENERATE_S = 900
ENSEMBLES = "qa_ensemble_model_repository"


@dataclass(frozen=True)
class Generated:
    """One run of a generator."""

    script: str
    repository: str
    arguments: tuple[str, ...] = ()
    frameworks: tuple[str, ...] = ("onnx", "libtorch")
    ensembles: bool = True
    """Whether the generator also writes the ensembles of these models."""


GENERATED = (
    Generated("gen_qa_models.py", "qa_model_repository", frameworks=("onnx", "libtorch", "openvino")),
    Generated("gen_qa_models.py", "qa_variable_model_repository", ("--variable",)),
    Generated("gen_qa_identity_models.py", "qa_identity_model_repository"),
    Generated("gen_qa_reshape_models.py", "qa_reshape_model_repository", ("--variable",)),
    Generated("gen_qa_sequence_models.py", "qa_sequence_model_repository"),
    Generated("gen_qa_sequence_models.py", "qa_variable_sequence_model_repository", ("--variable",)),
    Generated("gen_qa_implicit_models.py", "qa_sequence_implicit_model_repository", ensembles=False),
    Generated("gen_qa_implicit_models.py", "qa_variable_sequence_implicit_model_repository", ("--variable",),
              ensembles=False),
    Generated("gen_qa_implicit_models.py", "qa_sequence_initial_state_implicit_model_repository",
              ("--initial-state", "zero"), ("onnx",), ensembles=False),
    Generated("gen_qa_implicit_models.py", "qa_variable_sequence_initial_state_implicit_model_repository",
              ("--initial-state", "zero", "--variable"), ("onnx",), ensembles=False),
    Generated("gen_qa_dyna_sequence_models.py", "qa_dyna_sequence_model_repository", ensembles=False),
    Generated("gen_qa_dyna_sequence_implicit_models.py", "qa_dyna_sequence_implicit_model_repository",
              frameworks=("onnx",), ensembles=False),
    Generated("gen_qa_ragged_models.py", "qa_ragged_model_repository", ensembles=False),
)  # fmt: skip
CHANGED = {
    "libtorch_zero_1_float32": {},
    "libtorch_datatype_1_float32": {
        'name: "OUTPUT__0"\n    data_type: TYPE_FP32': 'name: "OUTPUT__0"\n    data_type: TYPE_INT32'
    },
    "libtorch_index_1_float32": {"OUTPUT__0": "OUTPUT__1"},
}
"""Models of CHANGED_REPOSITORY, which no generator of the checkout writes. The first is copied from the identity
models; the others replace parts of its configuration."""
CHANGED_REPOSITORY = "libtorch_model_store2"
SCALARS = ("gen_qa_ort_scalar_models.py", "qa_scalar_models")


def commands(target: Path) -> Iterator[tuple[str, list[str]]]:
    """Each repository and its generator's command line."""
    for one in GENERATED:
        for framework in one.frameworks:
            opset = ["--onnx_opset=0"] if framework == "onnx" else []
            words = [one.script, f"--{framework}", *opset, *one.arguments, f"--models_dir={target / one.repository}"]
            yield f"{one.repository} ({framework})", words
        if one.ensembles:
            folder = target / ENSEMBLES / one.repository
            variable = [] if "reshape" in one.script else list(one.arguments)
            yield f"{ENSEMBLES}/{one.repository}", [one.script, "--ensemble", *variable, f"--models_dir={folder}"]
    yield SCALARS[1], [SCALARS[0], "--onnx_opset=0", f"--models_dir={target / SCALARS[1]}"]


def generate(common: Path, target: Path) -> None:
    """Generates all models. Failures are reported, and the suites that need those models fail."""
    done = target / ".made"
    if done.exists():
        return
    target.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    for name, words in commands(target):
        Path(words[-1].partition("=")[2]).mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(Path(__file__).with_name("generator.py")), *words]
        found = subprocess.run(
            command, cwd=common, env=environment, capture_output=True, text=True, timeout=GENERATE_S, check=False
        )
        if found.returncode:
            reason = (found.stdout + found.stderr).strip().splitlines() or [""]
            print(f"not generated: {name}: {reason[-1]}", file=sys.stderr)
    _change(target)
    for path in target.rglob("config.pbtxt"):
        path.write_text(path.read_text().replace("KIND_GPU", "KIND_CPU"))
    done.touch()


def _change(target: Path) -> None:
    original = next(iter(CHANGED))
    source = target / "qa_identity_model_repository" / original
    if not source.is_dir():
        print(f"not generated: {CHANGED_REPOSITORY}: there is no {source.name}", file=sys.stderr)
        return
    for name, replaced in CHANGED.items():
        folder = target / CHANGED_REPOSITORY / name
        shutil.copytree(source, folder)
        config = (folder / "config.pbtxt").read_text()
        for old, new in {f'"{original}"': f'"{name}"', **replaced}.items():
            if old not in config:
                raise SystemExit(f"the configuration of {original} has no {old!r}")
            config = config.replace(old, new)
        (folder / "config.pbtxt").write_text(config)
