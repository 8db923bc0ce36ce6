"""`shmserve init`: writes the directory of a new model, and prints the commands that serve and call it."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from shmserve.clients.cli.commands.base import complain, print_json
from shmserve.errors import NotFound
from shmserve.paths import python
from shmserve.repo.config.complete import TensorFacts
from shmserve.repo.starters.config_text import Layout, example
from shmserve.repo.starters.starter import TORCH_FILES, WRONG_FILE, DescribedTensors, Starter, starter_of, write
from shmserve.terminal.errors import Failed, Misuse

DESCRIBE = "shmserve.workers.backends.pytorch.describe"
DESCRIBE_S = 300.0


def init(args: argparse.Namespace) -> int:
    description = described(args) if Path(args.source).suffix in TORCH_FILES else None
    try:
        starter = starter_of(args.source, description)
    except NotFound as error:
        raise Misuse(str(error)) from error
    except OSError as error:
        raise Failed(f"cannot read {args.source}: {error.strerror}") from error
    try:
        files = write(starter, args.name, args.repository)
    except OSError as error:
        raise Failed(f"{error.filename or args.repository}: {error.strerror}") from error
    commands = next_commands(args.name, args.repository, starter)
    if args.json:
        print_json(
            {
                "model": args.name,
                "backend": starter.layout.backend,
                "files": list(map(str, files)),
                "warning": starter.warning,
                "commands": commands,
            }
        )
        return 0
    print("\n".join(map(str, files)))
    if starter.warning:
        complain(args, f"warning: {starter.warning}")
    print_commands(commands)
    return 0


def next_commands(name: str, repository: Path, starter: Starter) -> list[str]:
    return [
        shlex.join(["shmserve", "serve", "--model-repository", str(repository)]),
        shlex.join(["shmserve", "infer", name, *(starter.request or ["--random", *_shapes(starter.layout)])]),
    ]


def print_commands(commands: Sequence[str]) -> None:
    print("\nServe it, and from another terminal send it a request:\n")
    print("\n".join(f"  {command}" for command in commands))


def _shapes(layout: Layout) -> list[str]:
    """Options for inputs for which size 1, the default of --random, is probably too small."""
    words = []
    for tensor in layout.inputs:
        dims = example(tensor.dims)
        if dims != [abs(dim) for dim in tensor.dims]:
            words += ["--shape", f"{tensor.name}={','.join(map(str, [1, *dims] if layout.rows else dims))}"]
    return words


def described(args: argparse.Namespace) -> DescribedTensors | None:
    """The tensors of a PyTorch file, determined in a separate process; None if that fails."""
    if importlib.util.find_spec("torch") is None or not Path(args.source).is_file():
        return None
    command = [*python(), "-m", DESCRIBE, args.source]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DESCRIBE_S)
    except subprocess.TimeoutExpired:
        complain(args, f"warning: {args.source} could not be read within {DESCRIBE_S:.0f} s")
        return None
    if ran.returncode == WRONG_FILE:
        raise Failed(ran.stderr.strip().rpartition("\n")[2])
    if ran.returncode:
        complain(args, f"warning: reading {args.source} ended with {ran.returncode}: {ran.stderr.strip()[-500:]}")
        return None
    result = json.loads(ran.stdout.strip().rpartition("\n")[2])
    if result is None:
        return None
    inputs, outputs = (
        [TensorFacts(name, dtype, tuple(dims)) for name, dtype, dims in result[kind]] for kind in ("inputs", "outputs")
    )
    return DescribedTensors(inputs, outputs, result["batches"], result["note"])
