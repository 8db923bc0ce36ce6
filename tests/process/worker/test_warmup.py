"""Warm-up and labels: samples that run before a model is ready, and samples that make the load fail."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.errors import InvalidRequest
from shmserve.protocol.messages import Options, Tensor
from shmserve.repo.config.schema import ModelConfig, ModelWarmup, ModelWarmupInput
from shmserve.shm.strings import encode_bytes
from shmserve.workers.backends.base import Context
from shmserve.workers.backends.onnx.backend import Onnx
from shmserve.workers.batch.specs import inputs_of
from shmserve.workers.loading import THREADS, _threads
from shmserve.workers.process.exit_codes import Exit
from shmserve.workers.warmup import requests_of, title
from tests.support.workers.in_process import load_failure, loaded
from tests.support.workers.models.worker_models import DTYPES, identity_echo, python_model
from tests.support.workers.worker_harness import WorkerProcess, config, config_name, running, work

RECORDER = """\
import json
import os

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    \"\"\"Says what it was called with when it is asked; outputs are large.\"\"\"

    def initialize(self, args):
        self.calls = []

    def execute(self, requests):
        if json.loads(requests[0].parameters()).get("tell"):
            return [pb_utils.InferenceResponse([], None, {"calls": json.dumps(self.calls)})]
        self.calls.append([self.described(request) for request in requests])
        y = pb_utils.Tensor("y", np.zeros((1, 5000), np.float32))
        return [pb_utils.InferenceResponse([y]) for _ in requests]

    def described(self, request):
        found = {}
        for tensor in request.inputs():
            array = tensor.as_numpy()
            values = [repr(value) for value in array.ravel()[:4].tolist()]
            found[tensor.name()] = [list(array.shape), str(array.dtype), values, bool(array.any())]
        return found

    def finalize(self):
        print("finalized")
