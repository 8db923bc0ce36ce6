"""`shmserve build` with fakes: the calls to the library, the written files, and refusals."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from shmserve.clients.cli.commands.base import order_of
from shmserve.clients.cli.parser import parser
from shmserve.workers.backends.tensorrt.build_shapes import BadShapes, from_words
from tests.support.cases import cases
from tests.support.workers.gpu.harness import standins


@pytest.fixture
def libraries() -> Iterator[tuple[Any, Any]]:
    with standins() as found:
        yield found


def model(path: Path, dims: list[Any], kind: str = "Identity") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node(kind, ["x"], ["y"], name="the_node")], "g", tensors[:1], tensors[1:])
    onnx.save(helper.make_model(graph), path)
    return path


def build(*words: Any) -> int:
    """Runs the command line in the form that the replacing process gets."""
    from shmserve.workers.backends.tensorrt import build

    args = parser().parse_args(["build", *map(str, words)])
    return build.main([order_of(args)])


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "shmserve" / "tensorrt-11.4.0.106-sm9.0.cache"


@pytest.mark.usefixtures("libraries")
def test_a_plan_is_built_from_a_file(tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = model(tmp_path / "m.onnx", ["n", 3]), tmp_path / "m.plan"
    assert build(source, "-o", out, "--max-batch", 8) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[:3] == [
        "        name  type  shape    profiles",
        "input   x     FP32  [-1, 3]  [1, 3] to [8, 3]",
        "output  y     FP32  [-1, 3]",
    ]
    assert f"timing cache: {cache}, new" in shown.out
    assert "for compute capability 9.0 and TensorRT 11.4.0.106" in shown.out
    assert shown.err == "Building (2 steps)\n"
    assert out.stat().st_mode & 0o777 == 0o644
    plan = json.loads(out.read_bytes())
    assert plan["profiles"] == [{"x": [[1, 3], [8, 3], [8, 3]]}]
    assert plan["built"] == {"flags": [], "pools": {}, "level": 3, "hardware": "NONE", "network": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "m.onnx", "m.plan"]
    # The second build uses the first one's measurements.
    assert build(source, "-o", out, "--max-batch", 8) == 0
    assert f"timing cache: {cache}, 7 bytes were there" in capsys.readouterr().out
    assert cache.read_bytes() == b"times 7"
    cache.write_bytes(b"other")
    assert build(source, "-o", out, "--max-batch", 8) == 0
    assert "of another device or version, begun anew" in capsys.readouterr().out


@pytest.mark.usefixtures("libraries", "cache")
def test_a_plan_is_built_from_a_model_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "m"
    model(folder / "1" / "model.onnx", ["n", "w"])
    model(folder / "2" / "model.onnx", ["n", "w"])
    (folder / "config.pbtxt").write_text(
        'backend: "onnxruntime" max_batch_size: 16 dynamic_batching { preferred_batch_size: [ 4, 8 ] }\n'
        'input { name: "x" data_type: TYPE_FP32 dims: 5 } output { name: "y" data_type: TYPE_FP32 dims: 5 }\n'
    )
    assert build(folder, "-o", tmp_path / "a.plan", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    shapes = {"min": [1, 5], "opt": [8, 5], "max": [16, 5]}
    assert said["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, -1], "profiles": [shapes]}]
    assert build(folder, "-o", tmp_path / "b.plan", "--version", 1, "--max-batch", 4) == 0
    assert json.loads((tmp_path / "b.plan").read_bytes())["profiles"] == [{"x": [[1, 5], [4, 5], [4, 5]]}]
    assert build(folder, "-o", tmp_path / "b.plan", "--version", 7) == 2
    assert "there is no file 'model.onnx' in version 7 of model 'm'" in capsys.readouterr().err


@pytest.mark.usefixtures("libraries", "cache")
def test_options_are_passed_to_the_library(tmp_path: Path) -> None:
    source, out = model(tmp_path / "m.onnx", ["n", 3]), tmp_path / "m.plan"
    words = "--workspace-mb 64 --level 5 --version-compatible --hardware ampere+ --no-timing-cache"
    profiles = "--profile x=1x3:2x3:4x3 --profile x=8x3"
    assert build(source, "-o", out, *words.split(), *profiles.split()) == 0
    plan = json.loads(out.read_bytes())
    assert plan["profiles"] == [{"x": [[1, 3], [2, 3], [4, 3]]}, {"x": [[8, 3]] * 3}]
    assert plan["built"] == {
        "flags": ["VERSION_COMPATIBLE"],
        "pools": {"WORKSPACE": 64 << 20},
        "level": 5,
        "hardware": "AMPERE_PLUS",
        "network": 2,
    }
    assert not (tmp_path / "cache").exists()


def test_precision_is_supported_only_by_older_libraries(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = model(tmp_path / "m.onnx", [2, 3]), tmp_path / "m.plan"
    with standins():
        assert build(source, "-o", out, "--precision", "fp16") == 1
        assert "TensorRT 11.4.0.106 computes in the types that the ONNX file has" in capsys.readouterr().err
    monkeypatch.setenv("STANDIN_TENSORRT", "10.16.1")
    with standins():
        assert build(source, "-o", out, "--precision", "fp16") == 0
        assert json.loads(out.read_bytes())["built"]["flags"] == ["FP16"]
        assert json.loads(out.read_bytes())["built"]["network"] == 0


@pytest.mark.usefixtures("libraries")
def test_an_unwritable_timing_cache_is_reported(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan is still written, unless the cache was requested by name."""
    source, out = model(tmp_path / "m.onnx", [2]), tmp_path / "m.plan"
    cache.mkdir(parents=True)
    assert build(source, "-o", out) == 0
    assert "the timing cache cannot be kept: Is a directory" in capsys.readouterr().out
    cache.rmdir()
    cache.parent.rmdir()
    cache.parent.touch()
    assert build(source, "-o", out) == 0
    assert f"no timing cache: {cache}: File exists" in capsys.readouterr().out
    assert build(source, "-o", out, "--timing-cache", cache) == 1
    assert "File exists" in capsys.readouterr().err


