"""Model directories of tests with real servers: `config.pbtxt`, and the source of Python models."""

from __future__ import annotations

import textwrap
from pathlib import Path

PYTHON_MODEL = """
import ctypes
import json
import os
import random
import select
import signal
import sys
import threading

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
{initialize}

    def execute(self, requests):
        return [self.one(request, pb_utils.get_input_tensor_by_name(request, "x").as_numpy()) for request in requests]

    def respond(self, y):
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", y)])

    def one(self, request, x):
{body}
"""


def python_model(body: str, initialize: str = "pass") -> str:
    """The source of a Python model with the input "x" and the output "y".

    `body` returns the response to one request and may use `self.respond(y)`.
    """
    return PYTHON_MODEL.format(initialize=_method_body(initialize), body=_method_body(body))


def _method_body(text: str) -> str:
    return textwrap.indent(textwrap.dedent(text).strip(), 8 * " ")


def parameters(**values: str) -> str:
    return "".join(
        f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n' for key, value in values.items()
    )


def write_model(root: Path, name: str, config: str, source: str = "") -> Path:
    """Writes a model with version 1 into the repository `root`; `source` is the text of its model.py."""
    folder = root / name
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)
    if source:
        (folder / "1" / "model.py").write_text(source)
    return folder
