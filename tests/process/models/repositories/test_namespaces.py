"""Models of the same name in two repositories (--model-namespacing), over HTTP as Triton's clients use it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from shmserve.testing import ANY_PORTS, Server
from tests.support.ensemble_models import ensemble
from tests.support.gateway.served_gateways import ask
from tests.support.living import generation, write

pytestmark = pytest.mark.process

FULL_ACCESS = ("--http-roles", "infer,observe,operate")
CALLING = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "x")
        response = pb_utils.InferenceRequest(model_name="m", inputs=[x], requested_output_names=["y"]).exec()
        if response.has_error():
            return pb_utils.InferenceResponse(error=response.error())
        y = pb_utils.get_output_tensor_by_name(response, "y").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", y + 10 * pb_utils.is_model_ready("m"))])
"""
X = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}]}


class Caller:
    def __init__(self, address: str) -> None:
        self._port = int(address.rpartition(":")[2])

    def post(self, path: str, body: Any = None) -> Any:
        status, answer = ask(self._port, f"/v2/{path}", body or {})
        document = json.loads(answer or b"null")
        return document if status == 200 else document["error"]

    def infer(self, model: str) -> Any:
        answer = self.post(f"models/{model}/infer", X)
        return answer["outputs"][0]["data"][0] if isinstance(answer, dict) else answer


def test_ensembles_and_calls_use_the_model_of_their_own_repository(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for root, number in ((one, 1), (two, 2)):
        root.mkdir()
        generation(root, "m", number)
        write(generation(root, f"call_{root.name}", 0) / "1" / "model.py", CALLING)
        ensemble(root, f"by_{root.name}", "x", "y", "m(x:x)->(y:y)", more="max_batch_size: 8")
    options = ("--model-repository", str(two), "--model-namespacing", "true", "--model-control-mode", "explicit")
    with Server(one, *options, *ANY_PORTS, *FULL_ACCESS, gateway=True) as server:
        caller = Caller(server.endpoints["http"])
        assert caller.post("repository/models/by_one/load") is None
        assert (caller.infer("by_one"), caller.infer("m")) == (1.0, 1.0), "only one of them is loaded"
        assert caller.post("repository/models/by_two/load") is None
        assert (caller.infer("by_one"), caller.infer("by_two")) == (1.0, 2.0)
        text = (
            "There are 2 identifiers of model 'm' in global map, model namespace must be provided to resolve ambiguity"
        )
        assert caller.infer("m") == f"{text}: 'one/m', 'two/m'"
        assert (caller.infer("one%2Fm"), caller.infer("two%2Fm")) == (1.0, 2.0)
        assert [caller.post(f"repository/models/call_{name}/load") for name in ("one", "two")] == [None, None]
        assert (caller.infer("call_one"), caller.infer("call_two")) == (11.0, 12.0)
        index = caller.post("repository/index")
        assert [entry["name"] for entry in index] == ["by_one", "call_one", "m", "by_two", "call_two", "m"]

        shutil.move(one / "m", tmp_path / "m")
        assert caller.post("repository/models/by_one/load") is None
        assert (caller.infer("by_one"), caller.infer("by_two"), caller.infer("m")) == (2.0, 2.0, 2.0)
        assert caller.infer("call_one") == 12.0, "the only one"
        shutil.move(tmp_path / "m", one / "m")
        assert caller.post("repository/models/m/load") is None
        assert (caller.infer("by_one"), caller.infer("by_two")) == (1.0, 2.0)
        assert caller.post("repository/models/m/unload") is None
        assert "depends on 'm' which has no loaded version" in caller.infer("by_one")
