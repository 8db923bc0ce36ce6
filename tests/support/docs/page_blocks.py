"""How each fenced block of the documentation is tested: it is run, checked, or listed here with the reason why not.

tests/unit/docs/test_blocks.py compares the pages with these tables. In addition, tests/unit/docs/test_docs.py parses
all commands and compiles all Python blocks. Blocks are identified by their page and first words.
"""

from __future__ import annotations

RUN = {
    "clients": True,
    "converting": False,
    "errors": True,
    "guides/from-bentoml": False,
    "guides/from-ray-serve": False,
    "guides/from-torchserve": False,
    "guides/hang": True,
    "guides/latency": True,
    "guides/securing": False,
    "guides/upgrading": True,
    "http": True,
    "index": False,
    "native-backends": False,
    "sequences": False,
    "triton": False,
    "tutorials/folder": False,
    "tutorials/images": False,
    "tutorials/onnx-model": False,
    "tutorials/python-function": False,
    "tutorials/streaming": False,
}
"""Pages that tests/process/docs/test_pages.py runs from the first block to the last -> whether the sample models are
served at the start."""

NEEDS = {
    "converting": ("onnx", "onnxruntime", "torch"),
    "guides/from-torchserve": ("torch",),
    "tutorials/images": ("PIL", "onnx", "onnxruntime"),
    "tutorials/onnx-model": ("onnx", "onnxruntime"),
}
"""Page -> packages that it needs."""

_TESTS = {
    "tests/process/cli/load/test_bench.py": {"bench": "sh"},
    "tests/process/cli/test_check.py": {"check": "sh text"},
    "tests/process/docs/test_cli_page.py": {"cli": "sh", "lifecycle": "sh", "metrics": "sh"},
    "tests/process/pipelines/test_ensembles.py": {"ensembles": "pbtxt python"},
    "tests/process/docs/test_examples_page.py": {"examples": "python sh"},
    "tests/deploy/test_documents.py": {"kubernetes": "sh"},
    "tests/process/models/python/test_model_files.py": {"models": "python sh"},
    "tests/process/docs/test_openai_page.py": {"openai": "python sh text"},
    "tests/process/models/python/test_python_models.py": {"python": "python"},
    "tests/process/cli/run/test_run.py": {"run": "sh"},
    "tests/unit/broker/config/test_settings.py": {"settings": "toml"},
    "tests/sim/test_words.py": {"sizing": "python sh"},
    "tests/process/cli/operations/test_top.py": {"top": "sh"},
    "tests/process/docs/test_transformers_page.py": {"transformers": "python sh"},
}
"""Test -> the pages and languages whose blocks it runs, except those of NOT_RUN."""
TESTED = {
    (page, language): test
    for test, pages in _TESTS.items()
    for page, languages in pages.items()
    for language in languages.split()
}

