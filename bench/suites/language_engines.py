"""Engines for language models without a server, with one thread: `python -m bench.suites.language_engines ENGINE`.

ENGINE is `llama.cpp MODEL` (a GGUF file), `onnxruntime-genai MODEL` (a directory that its model builder wrote) or
`transformers` (random weights in the size of SmolLM2-135M, `--dtype`). For each number of sequences, prints the
processor time for prompts of 16 tokens and for a step, which gives each sequence one token. Processor time is steady
even on a machine that does other work.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
from collections.abc import Callable
from time import process_time
from typing import Any

import numpy as np

from bench.lib import bare_engine

PROMPT = 16
STEPS = {1: 16, 8: 6, 32: 3}
"""Number of sequences -> steps to measure."""
Run = Callable[[int, int], tuple[float, float]]
"""Takes the numbers of sequences and steps; returns the seconds of all prompts and of one step."""


def llama_cpp(model: str, dtype: str) -> Run:
    server = bare_engine.llama_cpp(model, 1, max(STEPS), 256)

    def seconds(sequences: int, tokens: int) -> float:
        body = json.dumps({
            "prompt": list(range(1000, 1000 + PROMPT)), "stream": True, "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, "cache_prompt": False,
        }).encode()  # fmt: skip
        running = [
            threading.Thread(target=server.handle_completions, args=(body, lambda data: False))
            for _ in range(sequences)
        ]
        began = process_time()
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        return process_time() - began

    def run(sequences: int, steps: int) -> tuple[float, float]:
        first = seconds(sequences, 1)
        return first, (seconds(sequences, 1 + steps) - first) / steps

    return run


def onnxruntime_genai(model: str, dtype: str) -> Run:
    import onnxruntime_genai as genai

    config = genai.Config(model)
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": 1}}}}))
    loaded = genai.Model(config)

    def run(sequences: int, steps: int) -> tuple[float, float]:
        length = PROMPT + steps + 4
        parameters = genai.GeneratorParams(loaded)
        parameters.set_search_options(batch_size=sequences, max_length=length, min_length=length, do_sample=False)
        generator = genai.Generator(loaded, parameters)
        began = process_time()
        generator.append_tokens(np.random.default_rng(0).integers(3, 1000, (sequences, PROMPT), np.int32))
        generator.generate_next_token()
        first = process_time()
        for _ in range(steps):
            generator.generate_next_token()
        return first - began, (process_time() - first) / steps

    return run


def transformers(model: str, dtype: str) -> Run:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    size = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
    config = LlamaConfig(**size, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True)
    network: Any = LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()

    def run(sequences: int, steps: int) -> tuple[float, float]:
        with torch.inference_mode():
            began = process_time()
            found = network(torch.randint(0, 49152, (sequences, PROMPT)), use_cache=True)
            first = process_time()
            for _ in range(steps):
                token = found.logits[:, -1:].argmax(-1)
                found = network(token, past_key_values=found.past_key_values, use_cache=True)
        return first - began, (process_time() - first) / steps

    return run


ENGINES = {"llama.cpp": llama_cpp, "onnxruntime-genai": onnxruntime_genai, "transformers": transformers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    run = ENGINES[arguments.engine](arguments.model, arguments.dtype)
    run(1, 1)
    print("| sequences | prompts, ms | step, ms | tokens in a processor second |\n| ---: | ---: | ---: | ---: |")
    for sequences, steps in STEPS.items():
        first, step = run(sequences, steps)
        print(f"| {sequences} | {first * 1e3:.0f} | {step * 1e3:.1f} | {sequences / step:.0f} |", flush=True)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
