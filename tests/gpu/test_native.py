"""A backend in C on a GPU: memory that it gets from the server, and tensors that it reads and writes there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import shmserve
from shmserve.testing import Server
from tests import ROOT
from tests.gpu.gpu_models import FACTS, WHERE, WIDTH, gpu_model, numbers
from tests.support import ensemble_models
from tests.support.model_files import parameters, write_model
from tests.support.workers.native_backends import compiled, model

pytestmark = [pytest.mark.gpu, pytest.mark.process]
GPU = 2
CONFIG = """
backend: "probe" max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: -1 } output { name: "OUT" data_type: TYPE_FP32 dims: -1 }
instance_group { kind: KIND_GPU gpus: 0 }
"""
STEPS = f"""
platform: "ensemble" max_batch_size: 8
input {{ name: "x" data_type: TYPE_FP32 dims: {WIDTH} }} output {{ name: "y" data_type: %s }}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, cupy: Any) -> Iterator[Server]:
    probe = ROOT / "tests" / "process" / "worker" / "native" / "backend.c"
    library = compiled(probe, tmp_path_factory.mktemp("library") / "libtriton_probe.so")
    repository = tmp_path_factory.mktemp("native")
    for name in ("one", "two"):
        model(repository, name, library, CONFIG + parameters(do="always prefer gpu"))
    gpu_model(repository, "where", WHERE, out=FACTS)
    seen = ensemble_models.steps("one(IN:x)->(OUT:between)", "where(x:between)->(y:y)")
    write_model(repository, "seen", STEPS % FACTS + seen)
    twice = ensemble_models.steps("one(IN:x)->(OUT:between)", "two(IN:between)->(OUT:y)")
    write_model(repository, "twice", STEPS % f"TYPE_FP32 dims: {WIDTH}" + twice)
    with Server(repository, "--exit-on-error", "true", start_timeout=120) as server:
        yield server


def test_memory_of_each_kind(client: shmserve.Client) -> None:
    said = client.infer("one", {"IN": numbers()}, parameters={"do": "describe"}).parameters
    assert (said["CPU"], said["CPU_PINNED"], said["GPU"]) == ("freed", "freed once", "freed once")
    assert said["instance"] == 'GPU 0 {"gpu_0":{}} 0'


def test_an_input_of_a_client_on_the_gpu_is_read_there(cupy: Any, client: shmserve.Client) -> None:
    x = client.empty((1, WIDTH), "float32", device="cuda:0")
    cupy.asarray(x)[...] = 7
    cupy.cuda.Device(0).synchronize()
    result = client.infer("one", {"IN": x})
    assert result.parameters["read"] == GPU
    assert np.unique(result["OUT"]).tolist() == [7]


def test_an_output_stays_on_the_gpu_for_the_next_step(client: shmserve.Client) -> None:
    for seed in range(4):
        (_, on_host, _), *_ = client.infer("seen", {"x": numbers(1, seed)})["y"]
        assert on_host == 0
        np.testing.assert_array_equal(client.infer("twice", {"x": numbers(2, seed)})["y"], numbers(2, seed))
