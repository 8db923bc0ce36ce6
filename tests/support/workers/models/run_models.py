"""Models for the tests of `shmserve run`, and how the command is started. An input chooses the failure.

The model greets; the first value of `x` selects a failure.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tests import ROOT
from tests.support.commands import COMMAND
from tests.support.model_files import write_model

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


def build(root: Path) -> None:
    auto, old = 'backend: "python"', IDENTITY + "version_policy: { specific { versions: [ 1 ] } }"
    write_model(root, "greeter", CONFIG, MODEL)
    write_model(root, "auto", auto, AUTO)
    write_model(root, "broken", CONFIG, MODEL.replace('print("initialize",', "self.missing("))
    write_model(root, "syntax", CONFIG, "class TritonPythonModel(:\n")
    write_model(root, "last", CONFIG, MODEL.replace('print("finalize")', "raise OSError('no end')"))
    write_model(root, "typo", CONFIG.replace("TYPE_FP32", "TYPE_FP23"), MODEL)
    write_model(root, "names", auto, AUTO.replace("TYPE_INT32", "TYPE_INVALID"))
    write_model(root, "identity", IDENTITY)
    write_model(root, "old", old)
    write_model(root, "half", CONFIG + "version_policy: { all { } }", MODEL)
    for name in ("half/2", "old/2", "old/configs"):
        (root / name).mkdir()
    (root / "old" / "configs" / "large.pbtxt").write_text(IDENTITY.replace("max_batch_size: 4", "max_batch_size: 64"))


def environment() -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if not name.startswith(("SHMSERVE", "PYTHON"))}
    return found | {"PYTHONPATH": str(ROOT), "TERM": "dumb"}


def command(words: Sequence[str]) -> list[str]:
    return [*COMMAND, "run", *words]
