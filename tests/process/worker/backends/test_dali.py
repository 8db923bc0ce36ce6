"""Pipelines of DALI: images of different sizes in one batch, what pipelines declare, and errors. All on the CPU.

The oracle for images is OpenCV: a PNG decodes to the pixels that were encoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.protocol.messages import Tensor
from shmserve.protocol.worker_messages import Row
from shmserve.repo.config.schema import ModelConfig
from shmserve.testing import Server
from tests.support.cases import cases
from tests.support.docs import pages
from tests.support.stopped import stopped
from tests.support.workers.in_process import completed, load_failure
from tests.support.workers.models import dali_models
from tests.support.workers.models.dali_models import pipeline, source
from tests.support.workers.models.worker_models import on_gpu
from tests.support.workers.worker_harness import WorkerProcess, assert_failed, config, running, work

if not dali_models.INSTALLED:
    pytest.skip("nvidia-dali is not installed: `make test-engines` has it", allow_module_level=True)
from shmserve.workers.backends.dali import DaliPort, DescribedPipeline, described

cv2 = pytest.importorskip("cv2")

Array = np.ndarray[Any, np.dtype[Any]]
X, Y = {"x": ("FP32", (-1,))}, {"y": ("FP32", (-1,))}
SIDE = 8


def image(height: int, width: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def png(pixels: Array) -> bytes:
    return bytes(cv2.imencode(".png", pixels[:, :, ::-1])[1].tobytes())


def decoding(fn: Any, types: Any) -> Any:
    """The upper left corner of an image, and the size of the image."""
    decoded = fn.decoders.image(source(fn, types, "image", "UINT8", 1), device="cpu", output_type=types.RGB)
    return fn.crop(decoded, crop=[SIDE, SIDE], crop_pos_x=0.0, crop_pos_y=0.0), decoded.shape()


def image_config(kind: str, dims: tuple[int, ...]) -> ModelConfig:
    """The outputs have other names than in the pipeline, since only their order matters."""
    found = config(
        "dali", {"image": (kind, dims)}, {"corner": ("UINT8", (SIDE, SIDE, 3)), "size": ("INT64", (3,))}, max_batch=8
    )
    return replace(found, input=(replace(found.input[0], allow_ragged_batch=kind == "UINT8"),))


def text(*files: bytes) -> Tensor:
    data = b"".join(len(file).to_bytes(4, "little") + file for file in files)
    return Tensor("image", "BYTES", (len(files), 1), data)


def raw(file: bytes) -> Tensor:
    return Tensor("image", "UINT8", (1, len(file)), file)


def assert_decoded(worker: WorkerProcess, row: Row, *pictures: Array) -> None:
    assert row.error is None, row.error
    corner, size = row.outputs
    found = worker.array(corner, np.uint8)
    assert np.array_equal(found, np.stack([picture[:SIDE, :SIDE] for picture in pictures]))
    assert worker.array(size, np.int64).tolist() == [list(picture.shape) for picture in pictures]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    folder = tmp_path_factory.mktemp("model")
    pipeline(folder, decoding)
    with running(image_config("STRING", (1,)), folder) as worker:
        yield worker


@pytest.mark.process
def test_encoded_images_of_different_sizes_in_one_batch(decoder: WorkerProcess) -> None:
    pictures = [image(8 + 3 * number, 20 - number, number) for number in range(5)]
    files = [png(picture) for picture in pictures]
    rows = decoder.run(work(1, text(files[0])), work(2, text(*files[1:4])), work(3, text(files[4])))
    assert_decoded(decoder, rows[0], pictures[0])
    assert_decoded(decoder, rows[1], *pictures[1:4])
    assert_decoded(decoder, rows[2], pictures[4])


@pytest.mark.process
def test_a_bad_image_fails_its_request_only(decoder: WorkerProcess) -> None:
    picture = image(9, 9)
    for bad in (b"", b"no image", png(picture)[:60]):
        rows = decoder.run(work(1, text(png(picture))), work(2, text(bad)), work(3, text(png(picture))))
        assert_decoded(decoder, rows[0], picture)
        assert_decoded(decoder, rows[2], picture)
        failed = assert_failed(rows[1], "MODEL_FAILED", "fn.decoders.image")
        assert "Current pipeline" not in failed.text
        (alone,) = decoder.run(work(4, text(bad)))
        assert_failed(alone, "MODEL_FAILED", "fn.decoders.image")
    (row,) = decoder.run(work(5, text(png(picture))))
    assert_decoded(decoder, row, picture)


@pytest.mark.process
def test_a_request_without_rows_gets_no_sample_of_another(decoder: WorkerProcess) -> None:
    picture = image(9, 9)
    rows = decoder.run(work(1, text()), work(2, text(png(picture), png(picture))))
    assert_failed(rows[0], "INVALID_ARG", "the request has no rows")
    assert_decoded(decoder, rows[1], picture, picture)


@pytest.mark.process
def test_encoded_images_of_different_lengths(tmp_path: Path) -> None:
    pipeline(tmp_path, decoding)
    pictures = [image(30, 9, 1), image(8, 8, 2), image(10, 40, 3)]
    with running(image_config("UINT8", (-1,)), tmp_path) as worker:
        rows = worker.run(*[work(number, raw(png(picture))) for number, picture in enumerate(pictures, 1)])
        for row, picture in zip(rows, pictures, strict=True):
            assert_decoded(worker, row, picture)


@pytest.mark.process
def test_outputs_of_different_shapes(tmp_path: Path) -> None:
    """Shapes may differ between requests, but not within one."""

    def whole(fn: Any, types: Any) -> Any:
        return fn.decoders.image(source(fn, types, "image", "UINT8", 1), device="cpu")

    pipeline(tmp_path, whole)
    given = config("dali", {"image": ("STRING", (1,))}, {"pixels": ("UINT8", (-1, -1, 3))}, max_batch=8)
    first, second = image(3, 4, 1), image(5, 4, 2)
    with running(given, tmp_path) as worker:
        rows = worker.run(work(1, text(png(first))), work(2, text(png(second), png(first))), work(3, text(png(second))))
        for row, picture in ((rows[0], first), (rows[2], second)):
            assert np.array_equal(worker.value(row)[0], picture)
        assert_failed(
            rows[1], "MODEL_FAILED", "output 'pixels' has samples of different shapes in one request: [3, 4, 3]"
        )


def test_declared_inputs_and_outputs_of_a_pipeline(tmp_path: Path) -> None:
    from nvidia.dali import types

    def complete(fn: Any, kinds: Any) -> Any:
        return source(fn, kinds, "a", "FP16", 2)

    def with_unknown(fn: Any, kinds: Any) -> Any:
        return complete(fn, kinds), fn.external_source(name="b")

    bare, a = config("dali", {}, {}), DaliPort("a", "FP16", 2)
    declared = {"output_dtype": [types.FLOAT16, types.INT8], "output_ndim": [2, 1]}
    found = described(pipeline(tmp_path, with_unknown, batch=6, **declared).read_bytes())
    assert found == DescribedPipeline((a, DaliPort("b", "", None)), (a, DaliPort("b", "INT8", 1)), 6, "")
    text = "data type or the number of dimensions of input 'b'. Set dtype and ndim of its external_source"
    assert text in load_failure(bare, tmp_path).text

    pipeline(tmp_path, complete, batch=6)
    assert "of output 'a'. Set output_dtype and output_ndim" in load_failure(bare, tmp_path).text
    pipeline(tmp_path, complete, batch=6, output_dtype=types.FLOAT16, output_ndim=2)
    whole = completed(bare, tmp_path)
    assert (whole.max_batch_size, whole.dynamic_batching is not None) == (6, True)
    (entry,), (made,) = whole.input, whole.output
    for port in (entry, made):
        assert (port.name, port.data_type, tuple(port.dims)) == ("a", "TYPE_FP16", (-1, -1))
    assert entry.allow_ragged_batch


@cases(
    ({"z": X["x"]}, Y, {}, "unexpected inference input 'z', allowed inputs are: x"),
    ({**X, "z": X["x"]}, Y, {}, "unexpected inference input 'z', allowed inputs are: x"),
    ({"x": ("FP64", (-1,))}, Y, {}, "input 'x' is FP64 in the configuration and FP32 in the pipeline"),
    ({"x": ("FP32", (-1, 2))}, Y, {}, "input 'x' has 2 dims in the configuration, without the batch, and 1 in the"),
    ({"x": ("STRING", (1,))}, Y, {}, "it needs dims: [ 1 ], and dtype UINT8 and ndim 1 in the pipeline"),
    (X, {"y": ("STRING", (1,))}, {}, "output 'y' is BYTES in the configuration and another type in the pipeline"),
    (X, {**Y, "z": Y["y"]}, {}, "configuration expects 2 outputs ('y', 'z'), model provides 1"),
    (X, Y, {"num_threads": "two"}, "parameter num_threads of model 'm' must be an integer of at least 0, not 'two'"),
    (X, Y, {"split_along_outer_axis": "y"}, "parameter split_along_outer_axis of model 'm' is not supported"),
)
def test_mismatched_configurations_are_refused(
    inputs: Any, outputs: Any, parameters: dict[str, str], said: str, tmp_path: Path
) -> None:
    pipeline(tmp_path, lambda fn, types: source(fn, types, "x", "FP32", 1))
    failure = load_failure(config("dali", inputs, outputs, max_batch=8, parameters=parameters), tmp_path)
    assert said in failure.text


@pytest.mark.parametrize("damage", ["cut off", "text", "numbers"])
def test_an_invalid_pipeline_file_is_refused(damage: str, tmp_path: Path) -> None:
    path = pipeline(tmp_path, lambda fn, types: source(fn, types, "x", "FP32", 1))
    data = {"cut off": path.read_bytes()[:-9], "text": b"not a pipeline", "numbers": b"\x28\x01\x38\x01"}[damage]
    path.write_bytes(data)
    failure = load_failure(config("dali", X, Y, max_batch=8), tmp_path)
    assert "unable to load model 'm': its file is not a serialized pipeline of DALI: " in failure.text


def test_missing_and_optional_inputs_are_refused(tmp_path: Path) -> None:
    pipeline(tmp_path, lambda fn, types: source(fn, types, "x", "FP32", 1) + source(fn, types, "z", "FP32", 1))
    assert (
        "configuration expects 1 inputs, model provides 2: it also has z"
        in load_failure(config("dali", X, Y, max_batch=8), tmp_path).text
    )
    given = config("dali", {**X, "z": X["x"]}, Y, max_batch=8, optional=["z"])
    assert "input 'z' is optional, and a pipeline of DALI needs all inputs" in load_failure(given, tmp_path).text


def test_gpu_operators_are_refused_on_a_cpu_instance(tmp_path: Path) -> None:
    """A pipeline as built on a machine with a GPU: the device of its operator is changed in the file."""
    path = pipeline(tmp_path, lambda fn, types: fn.copy(source(fn, types, "x", "FP32", 1)))
    operator = b"\n\x06device\x12\x06string*\x03cpu"
    data = path.read_bytes()
    at = data.rindex(operator)
    path.write_bytes(data[:at] + operator.replace(b"cpu", b"gpu") + data[at + len(operator) :])
    assert described(path.read_bytes()).on_gpu == "Copy"
    failure = load_failure(config("dali", X, Y, max_batch=8), tmp_path)
    assert "operator Copy of model 'm' runs on a GPU, and instance 'm_0_0' on the CPU" in failure.text


SCRIPT = """\
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.triton import autoserialize

