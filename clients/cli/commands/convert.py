"""`shmserve convert` and `shmserve quantize`: write a model directory with an ONNX file made of another model, after a
temporary server has run both and their answers were compared.

Invariant: `convert` writes the new directory only if the answers agree. `quantize` reports how much they differ.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shmserve.clients.cli.commands.base import StatusLine, print_json, screen_of
from shmserve.errors import NotFound
from shmserve.terminal.errors import Failed, Misuse

if TYPE_CHECKING:
    from shmserve.clients.client import Client
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.repo.starters.starter import Starter
    from shmserve.terminal.console import Screen
    from shmserve.tools.convert.agreement import Ask, OutputDifference
    from shmserve.tools.convert.originals import Original

ASK_S, LOAD_S = 120.0, 600.0
ROWS = (1, 3, 8)
"""Batch sizes of the requests, as far as the model takes them."""
SEEDS = 4
"""Different random requests of each size."""
Requests = dict[int, list[dict[str, Any]]]
"""Rows -> the requests that have so many."""


class Compared(NamedTuple):
    """The new model beside the one that it was made of."""

    original: Original
    starter: Starter
    requests: Requests
    differences: list[OutputDifference]
    ask: tuple[Ask, Ask]


def convert(args: argparse.Namespace) -> int:
    from shmserve.tools.convert.exports import export

    def make(original: Original, config: ModelConfig, requests: Requests, out: Path) -> None:
        export(original.file, config, out, args.opset)

    with _compared(args, make) as compared:
        if not all(one.within(args.tolerance) for one in compared.differences):
            if args.json:
                print_json({"model": args.name, "outputs": _plain(compared.differences)})
            else:
                print(_differences(compared.differences, screen_of(args)))
            text = f"the outputs differ by more than --tolerance {args.tolerance:g}, so {args.name} is not written"
            raise Failed(text)
        _write(args, compared, {}, "")
    return 0


def quantize(args: argparse.Namespace) -> int:
    from shmserve.repo.starters.starter import starter_of
    from shmserve.terminal.console import Column
    from shmserve.terminal.tables import bytes_text, duration_text
    from shmserve.tools.convert.agreement import times
    from shmserve.tools.convert.smaller import shrink

    def make(original: Original, config: ModelConfig, requests: Requests, out: Path) -> None:
        if config.backend != "onnxruntime":
            raise Misuse(f"{args.source} is for {config.backend}; make an ONNX model of it first: shmserve convert")
        shrink(args.precision, original.file, out, [one for ones in requests.values() for one in ones])

    with _compared(args, make) as compared:
        measured = {rows: times(compared.ask, requests) for rows, requests in compared.requests.items()}
        starters = starter_of(str(compared.original.file)), compared.starter
        sizes = [sum(file.stat().st_size for file in starter.files.values()) for starter in starters]
        columns = [Column("MODEL"), Column("FILE", right=True)]
        columns += [Column(f"{rows} ROW{'S' * (rows > 1)}", right=True) for rows in measured]
        rows = [
            [name, bytes_text(size), *map(duration_text, seconds)]
            for name, size, *seconds in zip(("original", args.precision), sizes, *measured.values(), strict=True)
        ]
        document = {
            "bytes": dict(zip(("original", "new"), sizes, strict=True)),
            "seconds": {
                str(rows): dict(zip(("original", "new"), both, strict=True)) for rows, both in measured.items()
            },
        }
        _write(args, compared, document, screen_of(args).table(columns, rows))
    return 0


# ------------------------------------------------------------------------------------------------- both models


@contextmanager
def _compared(
    args: argparse.Namespace, make: Callable[[Original, ModelConfig, Requests, Path], None]
) -> Iterator[Compared]:
    """Serves the original, makes the new model, serves that too and compares the answers. Both are served within the
    block."""
    from shmserve.clients.cli.commands.init import described
    from shmserve.clients.cli.temporary_server import TemporaryServer, ended_in_order
    from shmserve.repo.config.schema import from_triton_json
    from shmserve.repo.starters.starter import starter_of, write
    from shmserve.tools.convert.agreement import differences
    from shmserve.tools.convert.originals import original_of

    if (args.repository / args.name).exists():
        raise Misuse(
            f"{args.repository / args.name} exists, and is not overwritten; choose another NAME or --repository"
        )
    with ended_in_order(), tempfile.TemporaryDirectory(prefix="shmserve-convert-") as scratch, StatusLine() as status:
        old, new, file = Path(scratch, "given"), Path(scratch, "new"), Path(scratch, "model.onnx")
        old.mkdir()
        new.mkdir()
        try:
            original = original_of(Path(args.source), old, lambda: described(args))
        except NotFound as error:
            raise Misuse(str(error)) from error
        options = ["--model-control-mode", "explicit"]
        with TemporaryServer([original.repository, new], options) as server, server.client(ASK_S) as client:
            server.await_start()
            status.show(f"loading {args.source}")
            client.load(original.name, timeout=LOAD_S)
            config = from_triton_json(client.config(original.name))
            requests = _requests(args, client, original.name, config)
            status.show(f"writing the ONNX file of {args.name}")
            with _quiet():
                make(original, config, requests, file)
            starter = starter_of(str(file))
            write(starter, args.name, new)
            client.load(args.name, timeout=LOAD_S)
            status.show("comparing the answers")
            asks = (_ask(client, original.name), _ask(client, args.name))
            every = [request for some in requests.values() for request in some]
            results = differences(*[[ask(request) for request in every] for ask in asks])
            yield Compared(original, starter, requests, results, asks)


@contextmanager
def _quiet() -> Iterator[None]:
    """Converters log warnings about themselves; whether the new model is right is checked by running it. What they
    print, also from C++, goes to standard error."""
    before = logging.root.manager.disable
    sys.stdout.flush()
    output = os.dup(1)
    os.dup2(2, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(output, 1)
            os.close(output)
            logging.disable(before)


def _ask(client: Client, model: str) -> Ask:
    """Asks a model. Its inputs may have other names or types than those of the requests: their order is the same."""
    import numpy as np

    from shmserve.dtypes import to_numpy

    inputs = client.metadata(model)["inputs"]

    def ask(request: Mapping[str, Any]) -> Mapping[str, Any]:
        names = [entry["name"] for entry in inputs]
        pairs = zip(inputs, request.values() if set(names) != set(request) else map(request.get, names), strict=True)
        return client.infer(
            model,
            {
                entry["name"]: np.asarray(array)
                if entry["datatype"] == "BYTES"
                else np.asarray(array, to_numpy(entry["datatype"]))
                for entry, array in pairs
            },
        )

    return ask


def _requests(args: argparse.Namespace, client: Client, model: str, config: ModelConfig) -> Requests:
    """The arrays of --input, or random ones."""
    from shmserve.terminal import inputs

    known = inputs.specs(client.metadata(model))
    entered = inputs.from_arguments(args.input, known)
    if entered.keys() >= known.keys():
        return batches_of(entered, config.max_batch_size)
    others = {name: spec for name, spec in known.items() if name not in entered}
    if entered and config.max_batch_size:
        raise Misuse(f"--input is missing for {', '.join(others)}: give all inputs of the model, or none")
    shapes = inputs.shapes_from(args.shape, known)
    requests: Requests = {}
    for rows in ROWS if config.max_batch_size else (1,):
        if rows <= max(config.max_batch_size, 1):
            sized = {name: (rows, *shape[1:]) if config.max_batch_size else shape for name, shape in shapes.items()}
            batch = rows if config.max_batch_size else None
            requests[rows] = [
                entered | inputs.random(others, batch, sized, args.seed + number) for number in range(SEEDS)
            ]
    return requests


def batches_of(entered: dict[str, Any], max_batch: int) -> Requests:
    """Splits rows into requests of at most `max_batch` rows. 0: the model does not batch."""
    if not max_batch:
        return {1: [entered]}
    rows = min(map(len, entered.values()))
    requests: Requests = {}
    for first in range(0, rows, max_batch):
        batch = {name: array[first : first + max_batch] for name, array in entered.items()}
        requests.setdefault(min(max_batch, rows - first), []).append(batch)
    return requests


# ------------------------------------------------------------------------------------------------- the outcome


def _write(args: argparse.Namespace, compared: Compared, document: Mapping[str, Any], text: str) -> None:
    from shmserve.clients.cli.commands.init import next_commands, print_commands
    from shmserve.repo.starters.starter import write

    files = write(compared.starter, args.name, args.repository)
    commands = next_commands(args.name, args.repository, compared.starter)
    if args.json:
        outputs = _plain(compared.differences)
        print_json(
            {"model": args.name, "files": list(map(str, files)), "outputs": outputs, **document, "commands": commands}
        )
        return
    print("\n".join(map(str, files)))
    for part in (text, _differences(compared.differences, screen_of(args))):
        if part:
            print(f"\n{part}")
    print_commands(commands)


def _plain(differences: Sequence[OutputDifference]) -> list[dict[str, Any]]:
    return [one._asdict() | {"largest": one.largest if isfinite(one.largest) else None} for one in differences]


def _differences(differences: Sequence[OutputDifference], screen: Screen) -> str:
    from shmserve.terminal.console import Column

    columns = [
        Column("OUTPUT"),
        Column("LARGEST DIFFERENCE", right=True),
        Column("LARGEST VALUE", right=True),
        Column("SAME CLASS", right=True),
    ]
    rows = [
        [
            one.output,
            f"{one.largest:.3g}",
            f"{one.value:.3g}" if one.value else "-",
            f"{one.same_class:.1%}" if one.same_class is not None else "-",
        ]
        for one in differences
    ]
    return screen.table(columns, rows)