_SHARED_REASONS: dict[str, dict[str, tuple[str, ...]]] = {
    "output with times, numbers of processes or versions that differ from run to run": {
        "bench": ("load  ", "tokens  "), "cli": ("model  ", "output  "), "many-models": ("INFO",),
        "metrics": ("2026-01-31",), "sizing": ("POLICY", "model:", "Best:"), "repository": ("mlp/config.pbtxt",),
        "run": ("mlp version 1",), "scaling": ("INFO",), "top": ("shmserve 0.1.0",),
        "traces": ("MODEL  ", "mlp version 1"), "transformers": ("encoder version 1",),
    },
    "a directory": {
        "backends": ("net/", "backends/"), "development": ("shmserve/",), "models": ("models/",),
        "repository": ("repository/",), "trees": ("fraud/",),
    },
    "needs systemd; tests/process/service runs the unit's commands": {"operations": ("",), "processes": ("systemctl",)},
    "needs a GPU": {"gpu": ("",), "processes": ("CUDA_MPS",)},
    "measures for minutes": {
        "decisions": ("make bench",), "compare": ("make compare",), "performance": ("make bench",),
    },
    "a part of a program or of a message": {
        "agents": ("agents [",), "ensembles": ("answer =", "for answer"), "metrics": ("with shmserve.Client",),
    },
    "needs an address or a file of another machine": {
        "backends": ("git clone",), "remote": ("shmserve pull", "shmserve serve"), "triton": ("git clone",),
    },
    "a server with paths of the reader's machine; its options are parsed": {
        "agents": ("shmserve serve",), "alerts": ("shmserve serve",), "guides/securing": ("shmserve serve",),
        "many-models": ("shmserve serve",), "metrics": ("shmserve serve",), "security": ("shmserve serve",),
        "settings": ("shmserve serve", "SHMSERVE_LOG_VERBOSE"),
    },
    "tests/process/gateway has requests like it": {
        "http": ("curl localhost:8000/v2/models/my_model", "curl localhost:8000/v2/models/find"),
        "metrics": ("curl localhost:8000/v2/logging",),
    },
    "a gateway on the usual ports; tests/process/gateway starts gateways with these options": {
        "http": ("shmserve gateway",), "page": ("shmserve gateway", "shmserve serve"),
    },
    "a program of the other server; only compiled": {
        "guides/from-bentoml": ("import bentoml",), "guides/from-ray-serve": ("from ray",),
        "guides/from-torchserve": ("import torch\nfrom ts",),
    },
}  # fmt: skip
"""Reason -> pages, and the first words of their blocks that are not run for it."""
NOT_RUN = {
    ("agents", "openssl"): "makes keys; tests/unit/repo/agents make theirs in Python",
    ("agents", "age -r"): "needs the program age",
    ("agents", "from pathlib"): "compiled only: an outline of an agent",
    ("alerts", "cp deploy"): "needs Prometheus or Grafana as a service; tests/fleet runs Prometheus with these files",
    ("backends", "class Net"): "needs an engine that is not in the suite's environment; make test-engines",
    ("backends", "from nvidia.dali"): "tests/process/worker/backends/test_dali.py runs it where DALI is installed",
    ("backends", "# backends/"): "tests/process/docs/test_backends_page.py serves these files",
    ("backends", "shmserve serve"): "tests/process/docs/test_backends_page.py serves with these options",
    ("backends", "[project.entry-points"): "a part of the reader's pyproject.toml",
    ("balancers", ""): "tests/fleet runs the balancers with these files and commands",
    ("check", "digits"): "tests/process/cli/test_check.py compares it",
    ("check", "d  1 error"): "tests/process/cli/test_check.py compares it",
    ("cli", 'eval "$(shmserve completion'): "for an interactive shell; tests/process/cli tests the completion",
    ("clients", "from shmserve.testing"): "tests/process/service/test_testing.py runs such a test",
    ("development", "make"): "the suite itself",
    ("development", "SHMSERVE_EXPLORE"): "the suite itself",
    ("development", "SHMSERVE_GPU_STANDINS"): "make gpu-rehearsal runs the script without a GPU",
    ("development", "TEST_ARGS"): "make gpu-rehearsal runs the script without a GPU",
    ("ensembles", "shmserve check"): "the test of the page does the same in Python",
    ("ensembles", "page  2 errors"): "tests/process/pipelines/test_ensembles.py compares it",
    ("grpc", ""): "needs tritonclient; tests/tritonclient makes these calls in its environment",
    ("install", "pip install"): "installs; tests/process/service/test_install.py installs a wheel",
    ("lifecycle", "import shmserve"): "needs a server in the mode explicit; tests/process/models has these calls",
    ("llm", "shmserve serve"): "needs a large model; tests/process/models/language serves small ones",
    ("metrics", "shmserve stats --prometheus >"): "writes a file for another program",
    ("models", "shmserve serve"): "the tests of the page serve these files",
    ("models", "shmserve ready"): "the tests of the page serve other models of it",
    ("models", "import json"): "compiled only: a first model; tests/process/models serves models like it",
    ("models", "cat\n"): "tests/process/models/test_classes.py writes it",
    ("onnx", "import onnxruntime"): "needs a model of the reader's",
    ("sizing", "shmserve plan"): "simulates for a minute; tests/sim/test_fleet.py simulates smaller fleets",
    ("sizing", "shmserve tune"): "tests/process/cli/load/test_tune.py runs these commands",
    ("python", "import threading"): "tests/process/docs/test_pages.py serves it for the page on the clients",
    ("python", "import asyncio"): "compiled only; tests/process/models has models like it",
    ("release-notes", "pip install"): "the packages are not published; tests/process/cli has the commands",
    ("releases", "make package"): "make test-package builds and tests the packages",
    ("ray", ""): "needs Ray and a cluster; tests/ray runs the application and the predictor",
    ("kubernetes", "docker build"): "needs a registry; tests/deploy builds and runs the image with Podman",
    ("repository", "python -m grpc_tools"): "make proto",
    ("sequences", "control_input ["): "a part of config.pbtxt, inside sequence_batching",
    ("sequences", "state ["): "a part of config.pbtxt, inside sequence_batching",
    ("tcp", ""): "writes to /etc and the home directory; tests/process/gateway makes keys and connects with them",
    ("traces", "shmserve trace"): "records for half a minute; tests/process/cli runs shorter ones",
    ("traces", "pip install"): "needs a collector; tests/process/gateway has a stand-in for one",
    ("triton", "ln -s"): "writes to the home directory; tests/unit/clients/cli tests such a link",
    ("wire", "import os, msgpack"): "tests/conformance/wire_client.py is a client like it",
    **{
        (page, words): reason
        for reason, pages in _SHARED_REASONS.items()
        for page, blocks in pages.items()
        for words in blocks
    },
}
"""Page and first words of a block -> why it is not run. "" stands for all blocks of a page."""


def reason_not_to_run(page: str, text: str) -> str:
    """The reason, or "" if the block is run or checked."""
    found = [key for key in NOT_RUN if key[0] == page and text.startswith(key[1])]
    return NOT_RUN[max(found, key=lambda key: len(key[1]))] if found else ""
