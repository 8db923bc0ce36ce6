"""`python -m tests.process.models.language.vllm_network FOLDER`: makes a small language model and continues texts with
it.

Writes a network with random weights, its tokenizer and an adapter for it to FOLDER, reads a JSON list of [text, number
of tokens, whether the adapter is used] from the standard input, and prints a JSON list of the continuations, always by
the most likely token. A token is a byte. It is a separate program because the libraries leave threads behind.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

LENGTH = 1 << 16
"""Maximum number of tokens of a text and its continuation."""
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
WIDTH, LAYERS, RANK = 64, 2, 8
ADAPTER = "adapter"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def tokenizer() -> Any:
    library = import_module("tokenizers")
    bytes_ = library.pre_tokenizers.ByteLevel.alphabet()
    names = [*SPECIAL, *sorted(bytes_, key=lambda one: (not " " < one < "\x7f", one))]  # printable ones first
    made = library.Tokenizer(library.models.BPE({name: place for place, name in enumerate(names)}, []))
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = library.decoders.ByteLevel()
    return made


def write_tokenizer(folder: Path, tokens: Any, template: str, **more: object) -> None:
    tokens.save(str(folder / "tokenizer.json"))
    settings: dict[str, object] = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template, **more}))


def config(size: int, length: int = LENGTH) -> Any:
    return import_module("transformers").LlamaConfig(
        vocab_size=size, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=2, max_position_embeddings=length, bos_token_id=0, pad_token_id=1, eos_token_id=2,
        initializer_range=0.5,
    )  # fmt: skip


def network(size: int) -> Any:
    import_module("torch").manual_seed(1)
    return only_printable(import_module("transformers").LlamaForCausalLM(config(size)).eval())


def only_printable(made: Any) -> Any:
    """Changes a network so that only printable characters are the most likely ones."""
    with import_module("torch").no_grad():
        output = made.get_output_embeddings().weight
        output[: len(SPECIAL)] = 0
        output[len(SPECIAL) + 94 :] = 0
    return made


def write_adapter(folder: Path) -> dict[str, Any]:
    """Returns what it adds to the weights, by name."""
    torch, files = import_module("torch"), import_module("safetensors.torch")
    folder.mkdir()
    described = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    weights: dict[str, Any] = {}
    added: dict[str, Any] = {}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}.self_attn.q_proj"
        down, up = torch.randn(RANK, WIDTH), torch.randn(WIDTH, RANK)
        weights |= {f"base_model.model.{name}.lora_A.weight": down, f"base_model.model.{name}.lora_B.weight": up}
        added[f"{name}.weight"] = up @ down
    files.save_file(weights, folder / "adapter_model.safetensors")
    return added


def main(folder: Path) -> None:
    torch = import_module("torch")
    tokens = tokenizer()
    made = network(tokens.get_vocab_size())
    made.save_pretrained(folder)
    write_tokenizer(folder, tokens, TEMPLATE)
    added = write_adapter(folder / ADAPTER)

    def continued(text: str, count: int) -> str:
        given = tokens.encode(text).ids
        whole = made.generate(torch.tensor([given]), max_new_tokens=count, min_new_tokens=count, do_sample=False)
        found: str = tokens.decode(whole[0, len(given) :].tolist())
        return found

    asked = json.load(sys.stdin)
    found = {number: continued(text, count) for number, (text, count, adapted) in enumerate(asked) if not adapted}
    with torch.no_grad():
        for name, weight in made.named_parameters():
            weight += added.get(name, 0)
    found |= {number: continued(text, count) for number, (text, count, adapted) in enumerate(asked) if adapted}
    print(json.dumps([found[number] for number in range(len(asked))]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
