"""The bare engine: `python -m tests.process.models.language.llm_oracle MODEL`, with a JSON list of requests on stdin.

Prints a JSON list of the generated texts. The requests run one after the other, in one slot.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests import ROOT


def texts(model: Path, requests: list[dict[str, object]]) -> list[str]:
    """The texts that the engine generates for requests in its own format."""
    command = [sys.executable, "-m", "tests.process.models.language.llm_oracle", str(model)]
    done = subprocess.run(
        command, input=json.dumps(requests), capture_output=True, text=True, timeout=240, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = sys.argv[1]
    parameters.n_parallel = 1
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    parameters.cache_ram_mib = 0
    parameters.verbosity = 1
    with tempfile.TemporaryDirectory() as folder:
        parameters.hostnames = [f"{folder}/http.sock"]
        server = xllamacpp.Server(parameters)
    requests = json.load(sys.stdin)
    found = [server.handle_completions({"cache_prompt": False, **request}) for request in requests]
    print(json.dumps([one["choices"][0]["text"] for one in found]))


if __name__ == "__main__":
    main()
