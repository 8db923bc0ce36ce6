"""Calls of processes that a model has forked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import shmserve
from tests.support.ensemble_models import config_text
from tests.support.launch import identity
from tests.support.model_files import write_model

pytestmark = pytest.mark.process

CONFIG = config_text("python", "x:FP32:[1]", "y:FP32:[4]")
MODEL = """
import asyncio
from multiprocessing import get_context

import numpy as np
import triton_python_backend_utils as pb_utils


def request(model, value):
    return pb_utils.InferenceRequest(model, ["y"], [pb_utils.Tensor("x", np.full((1, 1), value, np.float32))])


def value_of(response):
    if response.has_error():
        return -1 if "none" in response.error().message() else -2
    return float(pb_utils.get_output_tensor_by_name(response, "y").as_numpy()[0, 0])


def exec_(value):
    return value_of(request("same", value).exec())


def exec_soon(value):
    return value_of(asyncio.run(request("same", value).async_exec()))


def exec_parts(value):
    (response,) = request("same", value).exec(decoupled=True)
    return value_of(response)


def unknown(value):
    return value_of(request("none", value).exec())


class TritonPythonModel:
    def execute(self, requests):
        found = []
        with get_context("fork").Pool(2) as pool:  # ends its processes by SIGTERM
            for ask in (exec_, exec_soon, exec_parts, unknown):
                found += pool.map(ask, [len(found) + 5])
        y = pb_utils.Tensor("y", np.array(found, np.float32))
        return [pb_utils.InferenceResponse([y]) for _ in requests]
"""


def test_processes_of_a_pool_call_models(root: Path, client: shmserve.Client) -> None:
    identity(root, "same")
    write_model(root, "forking", CONFIG, MODEL)
    for name in ("same", "forking"):
        client.load(name)
    answer: shmserve.Result = client.infer("forking", {"x": np.zeros(1, np.float32)})
    assert answer["y"].tolist() == [5, 6, 7, -1]