@pytest.mark.usefixtures("libraries", "cache")
def test_files_that_cannot_be_built_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "m.plan"
    out.write_bytes(b"the old one")
    wide = model(tmp_path / "wide.onnx", ["n", "w"])
    cases: list[tuple[list[Any], int, str]] = [
        ([tmp_path / "no.onnx", "-o", out], 2, "is neither an ONNX file nor the directory of a model"),
        ([wide, "-o", tmp_path], 2, "is not the name of a file that can be written"),
        ([wide, "-o", out, "--max-batch", 4], 2, "input 'x' is [-1, -1]: say with --max-batch N"),
        ([model(tmp_path / "bad.onnx", [1], "Unheard"), "-o", out], 1, "node 'the_node' (Unheard): no importer for"),
        ([tmp_path / "m.plan", "-o", out, "--plugins", "/nowhere/a.so"], 1, "(--backend-config tensorrt,plugins)"),
    ]
    for words, code, text in cases:
        assert build(*words) == code
        assert text in capsys.readouterr().err
        assert out.read_bytes() == b"the old one"


def test_an_interrupt_ends_the_build_at_the_next_step(
    tmp_path: Path, cache: Path, libraries: tuple[Any, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """It arrives while the library is busy, and takes effect at the next step."""
    source = model(tmp_path / "m.onnx", [2])
    _, trt = libraries
    real = trt.IProgressMonitor.__init__

    def begin(self: Any) -> None:
        real(self)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trt.IProgressMonitor, "__init__", begin)
        assert build(source, "-o", tmp_path / "m.plan") == 130
    assert "interrupted; no plan was written" in capsys.readouterr().err
    assert not (tmp_path / "m.plan").exists()
    assert not cache.exists()
    assert signal.getsignal(signal.SIGINT) is before


@cases(
    (["x"], "'x' is not NAME=MIN:BEST:MAX"),
    (["x=1xa"], "is not NAME=MIN:BEST:MAX"),
    (["x=1x3:2x3"], "is not NAME=MIN:BEST:MAX"),
    (["q=1x3"], "the model has no input 'q'; its inputs are x, mask:0"),
    (["x=1x4"], r"1x4 is not a shape of input 'x', which is \[-1, 3\]"),
    (["x=4x3:2x3:8x3"], "must not get smaller from MIN to BEST to MAX"),
    (["mask:0=1"], r"inputs with dynamic dims are missing: 'x' \[-1, 3\]"),
)
def test_invalid_profiles_are_refused(words: list[str], text: str) -> None:
    with pytest.raises(BadShapes, match=text):
        from_words(words, {"x": (-1, 3), "mask:0": (1,)})
