"""`python -m tests.process.models.language.vllm_network FOLDER`: makes a small language model and continues texts with
it.

Writes a network with random weights and its tokenizer to FOLDER, reads a JSON list of [text, number of tokens] from the
standard input, and prints a JSON list of the continuations, always by the most likely token. A token is a printable
character of ASCII. It is a separate program because the libraries leave threads behind.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

LENGTH = 2048
"""Maximum number of tokens of a text and its continuation."""
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")


def tokenizer() -> Any:
    library = import_module("tokenizers")
    names = [*SPECIAL, *map(chr, range(32, 127))]
    places = {name: place for place, name in enumerate(names)}
    made = library.Tokenizer(library.models.WordLevel(places, unk_token="<unk>"))
    made.pre_tokenizer = library.pre_tokenizers.Split(library.Regex("."), behavior="isolated")
    made.decoder = library.decoders.Fuse()
    return made


def network(size: int) -> Any:
    torch, transformers = import_module("torch"), import_module("transformers")
    torch.manual_seed(1)
    config = transformers.OPTConfig(
        vocab_size=size, hidden_size=64, word_embed_proj_dim=64, ffn_dim=128, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=LENGTH, bos_token_id=0, pad_token_id=1, eos_token_id=2,
        init_std=0.5, dropout=0.0,
    )  # fmt: skip
    made = transformers.OPTForCausalLM(config).eval()
    with torch.no_grad():  # so that a special token is never the most likely one
        made.get_output_embeddings().weight[: len(SPECIAL)] = 0
    return made


def main(folder: Path) -> None:
    torch = import_module("torch")
    tokens = tokenizer()
    made = network(tokens.get_vocab_size())
    made.save_pretrained(folder)
    tokens.save(str(folder / "tokenizer.json"))
    named: dict[str, object] = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    settings = named | {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    found = []
    for text, count in json.load(sys.stdin):
        given = tokens.encode(text).ids
        whole = made.generate(torch.tensor([given]), max_new_tokens=count, min_new_tokens=count, do_sample=False)
        found.append(tokens.decode(whole[0, len(given) :].tolist()))
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
