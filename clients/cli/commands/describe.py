"""`shmserve describe`: prints the operators of an ONNX model, and the speed that this machine's arithmetic and memory
allow at most."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmserve.clients.cli.commands.base import print_json, screen_of
from shmserve.errors import InvalidRequest
from shmserve.terminal.errors import Failed, Misuse

if TYPE_CHECKING:
    from shmserve.terminal.console import Screen
    from shmserve.tools.describe.machine import MachineSpeed
    from shmserve.tools.describe.network import Network, NetworkWork

ROWS = (1, 8, 32)
_UNITS = ("", "k", "M", "G", "T")


def describe(args: argparse.Namespace) -> int:
    from shmserve.tools.describe.machine import measure
    from shmserve.tools.describe.network import network_of, read

    file = _file(args.model)
    try:
        model = read(file)
    except InvalidRequest as error:
        raise Failed(str(error)) from error
    shapes = _shapes(args.shape, network_of(model, {}, 1)[0])
    network, first = network_of(model, shapes, 1)
    if args.rows and not network.batches:
        raise Misuse("--rows is for models that batch, and the first dim of this model's tensors is fixed")
    sizes = sorted(set(args.rows or (ROWS if network.batches else (1,))))
    work_items = [first if rows == 1 else network_of(model, shapes, rows)[1] for rows in sizes]
    machine = measure()
    if args.json:
        print_json(_document(network, work_items, machine))
    else:
        print(_text(str(file), network, work_items, machine, screen_of(args)))
    return 0


def _file(provided: Path) -> Path:
    if provided.is_file():
        return provided
    versions = [path for path in provided.glob("*/model.onnx") if path.parent.name.isdecimal()]
    if not versions:
        raise Misuse(f"{provided}: expected an ONNX file, or a model directory with a file such as 1/model.onnx")
    return max(versions, key=lambda path: int(path.parent.name))


def _shapes(texts: list[str], network: Network) -> dict[str, tuple[int, ...]]:
    sizes = {}
    for text in texts:
        name, _, dims = text.partition("=")
        if name not in network.inputs:
            raise Misuse(f"the model has no input '{name}'; it has {', '.join(network.inputs)}")
        count = len(network.inputs[name])
        if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", dims) or dims.count(",") + 1 != count:
            example = f"{name}={','.join('1' * count)}"
            raise Misuse(f"--shape {text}: input '{name}' has {count} dims of 1 or more, e.g. {example}")
        sizes[name] = tuple(map(int, dims.split(",")))
    return sizes


# ------------------------------------------------------------------------------------------------- output


def _bound(network: Network, work: NetworkWork, machine: MachineSpeed) -> tuple[str, float]:
    """What bounds the model, and batches per second at most."""
    compute, memory = machine.seconds(work.flops, network.weight_bytes, work.input_bytes + work.output_bytes)
    return ("arithmetic", 1 / compute) if compute >= memory else ("memory", 1 / memory)


def _document(network: Network, work_items: list[NetworkWork], machine: MachineSpeed) -> dict[str, Any]:
    entries = []
    for work in work_items:
        bound, rate = _bound(network, work, machine)
        entries.append(work._asdict() | {"bound": bound, "rows_per_second_per_core": rate * work.rows})
    return {
        "operators": [one._asdict() for one in network.operators],
        "parameters": network.parameters,
        "weight_bytes": network.weight_bytes,
        "opset": network.opset,
        "inputs": {name: list(shape) for name, shape in network.inputs.items()},
        "outputs": {name: list(shape) for name, shape in network.outputs.items()},
        "batches": network.batches,
        "work": entries,
        "machine": machine._asdict(),
    }


def _text(name: str, network: Network, work_items: list[NetworkWork], machine: MachineSpeed, screen: Screen) -> str:
    from shmserve.terminal.console import Column
    from shmserve.terminal.tables import bytes_text, scaled_text

    def amount(value: float, unit: str = "") -> str:
        gap = " " if unit else ""
        return scaled_text(value, [f"{gap}{prefix}{unit}" for prefix in _UNITS], 1000)

    total = max(network.flops, 1)
    operators = [
        [
            one.kind,
            str(one.calls),
            amount(one.flops) + (f" + {one.unknown} unknown" if one.unknown else ""),
            f"{one.flops / total:.1%}",
            amount(one.parameters),
        ]
        for one in network.operators
    ]
    columns = [Column("OPERATOR"), *(Column(text, right=True) for text in ("COUNT", "FLOPS", "SHARE", "PARAMETERS"))]
    bounds = []
    for work in work_items:
        bound, rate = _bound(network, work, machine)
        sizes = [bytes_text(work.input_bytes), bytes_text(work.output_bytes)]
        bounds.append([str(work.rows), amount(work.flops), *sizes, bound, f"{amount(rate * work.rows)}/s"])
    heads = ("ROWS", "FLOPS", "INPUT", "OUTPUT", "BOUND BY", "ROWS/S PER CORE, AT MOST")
    count = sum(one.calls for one in network.operators)
    return "\n\n".join(
        [
            f"{name}: {count} operators, {amount(network.parameters)} parameters, "
            f"{bytes_text(network.weight_bytes)} of weights, opset {network.opset}",
            screen.table(columns, operators),
            screen.table([Column(head, right=True) for head in heads], bounds),
            f"one core of this machine: {amount(machine.flops, 'FLOP/s')}, memory "
            f"{bytes_text(round(machine.memory))}/s, cache {bytes_text(machine.cache)}",
        ]
    )
