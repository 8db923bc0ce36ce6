"""`python -m tests.process.models.language.vllm_others FOLDER`: makes models that do more than continue texts, and
computes what they answer.

Writes networks with random weights to FOLDER: `eyes` sees images, `vectors` continues texts and serves as an encoder,
`rank` scores pairs of texts. Reads JSON from the standard input (see `Asked`), and prints the answers as JSON.
"""

from __future__ import annotations

import base64
import io
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import TypedDict

from tests.process.models.language import vllm_network

EDGE, PATCH, SCALE = 56, 14, 2
IMAGE, BETWEEN, END, WHOLE = "<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"
LENGTH = 512
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""As many models have it: for contents that are lists."""


class Asked(TypedDict):
    """`prompts`: [text with a mark for each image, images in base64]. `count`: tokens of their continuations."""

    prompts: list[tuple[str, list[str]]]
    count: int
    texts: list[str]
    pairs: list[tuple[str, str]]


class Answers(TypedDict):
    continuations: list[str]
    vectors: list[list[float]]
    scores: list[float]


def main(folder: Path, asked: Asked) -> Answers:
    torch = import_module("torch")
    with torch.no_grad():
        return {
            "continuations": _eyes(folder / "eyes", asked["prompts"], asked["count"]),
            "vectors": _vectors(folder / "vectors", asked["texts"]),
            "scores": _scores(folder / "rank", asked["pairs"]),
        }


def _eyes(folder: Path, prompts: list[tuple[str, list[str]]], count: int) -> list[str]:
    torch, transformers, images = import_module("torch"), import_module("transformers"), import_module("PIL.Image")
    tokens = vllm_network.tokenizer()
    tokens.add_special_tokens([IMAGE, BETWEEN, END, WHOLE])
    torch.manual_seed(1)
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": EDGE, "patch_size": PATCH, "initializer_range": 0.5,
    }  # fmt: skip
    config = transformers.Idefics3Config(
        vision_config=vision,
        text_config=vllm_network.config(tokens.get_vocab_size(), LENGTH).to_dict(),
        image_token_id=tokens.token_to_id(IMAGE),
        scale_factor=SCALE,
        pad_token_id=1,
    )
    made = vllm_network.only_printable(transformers.Idefics3ForConditionalGeneration(config).eval())
    made.save_pretrained(folder)
    marks = {"image_token": IMAGE, "additional_special_tokens": [BETWEEN, IMAGE, END]}
    vllm_network.write_tokenizer(folder, tokens, TEMPLATE, **marks)
    edge = {"longest_edge": EDGE}
    pixels = {"image_processor_type": "Idefics3ImageProcessor", "size": edge, "max_image_size": edge}
    (folder / "preprocessor_config.json").write_text(json.dumps({**pixels, "do_image_splitting": False}))
    described = {"processor_class": "Idefics3Processor", "image_seq_len": (EDGE // PATCH // SCALE) ** 2}
    (folder / "processor_config.json").write_text(json.dumps(described))
    processor = transformers.AutoProcessor.from_pretrained(folder)

    def continued(text: str, files: list[str]) -> str:
        seen = [images.open(io.BytesIO(base64.b64decode(file))).convert("RGB") for file in files]
        given = processor(text=text, images=[seen] if seen else None, return_tensors="pt")
        whole = made.generate(**given, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        found: str = tokens.decode(whole[0, given["input_ids"].shape[1] :].tolist())
        return found

    return [continued(*prompt) for prompt in prompts]


def _vectors(folder: Path, texts: list[str]) -> list[list[float]]:
    """The means of the states."""
    torch = import_module("torch")
    tokens = vllm_network.tokenizer()
    made = vllm_network.network(tokens.get_vocab_size())
    made.save_pretrained(folder)
    vllm_network.write_tokenizer(folder, tokens, vllm_network.TEMPLATE)
    means = [made.model(torch.tensor([tokens.encode(text).ids])).last_hidden_state[0].mean(0) for text in texts]
    return [(mean / mean.norm()).tolist() for mean in means]


def _scores(folder: Path, pairs: list[tuple[str, str]]) -> list[float]:
    """Of a cross-encoder, which tells the texts of a pair apart by the types of the tokens."""
    torch, transformers = import_module("torch"), import_module("transformers")
    tokens = vllm_network.tokenizer()
    marks = [(name, tokens.token_to_id(name)) for name in ("<s>", "</s>")]
    tokens.post_processor = import_module("tokenizers").processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=marks
    )
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=tokens.get_vocab_size(), hidden_size=vllm_network.WIDTH, intermediate_size=2 * vllm_network.WIDTH,
        num_hidden_layers=vllm_network.LAYERS, num_attention_heads=2, max_position_embeddings=LENGTH, pad_token_id=1,
        num_labels=1, initializer_range=0.1,
    )  # fmt: skip
    made = transformers.BertForSequenceClassification(config).eval()
    made.save_pretrained(folder)
    vllm_network.write_tokenizer(folder, tokens, "", model_input_names=["input_ids", "token_type_ids"])
    scores = []
    for query, document in pairs:
        encoded = tokens.encode(query, document)
        given = {"input_ids": torch.tensor([encoded.ids]), "token_type_ids": torch.tensor([encoded.type_ids])}
        scores.append(torch.sigmoid(made(**given).logits).item())
    return scores


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), json.load(sys.stdin))))
