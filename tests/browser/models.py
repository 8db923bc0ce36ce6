"""The models of the browser tests. A test can compute the response of each."""

from __future__ import annotations

from pathlib import Path

from tests.support.model_files import write_model

_HEAD = """
import os

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.one(pb_utils.get_input_tensor_by_name(request, "x").as_numpy()) for request in requests]

    def answer(self, y):
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", y)])

    def one(self, x):
"""
TALKER = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            words = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            if b"fail" in words:
                raise ValueError("it was told to fail")
            for at in range(len(words)):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", words[at : at + 1])]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
"""Responds with the words of the request, one after another."""
LABELS = ("red", "green", "blue")
HOSTILE = "<img id=injected src=x onerror=alert(1)> & 'no'"


def _python(repository: Path, name: str, config: str, body: str) -> None:
    source = _HEAD + "".join(f"        {line}\n" for line in body.splitlines())
    write_model(repository, name, f'name: "{name}" backend: "python"\n{config}', source)


def _tensors(x: str, y: str) -> str:
    return f'input [ {{ name: "x" {x} }} ]\noutput [ {{ name: "y" {y} }} ]\n'


def write_models(repository: Path) -> None:
    one = "data_type: TYPE_FP32 dims: [ 2 ]"
    write_model(
        repository,
        "numbers",
        f'name: "numbers" backend: "identity" max_batch_size: 8 dynamic_batching {{ }}\n{_tensors(one, one)}',
    )
    text = "data_type: TYPE_STRING dims: [ -1 ]"
    write_model(repository, "words", f'name: "words" backend: "identity"\n{_tensors(text, text)}')
    # The share of each colour in a picture. Only with the right layout are these the colours of the picture.
    picture = "data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, 32, 24 ]"
    shares = 'data_type: TYPE_FP32 dims: [ 3 ] label_filename: "labels.txt"'
    _python(
        repository, "colours", f"max_batch_size: 4\n{_tensors(picture, shares)}", "return self.answer(x.mean((2, 3)))"
    )
    (repository / "colours" / "labels.txt").write_text("\n".join(LABELS) + "\n")
    raw = "data_type: TYPE_UINT8 dims: [ -1, -1, 3 ]"
    _python(repository, "negative", _tensors(raw, raw), "return self.answer(255 - x)")
    failing = (
        f"if x.ravel()[0] == -1:\n    raise ValueError({HOSTILE!r})\n"
        "if x.ravel()[0] < -1:\n    os.abort()\nreturn self.answer(x)"
    )
    _python(repository, "moody", f"max_batch_size: 8\n{_tensors(one, one)}", failing)
    steps = "".join(
        f'step {{ model_name: "{model}" model_version: -1 input_map {{ key: "x" value: "{x}" }} '
        f'output_map {{ key: "y" value: "{y}" }} }}\n'
        for model, x, y in (("numbers", "x", "middle"), ("moody", "middle", "y"))
    )
    stream = f"model_transaction_policy {{ decoupled: true }}\n{_tensors(text, text)}"
    write_model(repository, "talker", f'name: "talker" backend: "python"\n{stream}', TALKER)
    write_model(
        repository,
        "pipeline",
        f'name: "pipeline" platform: "ensemble" max_batch_size: 8\n{_tensors(one, one)}'
        f"ensemble_scheduling {{ {steps} }}\n",
    )
