"""Small language models with random weights, written as GGUF files.

The vocabulary has one token for each printable character of ASCII. Tokens of other bytes and the end of a text have the
logit 0 and so are never the most probable.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.model_files import parameters

CHARACTERS = [chr(code) for code in range(0x20, 0x7F)]
SPECIAL = ["<unk>", "<s>", "</s>"]
FILLING = ["<fim_pre>", "<fim_suf>", "<fim_mid>"]
"""Tokens before the text, before its suffix, and before what is generated between the two."""
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
ALIGNMENT = 32
HEADS = 4
ADAPTER_RANK = 4
VISION_WIDTH, IMAGE_SIDE, PATCH_SIDE = 32, 32, 8
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

THINKING = (
    "{% for message in messages %}{{ message.role }}: {% if message.reasoning_content %}"
    "<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:<think>{% endif %}"
)
"""A template that begins the thinking of the model."""


def write(
    path: Path, *, width: int = 64, layers: int = 2, context: int = 2048, seed: int = 0, scores: bool = False,
    adapted: bool = False, fills: bool = False, top_k: int | None = None,
    template: str = TEMPLATE,
) -> Path:  # fmt: skip
    """A Llama network. `scores`: a reranker, which is a Qwen network with a classifier. `adapted`: the adapter of
    `write_adapter` is merged into it. `fills`: the vocabulary has the tokens FILLING. `top_k`: what the authors of the
    model recommend."""
    kind = "qwen3" if scores else "llama"
    tokens = [*SPECIAL, *BYTES, *("▁" if one == " " else one for one in CHARACTERS)]
    kinds = [_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * len(BYTES), *[_NORMAL] * len(CHARACTERS)]
    if fills:
        tokens += FILLING
        kinds += [_CONTROL] * len(FILLING)
    settings: list[tuple[str, int, Any]] = [
        ("general.architecture", _STRING, kind),
        ("general.name", _STRING, "random"),
        (f"{kind}.context_length", _UINT32, context),
        (f"{kind}.embedding_length", _UINT32, width),
        (f"{kind}.block_count", _UINT32, layers),
        (f"{kind}.feed_forward_length", _UINT32, 2 * width),
        (f"{kind}.attention.head_count", _UINT32, HEADS),
        (f"{kind}.attention.layer_norm_rms_epsilon", _FLOAT32, 1e-5),
        ("tokenizer.ggml.model", _STRING, "llama"),
        ("tokenizer.ggml.tokens", _STRING, tokens),
        ("tokenizer.ggml.scores", _FLOAT32, [0.0] * len(tokens)),
        ("tokenizer.ggml.token_type", _INT32, kinds),
        ("tokenizer.ggml.bos_token_id", _UINT32, 1),
        ("tokenizer.ggml.eos_token_id", _UINT32, 2),
        ("tokenizer.chat_template", _STRING, template),
    ]
    if top_k is not None:
        settings.append(("general.sampling.top_k", _INT32, top_k))
    settings += [(f"tokenizer.ggml.{token[1:-1]}_token_id", _UINT32, tokens.index(token)) for token in FILLING if fills]
    random = np.random.default_rng(seed)
    tensors = _weights(width, layers, len(tokens), random)
    if scores:
        settings += [(f"{kind}.attention.{name}_length", _UINT32, width // HEADS) for name in ("key", "value")]
        settings.append((f"{kind}.classifier.output_labels", _STRING, ["yes", "no"]))
        norms = [f"blk.{layer}.attn_{name}_norm.weight" for layer in range(layers) for name in ("q", "k")]
        tensors |= dict.fromkeys(norms, np.ones(width // HEADS, np.float32))
        tensors["cls.output.weight"] = random.standard_normal((2, width)).astype(np.float32)
    if adapted:
        for name, (down, up) in _adapter().items():
            tensors[name] = tensors[name] + up @ down
    return _write(path, settings, tensors)


def served(root: Path, name: str, config: str = "", *, network: dict[str, Any] | None = None, **own: str) -> Path:
    """A model in a repository: its configuration, its parameters, and what is special about its network."""
    version = root / name / "1"
    version.mkdir(parents=True)
    (root / name / "config.pbtxt").write_text('backend: "llamacpp"\n' + config + parameters(**own))
    return write(version / "model.gguf", **{"context": 512} | (network or {}))


def write_adapter(path: Path) -> Path:
    """An adapter (LoRA) of the smallest Llama network."""
    settings: list[tuple[str, int, Any]] = [
        ("general.type", _STRING, "adapter"),
        ("general.architecture", _STRING, "llama"),
        ("adapter.type", _STRING, "lora"),
        ("adapter.lora.alpha", _FLOAT32, float(ADAPTER_RANK)),
    ]
    pairs = _adapter().items()
    tensors = {f"{name}.lora_{part}": pair[index] for name, pair in pairs for index, part in enumerate("ab")}
    return _write(path, settings, tensors)


def _adapter() -> dict[str, Any]:
    """Name of a weight -> the two factors of what is added to it."""
    random = np.random.default_rng(2)
    shapes = ((ADAPTER_RANK, 64), (64, ADAPTER_RANK))
    return {
        f"blk.{layer}.attn_q.weight": tuple(random.standard_normal(shape).astype(np.float32) for shape in shapes)
        for layer in range(2)
    }


def write_projector(path: Path) -> Path:
    """The part of a model of the usual width that sees images, as a CLIP network."""
    width, layers, vision, random = 64, 2, VISION_WIDTH, np.random.default_rng(1)
    sizes = {
        "image_size": IMAGE_SIDE, "patch_size": PATCH_SIDE, "embedding_length": vision, "block_count": layers,
        "feed_forward_length": 2 * vision, "attention.head_count": HEADS, "projection_dim": width,
    }  # fmt: skip
    settings: list[tuple[str, int, Any]] = [
        ("general.architecture", _STRING, "clip"),
        ("clip.has_vision_encoder", _BOOL, True),
        ("clip.projector_type", _STRING, "mlp"),
        ("clip.use_gelu", _BOOL, True),
        ("clip.vision.attention.layer_norm_epsilon", _FLOAT32, 1e-5),
        ("clip.vision.image_mean", _FLOAT32, [0.5] * 3),
        ("clip.vision.image_std", _FLOAT32, [0.5] * 3),
        *((f"clip.vision.{name}", _UINT32, size) for name, size in sizes.items()),
    ]
    places = (IMAGE_SIDE // PATCH_SIDE) ** 2 + 1
    linear = {"mm.0": (width, vision), "mm.2": (width, width)}
    norms = ["v.pre_ln"]
    for block in [f"v.blk.{layer}" for layer in range(layers)]:
        linear |= dict.fromkeys([f"{block}.attn_{name}" for name in ("q", "k", "v", "out")], (vision, vision))
        linear |= {f"{block}.ffn_up": (2 * vision, vision), f"{block}.ffn_down": (vision, 2 * vision)}
        norms += [f"{block}.ln1", f"{block}.ln2"]
    weights = {name: random.standard_normal(shape) / shape[1] ** 0.5 for name, shape in linear.items()}
    weights |= {name: np.ones(vision) for name in norms}
    tensors = {f"{name}.weight": array for name, array in weights.items()}
    tensors |= {f"{name}.bias": np.zeros(len(array)) for name, array in weights.items()}
    patches = random.standard_normal((vision, 3, PATCH_SIDE, PATCH_SIDE)) / PATCH_SIDE
    tensors |= {"v.patch_embd.weight": patches, "v.class_embd": random.standard_normal(vision)}
    tensors["v.position_embd.weight"] = random.standard_normal((places, vision))
    return _write(path, settings, {name: array.astype(np.float32) for name, array in tensors.items()})


def _write(path: Path, settings: list[tuple[str, int, Any]], tensors: dict[str, Any]) -> Path:
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(settings))
    header += b"".join(_text(key) + _value(kind, value) for key, kind, value in settings)
    data = b""
    for name, array in tensors.items():
        header += _text(name) + struct.pack("<I", array.ndim) + struct.pack(f"<{array.ndim}Q", *array.shape[::-1])
        header += struct.pack("<IQ", 0, len(data))
        data += _padded(array.tobytes())
    path.write_bytes(_padded(header) + data)
    return path


def _weights(width: int, layers: int, count: int, random: np.random.Generator) -> dict[str, Any]:
    def weight(rows: int, columns: int) -> Any:
        return (random.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)

    ones = np.ones(width, np.float32)
    output = 4 * weight(count, width)
    output[: len(SPECIAL) + len(BYTES)] = 0
    found = {"token_embd.weight": 4 * weight(count, width), "output_norm.weight": ones, "output.weight": output}
    for layer in range(layers):
        shapes = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (width, width))
        shapes |= {"ffn_gate": (2 * width, width), "ffn_up": (2 * width, width), "ffn_down": (width, 2 * width)}
        found |= {f"blk.{layer}.{name}.weight": 2 * weight(*shape) for name, shape in shapes.items()}
        found |= {f"blk.{layer}.{name}.weight": ones for name in ("attn_norm", "ffn_norm")}
    return found


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(kind: int, value: Any) -> bytes:
    if isinstance(value, list):
        items = b"".join(_plain(kind, item) for item in value)
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + items
    return struct.pack("<I", kind) + _plain(kind, value)


def _plain(kind: int, value: Any) -> bytes:
    return (
        _text(value)
        if kind == _STRING
        else struct.pack({_UINT32: "<I", _INT32: "<i", _FLOAT32: "<f", _BOOL: "?"}[kind], value)
    )


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT)
