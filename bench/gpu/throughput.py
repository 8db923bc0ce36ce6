"""PyTorch on the GPU through the server, as a share of the same model in one bare process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from bench.gpu import models as gpu_models
from bench.gpu.resnet import BLOCKS, CLASSES
from bench.gpu.setting import Busy, GpuSetting, need_torch
from bench.lib import models
from bench.lib.child import Child
from bench.lib.clock import in_turn
from bench.lib.setting import serving
from bench.lib.table import Row

FLIGHTS = (1, 4, 16, 64)
BATCHES = (1, 4, 8, 16, 32, 64)
LARGEST = 64
TENSORS = ["INPUT__0", "OUTPUT__0"]
GRAPHS = "optimization { cuda { graphs: true } }"
KINDS = {"batched": "dynamic batching", "alone": "no batching", "graphs": "CUDA graphs"}
"""Model -> what it shows."""


def resnet(setting: GpuSetting) -> list[Row]:
    """A network of the size of ResNet-50 at 1, 4, 16 and 64 in flight, with and without dynamic batching: share of the
    bare model at its best batch.
    """
    need_torch(setting.device)
    shape = [3, setting.side, setting.side]
    file = network(setting)
    repository = setting.repository("resnet")
    write(repository, "batched", setting, dynamic=True)
    write(repository, "alone", setting)
    write(repository, "graphs", setting, dynamic=True, more=GRAPHS)
    with ExitStack() as stack:
        server = stack.enter_context(serving(repository, "--exit-on-error", "true"))
        busy: Callable[[], str] = str
        if setting.device != "cpu":
            sampler = Busy()
            stack.callback(sampler.close)
            busy = sampler.text
        arguments = {"model": str(file), "shape": shape, "device": setting.device}
        bare = stack.enter_context(Child("bench.gpu.parties:engine", **arguments))
        client = stack.enter_context(
            Child("bench.gpu.parties:stream", url=server.lane, shape=shape, names=TENSORS, flight=max(FLIGHTS))
        )
        best, rates = best_batch(bare, setting)
        shown: dict[str, str] = {}

        def party(name: str, child: Child, **order: Any) -> Callable[[], float]:
            def turn() -> float:
                busy()
                rate = float(child.ask(seconds=setting.seconds, **order)["per_s"])
                shown[name] = busy()
                return rate

            return turn

        parties = {"bare": party("bare", bare, batch=best)}
        for model in KINDS:
            for flight in FLIGHTS if model != "graphs" else FLIGHTS[:1]:
                name = f"{model} {flight}"
                parties[name] = party(name, client, model=model, flight=flight)
        in_turn(1, parties)  # engines optimise a program during its first runs
        results = {name: median(values) for name, values in in_turn(setting.rounds, parties).items()}
    batches = ", ".join(f"{batch}: {rate:,.0f}/s" for batch, rate in rates.items())
    rows: list[Row] = []
    for name, rate in results.items():
        model, _, number = name.partition(" ")
        if model == "bare":
            continue
        title = f"ResNet-50 size, {number} in flight, {KINDS[model]}"
        beside = f"{rate:,.0f}/s, {shown[name]}; bare {results['bare']:,.0f}/s at batch {best}, {shown['bare']}"
        if not rows:
            beside += f"; bare by batch {batches}"
        goal = 0.97 if name == f"batched {max(FLIGHTS)}" else None
        rows.append(Row(title, rate / results["bare"], "of bare", at_least=goal, beside=beside))
    return rows


def network(setting: GpuSetting) -> Path:
    """The file of the network; a small one in tests."""
    file = setting.work / "torch" / f"resnet-{setting.side}.pt"
    width, blocks = (64, BLOCKS) if setting.side == 224 else (8, (1, 1))
    if not file.exists():
        gpu_models.torch_file(file, "save_network", side=setting.side, width=width, blocks=list(blocks))
    return file


def write(repository: Path, name: str, setting: GpuSetting, **more: Any) -> None:
    """`more`: fields of `Model`."""
    tensors = {TENSORS[0]: ("FP32", [3, setting.side, setting.side])}, {TENSORS[1]: ("FP32", [CLASSES])}
    model = models.Model("pytorch", *tensors, max_batch=LARGEST, kind=setting.kind, **more)
    gpu_models.torch_model(repository, name, network(setting), model)


def best_batch(bare: Child, setting: GpuSetting) -> tuple[int, dict[int, float]]:
    """The batch with the most rows per second, and the rate of each."""
    rates = {batch: float(bare.ask(seconds=setting.seconds / 2, batch=batch)["per_s"]) for batch in BATCHES}
    return max(rates, key=lambda batch: rates[batch]), rates


def overlap(setting: GpuSetting) -> list[Row]:
    """Copies to the device, computation and copies back: overlapping batches, or two instances, over one that waits for
    each batch; beside it CUDA streams without a server.
    """
    need_torch(setting.device)
    shape, batch = [3, setting.side, setting.side], 16
    file, repository = network(setting), setting.repository("overlap")
    serial = {"overlap_batches": "false"}
    write(repository, "serial", setting, dynamic=True, parameters=serial)
    write(repository, "overlapping", setting, dynamic=True)
    write(repository, "two", setting, dynamic=True, parameters=serial, instances=2)
    rows = []
    with ExitStack() as stack:
        server = stack.enter_context(serving(repository, "--exit-on-error", "true"))
        client = stack.enter_context(
            Child("bench.gpu.parties:stream", url=server.lane, shape=shape, names=TENSORS, flight=LARGEST)
        )
        parties = {
            name: _rate(client, setting, model=name, flight=LARGEST) for name in ("serial", "overlapping", "two")
        }
        if setting.device != "cpu":
            arguments = {"model": str(file), "batch": batch, "shape": shape, "device": setting.device}
            bare = stack.enter_context(Child("bench.gpu.parties:streams", **arguments))
            parties |= {f"streams {count}": _rate(bare, setting, count=count) for count in (1, 2, 4)}
        results = {name: median(values) for name, values in in_turn(setting.rounds, parties).items()}
    if setting.device != "cpu":
        one, two, four = (results[f"streams {count}"] for count in (1, 2, 4))
        beside = f"one {one:,.0f}/s, two {two:,.0f}/s, four {four:,.0f}/s; batches of {batch}"
        rows.append(Row("two streams over one, bare", two / one, "x", beside=beside))
    for name, title in (("overlapping", "overlapping batches over serial ones"), ("two", "two instances over one")):
        beside = f"{results['serial']:,.0f}/s, {results[name]:,.0f}/s, {LARGEST} in flight"
        rows.append(Row(title, results[name] / results["serial"], "x", beside=beside))
    return rows


def _rate(child: Child, setting: GpuSetting, **order: Any) -> Callable[[], float]:
    return lambda: float(child.ask(seconds=setting.seconds, **order)["per_s"])
