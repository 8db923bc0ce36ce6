"""A chain of three models, run as an ensemble, compared with a single one of them and with three calls by a client.

A model copies its tensor once, except between two steps of the ensemble, where it passes the tensor on, so the ensemble
copies as much as a single model. In `readers`, no model copies the tensor, so that only the cost of passing handles is
measured.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.lib import models
from bench.lib.child import Answer, Child, Handler
from bench.lib.clock import alternate, durations, summary
from bench.lib.setting import Setting, serving

MIB = 1 << 20
STEPS = ("one", "two", "three")
SIZES = (MIB, 16 * MIB, 64 * MIB)
READ = (4096, 64 * MIB)

LOOK = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.look(request) for request in requests]

    def look(self, request):
        x, last = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("x", "last"))
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x[:1] + last)])
"""


class EnsembleTimes(NamedTuple):
    """Medians in microseconds, by tensor size in bytes."""

    one: dict[int, float]
    ensemble: dict[int, float]
    calls: dict[int, float]
    readers: dict[int, float]


def run_ensemble(setting: Setting) -> EnsembleTimes:
    repository = setting.repository("ensemble")
    write(repository)
    with (
        serving(repository) as server,
        Child("bench.suites.ensemble:in_a_row", url=server.lane, sizes=SIZES) as row,
        Child("bench.suites.ensemble:readers", url=server.lane, sizes=READ) as readers,
    ):
        orders = [(what, size) for size in SIZES for what in ("one", "ensemble", "calls")]
        seconds = setting.seconds / 3
        parties = [partial(_median, row, seconds, what=what, size=size) for what, size in orders]
        parties += [partial(_median, readers, seconds, size=size) for size in READ]
        times = [median(values) for values in alternate(setting.rounds, *parties)]
    results: dict[str, dict[int, float]] = {"one": {}, "ensemble": {}, "calls": {}}
    for (what, size), value in zip(orders, times, strict=False):
        results[what][size] = value
    return EnsembleTimes(**results, readers=dict(zip(READ, times[len(orders) :], strict=True)))


def _median(child: Child, seconds: float, **order: object) -> float:
    return float(child.ask(seconds=seconds, **order)["median_us"])


# ------------------------------------------------------------------------------------------------ the repository


def write(repository: Path) -> None:
    for name in STEPS:
        models.write(repository, name, models.identity(), {})
        look = models.Model("python", {"x": ("FP32", [-1]), "last": ("FP32", [1])}, {"y": ("FP32", [1])})
        models.write(repository, f"look_{name}", look, {"model.py": LOOK})
    tensors = ("x", "a", "b", "y")
    chain = [(name, {"x": tensors[at]}, {"y": tensors[at + 1]}) for at, name in enumerate(STEPS)]
    _ensemble(repository, "chain", {"x": [-1]}, {"y": [-1]}, chain)
    lasts = ("last", "a", "b", "y")
    looks = [(f"look_{name}", {"x": "x", "last": lasts[at]}, {"y": lasts[at + 1]}) for at, name in enumerate(STEPS)]
    _ensemble(repository, "readers", {"x": [-1], "last": [1]}, {"y": [1]}, looks)


def _ensemble(
    repository: Path,
    name: str,
    inputs: dict[str, list[int]],
    outputs: dict[str, list[int]],
    steps: list[tuple[str, dict[str, str], dict[str, str]]],
) -> None:
    lines = ['platform: "ensemble"']
    for kind, tensors in (("input", inputs), ("output", outputs)):
        lines += [f'{kind} [ {{ name: "{own}" data_type: TYPE_FP32 dims: {dims} }} ]' for own, dims in tensors.items()]
    lines.append("ensemble_scheduling {")
    for model, reads, makes in steps:
        maps = [f'input_map {{ key: "{own}" value: "{tensor}" }}' for own, tensor in reads.items()]
        maps += [f'output_map {{ key: "{own}" value: "{tensor}" }}' for own, tensor in makes.items()]
        lines.append(f'  step {{ model_name: "{model}" model_version: -1 {" ".join(maps)} }}')
    lines.append("}")
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text("\n".join(lines) + "\n")


# ------------------------------------------------------------------------------------------------ the clients


def in_a_row(url: str, sizes: list[int]) -> Handler:
    """Runs one model, the ensemble, or three calls. Input and output are arrays in shared memory, from `empty()`."""
    import numpy as np

    from shmserve import Client

    client = Client(url)
    places = {}
    for size in sizes:
        x, y = (client.empty((size // 4,), "float32") for _ in range(2))
        x[...] = np.arange(size // 4, dtype=np.float32)
        y[...] = 0
        places[size] = x, y

    def handle(seconds: float, what: str, size: int) -> Answer:
        x, y = places[size]
        first, place = {"x": x}, {"y": y}

        def calls() -> None:
            middle = client.infer("one", first)
            middle = client.infer("two", {"x": middle["y"]})
            client.infer("three", {"x": middle["y"]}, outputs=place)

        def one() -> None:
            client.infer("one", first, outputs=place)

        def ensemble() -> None:
            client.infer("chain", first, outputs=place)

        x[-1] += 1
        taken = summary(durations({"one": one, "ensemble": ensemble, "calls": calls}[what], seconds, warm=3))
        assert np.array_equal(x, y)
        return taken

    return handle


def readers(url: str, sizes: list[int]) -> Handler:
    """Runs the ensemble of three steps that each read one element of the caller's tensor."""
    import numpy as np

    from shmserve import Client

    client = Client(url)
    feeds = {}
    for size in sizes:
        x = client.empty((size // 4,), "float32")
        x[...] = 2
        feeds[size] = {"x": x, "last": np.ones(1, np.float32)}

    def handle(seconds: float, size: int) -> Answer:
        feed = feeds[size]
        assert client.infer("readers", feed)["y"][0] == 7
        return summary(durations(lambda: client.infer("readers", feed)["y"], seconds, warm=20))

    return handle