from beside import FACTOR


@autoserialize
@pipeline_def(batch_size=5, num_threads=1, device_id=0, output_dtype=types.FLOAT, output_ndim=1)
def scaled():
    return fn.external_source(name="x", dtype=types.FLOAT, ndim=1) * FACTOR
"""


@pytest.mark.process
def test_a_pipeline_written_in_python_is_served(tmp_path: Path) -> None:
    """Served from dali.py without a configuration. The pipeline was written for a GPU, and its inputs differ in
    length."""
    version = tmp_path / "scaled" / "1"
    version.mkdir(parents=True)
    (version / "dali.py").write_text(SCRIPT)
    (version / "beside.py").write_text("FACTOR = 3.0\n")
    with Server(tmp_path, "--exit-on-error", "true") as server, server.client() as client:
        given = [np.arange(length, dtype=np.float32)[None] for length in range(1, 30)]
        with stopped(client, "scaled", 6):
            futures = [client.submit("scaled", {"x": array}) for array in given]
        for array, future in zip(given, futures, strict=True):
            (found,) = future.result().values()
            assert np.array_equal(found, array * 3)
        (counted,) = client.statistics("scaled")["model_stats"]
        assert counted["inference_count"] == len(given)
        assert counted["execution_count"] < len(given)
        assert client.config("scaled")["max_batch_size"] == 5


@pytest.mark.process
def test_the_pipeline_of_the_page(tmp_path: Path) -> None:
    (script,) = [block for block in pages.blocks(pages.page("backends"), "python") if "autoserialize" in block]
    (tmp_path / "prepare" / "1").mkdir(parents=True)
    (tmp_path / "prepare" / "1" / "dali.py").write_text(script)
    picture = image(224, 224)
    with Server(tmp_path, "--exit-on-error", "true") as server, server.client() as client:
        (found,) = client.infer("prepare", {"image": np.frombuffer(png(picture), np.uint8)[None]}).values()
        np.testing.assert_allclose(found[0], picture.transpose(2, 0, 1) / 127.5 - 1, atol=1e-6)


OTHER = "\n\n@autoserialize\n@pipeline_def(batch_size=1)\ndef other():\n    return fn.external_source(name='x')\n"


@pytest.mark.parametrize(("script", "number"), [("", 0), (SCRIPT + OTHER, 2)], ids=["none", "two"])
def test_a_file_without_exactly_one_pipeline_is_refused(script: str, number: int, tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "dali.py").write_text(script)
    (tmp_path / "1" / "beside.py").write_text("FACTOR = 3.0\n")
    failure = load_failure(config("dali", {}, {}), tmp_path)
    assert f"dali.py must have one pipeline with @autoserialize, it has {number}" in failure.text
    assert not list(tmp_path.glob("**/__pycache__")), "nothing is written beside it"


def test_an_instance_on_a_gpu_gets_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU, so DALI itself refuses."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    pipeline(tmp_path, lambda fn, types: source(fn, types, "x", "FP32", 1))
    assert "GPU" in load_failure(on_gpu(config("dali", X, Y, max_batch=8), 1), tmp_path).text
