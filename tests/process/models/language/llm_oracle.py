"""The bare engine: `python -m tests.process.models.language.llm_oracle MODEL [POOLING | chat PROJECTOR]`, with a JSON
list of requests on stdin.

Prints a JSON list of the generated texts, or with a pooling of the vectors or scores. The requests run one after the
other, in one slot. PROJECTOR: the file for images in chats.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests import ROOT


def texts(model: Path, requests: list[dict[str, object]]) -> list[str]:
    """The texts that the engine generates for requests in its own format."""
    found: list[str] = _answers([str(model)], requests)
    return found


def chats(model: Path, projector: Path, requests: list[dict[str, object]]) -> list[str]:
    """The answers of the engine to chats with images."""
    return _answers([str(model), "chat", str(projector)], requests)


def vectors(model: Path, pooling: str, requests: list[dict[str, object]]) -> list[Any]:
    """The engine's vectors, or its scores with the pooling "rank"."""
    return _answers([str(model), pooling], requests)


def _answers(arguments: list[str], requests: list[dict[str, object]]) -> list[Any]:
    command = [sys.executable, "-m", "tests.process.models.language.llm_oracle", *arguments]
    done = subprocess.run(
        command, input=json.dumps(requests), capture_output=True, text=True, timeout=240, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = sys.argv[1]
    parameters.n_parallel = 1
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    parameters.cache_ram_mib = 0
    parameters.verbosity = 1
    pooling = sys.argv[2] if len(sys.argv) > 2 else ""
    if pooling == "chat":
        parameters.mmproj.path = sys.argv[3]
        parameters.use_jinja = True
    elif pooling:
        parameters.embedding = True
        parameters.pooling_type = getattr(xllamacpp.llama_pooling_type, f"LLAMA_POOLING_TYPE_{pooling.upper()}")
    with tempfile.TemporaryDirectory() as folder:
        parameters.hostnames = [f"{folder}/http.sock"]
        server = xllamacpp.Server(parameters)
    requests = json.load(sys.stdin)
    if pooling == "chat":
        answered = [server.handle_chat_completions({"cache_prompt": False, **request}) for request in requests]
        print(json.dumps([one["choices"][0]["message"]["content"] for one in answered]))
    elif pooling == "rank":
        scored = [server.handle_rerank(request)["results"] for request in requests]
        in_order = [sorted(results, key=lambda one: one["index"]) for results in scored]
        print(json.dumps([[one["relevance_score"] for one in results] for results in in_order]))
    elif pooling:
        embedded = [server.handle_embeddings(request)["data"] for request in requests]
        print(json.dumps([data[0]["embedding"] for data in embedded]))
    else:
        found = [server.handle_completions({"cache_prompt": False, **request}) for request in requests]
        print(json.dumps([one["choices"][0]["text"] for one in found]))


if __name__ == "__main__":
    main()