"""


def sample(name: str, batch_size: int, count: int = 0, **inputs: ModelWarmupInput) -> ModelWarmup:
    return ModelWarmup(name=name, batch_size=batch_size, inputs=inputs, count=count)


def data(dtype: str, *dims: int, **what: Any) -> ModelWarmupInput:
    return ModelWarmupInput(data_type=f"TYPE_{config_name(dtype)}", dims=dims, **what)  # type: ignore[arg-type]


def recorder(folder: Path, *samples: ModelWarmup, dtype: str = "FP32", max_batch: int = 4) -> ModelConfig:
    python_model(folder, RECORDER)
    x = {"x": (config_name(dtype), (-1,))}
    given = config("python", x, {"y": ("FP32", (-1,))}, max_batch=max_batch)
    return replace(given, model_warmup=samples)


def file(folder: Path, name: str, content: bytes) -> None:
    (folder / "warmup").mkdir(exist_ok=True)
    (folder / "warmup" / name).write_bytes(content)


def calls(given: ModelConfig, folder: Path, dtype: str = "FP32") -> Any:
    """The calls of a recorder that has been loaded."""
    request = work(1, Tensor("x", dtype, (1, 1), bytes(4)), options=Options(parameters={"tell": True}), outputs=[])
    with loaded(given, folder) as model:
        ((row,), *_) = model.runner.run([request])
    assert row.error is None, row.error
    assert row.parameters is not None
    return json.loads(str(row.parameters["calls"]))


def test_samples_run_before_the_model_is_ready(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    large = np.random.default_rng(2).random(3000, np.float32)
    file(tmp_path, "x.bin", large.tobytes())
    given = recorder(
        tmp_path,
        sample("zero", 1, x=data("FP32", 3, zero_data=True)),
        sample("skipped", 0, x=data("FP32", 3, zero_data=True)),
        sample("random", 4, 2, x=data("FP32", 2000, random_data=True)),
        sample("file", 2, 1, x=data("FP32", 3000, input_data_file="x.bin")),
    )
    found = calls(given, tmp_path)
    shapes = [[request["x"][0] for request in call] for call in found]
    assert shapes == [[[1, 3]], [[1, 2000]] * 4, [[1, 2000]] * 4, [[1, 3000]] * 2]
    assert not found[0][0]["x"][3]
    assert found[1][0] == found[1][3] == found[2][0]
    assert all(0 <= float(value) < 1 for value in found[1][0]["x"][2])
    assert found[3][1]["x"][2] == [repr(value) for value in large[:4].tolist()]
    said = capfd.readouterr().err
    assert "info: warm-up sample 'skipped' of model 'm' has batch_size 0 and is skipped" in said
    assert "info: warm-up sample 'random' of model 'm' took " in said
    assert " ms: 2 run(s) of 4 request(s)" in said


@pytest.mark.process
def test_warmup_leaves_no_memory_or_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first segment is announced with the first large output, and that output is its only block. No compiled file
    is in the repository, whatever the model imports, and when."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "helper.py").write_text("SIZE = 5000")
    given = recorder(tmp_path, sample("s", 4, 20, x=data("FP32", 3, zero_data=True)))
    python_model(
        tmp_path, RECORDER.replace("        self.calls.append(", "        import helper\n\n        self.calls.append(")
    )
    with running(given, tmp_path) as worker:
        (row,) = worker.run(work(1, Tensor("x", "FP32", (1, 1), bytes(4))))
        assert isinstance(row.outputs[0].data, tuple)
        (handle,) = row.outputs[0].data
        assert handle.offset == 0
        assert [message.segment for message in worker.maps] == [handle.segment]
        assert not list(tmp_path.glob("**/__pycache__"))


def test_samples_of_all_data_types(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    samples = [
        sample(f"{key}-{size}", 3, 0, **{f"x{dtype}": data(dtype, size, **{key: True}) for dtype in DTYPES})
        for key in ("zero_data", "random_data")
        for size in (1, 4000)
    ]
    with loaded(replace(identity_echo(tmp_path, DTYPES, (-1,), 8), model_warmup=tuple(samples)), tmp_path):
        assert capfd.readouterr().err.count(" ms: 1 run(s) of 3 request(s)") == 4


def test_strings(tmp_path: Path) -> None:
    words = np.array([b"a", b"", "é".encode()], object)
    file(tmp_path, "words", encode_bytes(words))
    given = recorder(
        tmp_path,
        sample("zero", 1, x=data("BYTES", 2, zero_data=True)),
        sample("random", 1, x=data("BYTES", 2, random_data=True)),
        sample("file", 1, x=data("BYTES", 3, input_data_file="words")),
        dtype="BYTES",
    )
    expected = [[b""] * 2, [b""] * 2, words.tolist()]
    found = [call[0]["x"][2] for call in calls(given, tmp_path, "BYTES")]
    assert found == [list(map(repr, some)) for some in expected]


@pytest.mark.process
def test_a_failed_sample_fails_the_load(tmp_path: Path) -> None:
    source = RECORDER.replace("self.calls.append(", "assert len(self.calls) < 2, 'tired'\n        self.calls.append(")
    given = recorder(tmp_path, sample("s", 1, 3, x=data("FP32", 3, zero_data=True)))
    python_model(tmp_path, source)
    with WorkerProcess(given, tmp_path) as worker:
        failed = worker.failed()
        assert worker.ended() == Exit.LOAD_FAILED
        assert not worker.maps
        log = worker.said()
    assert failed.code == "MODEL_FAILED"
    for text in ("warm-up sample 's' of model 'm' failed in run 3 of 3", "'m_0_0'", "AssertionError: tired"):
        assert text in failed.text
    assert str(tmp_path) not in failed.text
    assert "Traceback" in log
    assert "finalized" in log


ZERO = data("FP32", 3, zero_data=True)


def of_file(name: str, *dims: int) -> ModelWarmup:
    return sample("s", 1, x=data("FP32", *dims, input_data_file=name))


BAD: dict[str, tuple[ModelWarmup, str]] = {
    "dims unlike the model's": (sample("s", 1, x=data("FP32", 3, 4, zero_data=True)), "'x' has dims [3, 4]; the model"),
    "dims unknown": (sample("s", 1, x=data("FP32", -1, zero_data=True)), "[-1]: all dims of a sample must be known"),
    "type": (sample("s", 1, x=data("INT8", 3, zero_data=True)), "data_type TYPE_INT8; the model's is FP32"),
    "no type": (sample("s", 1, x=ModelWarmupInput(dims=(3,), zero_data=True)), "data_type TYPE_INVALID"),
    "no data": (sample("s", 1, x=data("FP32", 3)), "give zero_data, random_data or input_data_file"),
    "other input": (sample("s", 1, x=ZERO, z=data("FP32", 3)), "'z' is not an input of the model"),
    "no input": (sample("", 1), "warm-up sample number 0 of model 'm' lacks input(s) x"),
    "batch": (sample("s", 5, x=ZERO), "batch_size 5; max_batch_size is 4"),
    "no batches": (sample("s", 2, x=ZERO), "batch_size 2; max_batch_size is 0, so it can be 1"),
    "too much": (sample("s", 1, x=data("FP32", 1 << 60, zero_data=True)), "more than memory can hold"),
    "file short": (of_file("eight", 3), "have 12 bytes for FP32 [1, 3]; it has 8"),
    "file long": (of_file("eight", 1), "have 4 bytes for FP32 [1, 1]; it has 8"),
    "no file": (of_file("none", 3), "'x': file 'none' cannot be read: no such"),
    "file outside": (of_file("../1/model.py", 2), "without .. or a leading /"),
    "absolute file": (of_file("/etc/passwd", 2), "in the model's warmup dir"),
    "link": (of_file("link", 2), "is a link to a path outside the model's directory"),
    "directory": (of_file("sub", 2), "not a regular file"),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_samples_are_refused(tmp_path: Path, case: str) -> None:
    bad, text = BAD[case]
    folder = tmp_path / "m"
    folder.mkdir()
    file(folder, "eight", bytes(8))
    (tmp_path / "outside").write_bytes(bytes(8))
    (folder / "warmup" / "link").symlink_to(tmp_path / "outside")
    (folder / "warmup" / "sub").mkdir()
    given = recorder(folder, bad, max_batch=0 if case == "no batches" else 4)
    with pytest.raises(InvalidRequest) as found:
        requests_of(title(bad, 0), bad, given, folder, inputs_of(given))
    for words in (text, "warm-up sample", "model 'm'"):
        assert words in str(found.value)
    assert str(tmp_path) not in str(found.value)


@pytest.mark.parametrize("content", [b"\1\0\0\0a", b"\1\0\0\0a\2\0\0\0b", b"\1\0\0\0a\1\0\0\0b\1\0\0\0c"])
def test_invalid_files_of_strings_are_refused(tmp_path: Path, content: bytes) -> None:
    file(tmp_path, "words", content)
    given = recorder(tmp_path, sample("s", 1, x=data("BYTES", 2, input_data_file="words")), dtype="BYTES")
    found = load_failure(given, tmp_path)
    assert found.code == "INVALID_ARG"
    assert "warm-up sample 's' of model 'm': input 'x': file 'words'" in found.text


@pytest.mark.parametrize(("said", "threads"), [("3", 3), ("", 0), ("many", 0)])
def test_the_number_of_threads_follows_its_precedence(
    tmp_path: Path, said: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Precedence: configuration, environment variable, number of cores."""
    monkeypatch.setenv(THREADS, said)
    context = Context("m", 1, "m_0_0", tmp_path, tmp_path, {}, _threads())
    given = config("onnxruntime", {}, {})
    assert Onnx(context).planned(given).attributes["intra_op_num_threads"] == (threads or len(os.sched_getaffinity(0)))
    given = config("onnxruntime", {}, {}, parameters={"intra_op_thread_count": "5"})
    assert Onnx(context).planned(given).attributes["intra_op_num_threads"] == 5
