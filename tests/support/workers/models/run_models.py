"""Models for the tests of `shmserve run`, and how the command is started. An input chooses the failure.

The model greets; the first value of `x` selects a failure.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests import ROOT

END_S = 60

CONFIG = """
backend: "python" max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: [ 2 ] } ]
input [ { name: "who" data_type: TYPE_STRING dims: [ 1 ] optional: true } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }, { name: "greeting" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
IDENTITY = CONFIG.replace("python", "identity").replace('"greeting"', '"z"')
MODEL = """
import sys
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        print("initialize", args["model_name"], args["model_version"])

    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        who = pb_utils.get_input_tensor_by_name(request, "who")
        first = x.flat[0]
        if first == 1001:
            secret = 42
            raise LookupError("no luck today")
        if first == 1002:
            breakpoint()
        if first == 1003:
            return pb_utils.InferenceResponse([], pb_utils.TritonError("not for you"))
        if first == 1004:
            sys.exit(7)
        if first == 1005:
            x[:] = 0
        if first == 1006:
            x = x.astype(np.complex64)
        names = [[b"nobody"]] * len(x) if who is None else who.as_numpy()
        greetings = np.array([[b"hello " + name[0]] for name in names], object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x * 2), pb_utils.Tensor("greeting", greetings)])

    def finalize(self):
        print("finalize")
"""
AUTO = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "a", "data_type": "TYPE_INT32", "dims": [3]})
        config.add_output({"name": "b", "data_type": "TYPE_INT32", "dims": [3]})
        config.set_max_batch_size(0)
        return config

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("b", pb_utils.get_input_tensor_by_name(r, "a").as_numpy() + 1)])
            for r in requests
        ]
"""


def add_model(root: Path, name: str, source: str, config: str | None = CONFIG, version: int = 1) -> Path:
    folder = root / name
    (folder / str(version)).mkdir(parents=True)
    (folder / str(version) / "model.py").write_text(source)
    if config is not None:
        (folder / "config.pbtxt").write_text(config)
    return folder


def build(root: Path) -> None:
    add_model(root, "greeter", MODEL)
    add_model(root, "auto", AUTO, 'backend: "python"')
    add_model(root, "broken", MODEL.replace('print("initialize",', "self.missing("))
    add_model(root, "syntax", "class TritonPythonModel(:\n")
    add_model(root, "last", MODEL.replace('print("finalize")', "raise OSError('no end')"))
    add_model(root, "typo", MODEL, CONFIG.replace("TYPE_FP32", "TYPE_FP23"))
    add_model(root, "names", AUTO.replace("TYPE_INT32", "TYPE_INVALID"), 'backend: "python"')
    add_model(root, "identity", "", IDENTITY)
    add_model(root, "old", "", IDENTITY + "version_policy: { specific { versions: [ 1 ] } }")
    (root / "old" / "2").mkdir()
    add_model(root, "half", MODEL, CONFIG + "version_policy: { all { } }")
    (root / "half" / "2").mkdir()
    (root / "old" / "configs").mkdir()
    (root / "old" / "configs" / "large.pbtxt").write_text(IDENTITY.replace("max_batch_size: 4", "max_batch_size: 64"))


def environment() -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if not name.startswith(("SHMSERVE", "PYTHON"))}
    return found | {"PYTHONPATH": str(ROOT), "TERM": "dumb"}


def command(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "shmserve.clients.cli.main", "run", *words]
