"""The agent `convert`: builds TensorRT plans for this machine's GPU from the ONNX files of a model.

Plans are cached by the content of the file and of those with its weights, the configuration, the options, the GPU and
the version of TensorRT.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from shmserve.extras import install_command
from shmserve.repo.agents import Agent, AgentModel, Refused
from shmserve.repo.agents.built_in import digest_of, linked
from shmserve.repo.gpus import discover
from shmserve.repo.load import CONFIG_FILE
from shmserve.repo.onnx.header import NotOnnx, TooLarge, external_files
from shmserve.repo.storage.snapshot import take

SOURCE, TARGET = "model.onnx", "model.plan"
OPTIONS = "build_options"
"""Parameter: further options of `shmserve build`."""
CACHE = "cache_directory"
OUTPUT = 2000
"""Maximum number of characters of a failed build's output in the error."""


class Convert(Agent):
    def load(self, model: AgentModel) -> Path:
        names = sorted(take(model.folder).files)
        sources = [name for name in names if name.partition("/")[2] == SOURCE]
        if not sources:
            raise Refused(f"no version has a file '{SOURCE}'")
        machine = _machine()
        target = linked(model, names, sources)
        for source in sources:
            version = source.partition("/")[0]
            (target / version / TARGET).symlink_to(_plan(model, version, source, machine))
        return target


def _machine() -> str:
    """What a plan depends on, apart from the model."""
    try:
        version = importlib.import_module("tensorrt").__version__
    except ModuleNotFoundError:
        raise Refused(f"it needs the package tensorrt: {install_command('gpu')}") from None
    gpus = discover()
    if not gpus.devices:
        raise Refused(f"there is no GPU to build a plan for{': ' if gpus.why else ''}{gpus.why}")
    return f"TensorRT {version} on {gpus.devices[0].name}"


def _plan(model: AgentModel, version: str, source: str, machine: str) -> Path:
    options = model.parameters.get(OPTIONS, "")
    config = digest_of(model.folder, CONFIG_FILE, "sha256") if (model.folder / CONFIG_FILE).is_file() else ""
    digests = [digest_of(model.folder, name, "sha256") for name in (source, *_weights(model, source))]
    key = "\0".join((*digests, config, options, machine))
    cache = _cache(model)
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = cache / f"{hashlib.sha256(key.encode()).hexdigest()}.plan"
    if not path.is_file():
        print(f"building a plan of version {version} for {machine}", flush=True)
        words = [str(model.folder), "--version", version, "-o", str(path), *shlex.split(options)]
        command = [sys.executable, "-m", "shmserve.clients.cli.main", "build", *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode:
            raise Refused(f"`shmserve build` failed for version {version}: {done.stdout.strip()[-OUTPUT:]}")
    return path


def _weights(model: AgentModel, source: str) -> list[str]:
    """The files with weights that an ONNX file needs. If it cannot be read, the build says why."""
    folder = source.rpartition("/")[0]
    with suppress(NotOnnx, TooLarge), (model.folder / source).open("rb") as file:
        return [os.path.normpath(f"{folder}/{name}") for name in external_files(file)]
    return []


def _cache(model: AgentModel) -> Path:
    configured = model.parameters.get(CACHE, "")
    if configured and not os.path.isabs(configured):
        raise Refused(f"parameter '{CACHE}': found '{configured}', expected an absolute path")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(configured) if configured else base / "shmserve" / "plans"
