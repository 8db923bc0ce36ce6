"""`shmserve infer`: sends a request, once or repeatedly, and prints the outputs or writes them to files."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shmserve.clients.cli.commands.base import connected, counted, print_json
from shmserve.session import Raw
from shmserve.terminal import inputs, output
from shmserve.terminal.errors import Misuse
from shmserve.terminal.values import Spec

if TYPE_CHECKING:
    from shmserve.clients.cli.commands.base import AnyClient
    from shmserve.session import Result


def infer(args: argparse.Namespace) -> int:
    if args.stream and args.repeat > 1:
        raise Misuse("--stream and --repeat cannot be combined")
    source = inputs.InputSource(args.input, args.file, args.random, args.batch, args.shape, args.seed)
    source.check()
    with connected(args) as client:
        metadata = client.metadata(args.model, args.version)
        known = inputs.specs(metadata)
        arrays = inputs.inputs(source, args.model, known, lambda: _max_batch(args, client))
        dtypes = {spec["name"]: spec["datatype"] for spec in metadata["outputs"]}
        if args.stream:
            _stream(args, client, _typed(arrays, known), dtypes)
            return 0
        result, seconds = _run(args, client, _typed(arrays, known))
        files = output.write(args.out, result, dtypes) if args.out is not None else {}
        if args.json:
            print_json(output.document(args.model, result.version, result, dtypes, files, seconds), indent=None)
        else:
            print(output.outputs_table(result, dtypes, files))
            print()
            print(f"{args.model} version {result.version}, {output.timing(seconds)}")
    return 0


def _stream(args: argparse.Namespace, client: AnyClient, arrays: Mapping[str, Any], dtypes: Mapping[str, str]) -> None:
    """Prints answers as they arrive, each as a table or as a JSON document on one line."""
    started = time.perf_counter()
    seconds: list[float] = []
    with client.stream(args.model, arrays, outputs=_outputs(args), version=args.version, timeout=args.timeout) as parts:
        for part in parts:
            seconds.append(time.perf_counter() - started)
            folder = args.out / str(len(seconds)) if args.out is not None else None
            files = output.write(folder, part, dtypes) if folder is not None else {}
            if args.json:
                document = output.document(args.model, part.version, part, dtypes, files, seconds[-1:])
                print_json(document | {"part": len(seconds)}, indent=None)
            else:
                print(f"part {len(seconds)} after {output.timing(seconds[-1:])}")
                print(f"{output.outputs_table(part, dtypes, files)}\n")
            sys.stdout.flush()
    if not args.json:
        took = output.timing([time.perf_counter() - started])
        print(f"{args.model}, {counted(len(seconds), 'part')} in {took}")


def _outputs(args: argparse.Namespace) -> list[str] | None:
    return args.outputs.split(",") if args.outputs else None


def _max_batch(args: argparse.Namespace, client: AnyClient) -> int:
    maximum: int = client.config(args.model, args.version)["max_batch_size"]
    return maximum


def _typed(arrays: inputs.Arrays, known: Mapping[str, Spec]) -> dict[str, Any]:
    """Wraps BF16 bits in Raw; the type of all other arrays follows from their dtype."""
    return {name: Raw("BF16", value) if known[name]["datatype"] == "BF16" else value for name, value in arrays.items()}


def _run(args: argparse.Namespace, client: AnyClient, arrays: Mapping[str, Any]) -> tuple[Result, list[float]]:
    outputs = _outputs(args)
    seconds = []
    for _ in range(args.repeat):
        started = time.perf_counter()
        result = client.infer(args.model, arrays, outputs=outputs, version=args.version, timeout=args.timeout)
        seconds.append(time.perf_counter() - started)
    return result, seconds
