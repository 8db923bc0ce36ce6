"""Tensors between processes and to the device: copies between ensemble steps, time of a hand-over, bandwidth."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median

from bench.gpu import models as gpu_models
from bench.gpu.setting import MIB, GpuSetting, Skipped, environment, gpu, need_cupy, need_torch
from bench.lib import models
from bench.lib.child import Child
from bench.lib.clock import in_turn
from bench.lib.setting import serving
from bench.lib.table import Row, micros

RECORDER = Path(__file__).parent / "recorder"
COUNTED = 20
KINDS = {"1": "to the device", "2": "to the host", "3": "within the device"}
ELEMENTS = MIB // 4
STEP_NAMES = ["one", "two", "three"]


# ------------------------------------------------------------------------------------------------ copies, counted


def copies_between_steps(setting: GpuSetting) -> list[Row]:
    """Copies that one more step adds to an ensemble on one GPU, with the caller's tensors on the GPU."""
    need_cupy()
    return [row for name, make in STEPS.items() for row in _copies(setting, name, make)]


def _cupy_step(setting: GpuSetting, root: Path, name: str) -> tuple[str, str]:
    gpu_models.cupy_model(root, name, gpu_models.ADD, [ELEMENTS], [ELEMENTS], setting.kind)
    return "x", "y"


def _torch_step(setting: GpuSetting, root: Path, name: str) -> tuple[str, str]:
    need_torch(setting.device)
    file = setting.work / "torch" / "adder.pt"
    if not file.exists():
        gpu_models.torch_file(file, "save_adder", width=ELEMENTS)
    tensors = {"INPUT__0": ("FP32", [ELEMENTS])}, {"OUTPUT__0": ("FP32", [ELEMENTS])}
    gpu_models.torch_model(root, name, file, models.Model("pytorch", *tensors, kind=setting.kind))
    return "INPUT__0", "OUTPUT__0"


def _onnx_step(setting: GpuSetting, root: Path, name: str) -> tuple[str, str]:
    if importlib.util.find_spec("onnxruntime") is None:
        raise Skipped("onnxruntime is not installed")
    if "CUDAExecutionProvider" not in importlib.import_module("onnxruntime").get_available_providers():
        raise Skipped("this ONNX Runtime has no CUDA")
    file = setting.work / "onnx" / "adder.onnx"
    if not file.exists():
        models.make_adder(file, ELEMENTS)
    tensors = {"x": ("FP32", [ELEMENTS])}, {"y": ("FP32", [ELEMENTS])}
    models.write(root, name, models.Model("onnxruntime", *tensors, kind=setting.kind), {"model.onnx": file})
    return "x", "y"


Step = Callable[[GpuSetting, Path, str], tuple[str, str]]
STEPS: dict[str, Step] = {"CuPy": _cupy_step, "PyTorch": _torch_step, "ONNX Runtime": _onnx_step}


def _copies(setting: GpuSetting, name: str, make: Step) -> list[Row]:
    title = f"copies per added step, {name}"
    repository, journal = setting.repository("copies"), setting.work / f"journal-{name.split()[0]}"
    journal.mkdir()
    try:
        _, _, tensors = (make(setting, repository, step) for step in STEP_NAMES)
    except Skipped as error:
        return [Row(title, None, "", skipped=str(error))]
    for count in (2, 3):
        gpu_models.chain(repository, f"chain{count}", STEP_NAMES[:count], [ELEMENTS], [ELEMENTS], tensors)
    path = os.pathsep.join(filter(None, (str(RECORDER), os.environ.get("PYTHONPATH"))))
    results: dict[int, Counter[str]] = {}
    with (
        environment(PYTHONPATH=path, SHMSERVE_MODEL_COPIES=str(journal)),
        serving(repository, "--exit-on-error", "true") as server,
        Child("bench.gpu.parties:on_device", url=server.lane, elements=ELEMENTS) as client,
    ):
        for count in (2, 3):
            client.ask(model=f"chain{count}", more=count, count=3)
            for file in journal.iterdir():
                file.write_text("")
            client.ask(model=f"chain{count}", more=count, count=COUNTED)
            results[count] = recorded(journal)
    added = results[3] - results[2]
    kinds = ", ".join(f"{KINDS[kind]} {added[kind] / COUNTED:g}" for kind in sorted(added) if kind in KINDS)
    whole = sum(results[3].values()) / COUNTED
    beside = f"{kinds or 'none'}; three steps {whole:g}, two {sum(results[2].values()) / COUNTED:g}, 1 MiB each"
    return [Row(title, sum(added.values()) / COUNTED, "", at_most=0, beside=beside)]


def recorded(journal: Path) -> Counter[str]:
    """The copies of the workers by kind; those of clients, named after their interpreter, do not count."""
    files = [path for path in journal.iterdir() if path.name.startswith(tuple(STEP_NAMES))]
    return Counter(line.split()[0] for path in files for line in path.read_text().splitlines())


# ------------------------------------------------------------------------------------------------ hand-over


def hand_over(setting: GpuSetting) -> list[Row]:
    """A tensor on the GPU from a client to a model, and from step to step, beyond the same requests without it."""
    need_cupy()
    repository, large = setting.repository("hand-over"), setting.mib * MIB // 4
    gpu_models.cupy_model(repository, "last", gpu_models.LAST, [-1], [1], setting.kind)
    gpu_models.cupy_model(repository, "make", gpu_models.MAKE, [1], [-1], setting.kind)
    gpu_models.chain(repository, "steps", ["make", "last"], [1], [1])
    small = 2048  # above the size of tensors that are in the message
    requests = {
        "client": ["last", large, "cuda:0", 3, 3],
        "client, small": ["last", small, "cuda:0", 3, 3],
        "client, host": ["last", large, "", 3, 3],
        "steps": ["steps", 1, "", large, 7],
        "steps, small": ["steps", 1, "", small, 7],
    }
    with (
        serving(repository, "--exit-on-error", "true") as server,
        Child("bench.gpu.parties:copies", size=setting.mib * MIB, place="device") as bare,
        Child("bench.gpu.parties:lone", url=server.lane, requests=requests) as client,
    ):
        parties = {name: _median(client, setting, name=name) for name in requests}
        times = in_turn(setting.rounds, {**parties, "bare": _median(bare, setting)})
    results = {name: median(values) for name, values in times.items()}
    size = f"{setting.mib} MiB"
    rows = []
    for name, what in (("client", "client to model"), ("steps", "step to step")):
        beside = f"{micros(results[name])} whole, with 8 KiB {micros(results[f'{name}, small'])}"
        beside += f"; bare cudaMemcpyAsync within the device {micros(results['bare'])}"
        if name == "client":
            beside += f"; from the host {micros(results['client, host'])}"
        value = results[name] - results[f"{name}, small"]
        rows.append(Row(f"hand-over of {size} on the GPU, {what}", value, "us", at_most=100.0, beside=beside))
    return rows


def _median(child: Child, setting: GpuSetting, **order: str | int) -> Callable[[], float]:
    return lambda: float(child.ask(seconds=setting.seconds, **order)["median_us"])


# ------------------------------------------------------------------------------------------------ host to device


def host_to_device(setting: GpuSetting) -> list[Row]:
    """Bandwidth from a client's segment to the device, through the server and bare, beside CUDA's own pinned memory."""
    need_cupy()
    size = setting.mib * MIB
    places = ("pinned", "registered", "pageable")
    bare = {place: Child("bench.gpu.parties:copies", size=size, place=place) for place in places}
    try:
        times = in_turn(setting.rounds, {place: _median(child, setting) for place, child in bare.items()})
    finally:
        for child in bare.values():
            child.close()
    rate = {place: size / median(values) / 1e3 for place, values in times.items()}
    text = ", ".join(f"{place} {rate[place]:.1f}" for place in places) + " GB/s"
    share = rate["registered"] / rate["pinned"]
    rows = [Row("shared memory, registered, to the device", share, "of pinned", at_least=0.95, beside=text)]
    try:
        rows += _through_the_server(setting, size)
    except Skipped as error:
        rows.append(Row("a client's segment to the device, PyTorch", None, "", skipped=str(error)))
    return rows


def _through_the_server(setting: GpuSetting, size: int) -> list[Row]:
    need_torch(setting.device)
    repository, file = setting.repository("to-device"), setting.work / "torch" / "reader.pt"
    gpu_models.torch_file(file, "save_reader")
    tensors = {"x": ("FP32", [-1])}, {"y": ("FP32", [1])}
    gpu_models.torch_model(repository, "last", file, models.Model("pytorch", *tensors, max_batch=1, kind=setting.kind))
    large, small = [1, size // 4], [1, 16]
    with (
        serving(repository, "--exit-on-error", "true") as server,
        Child("bench.gpu.parties:copies", size=size, place="pinned") as bare,
        Child("bench.gpu.parties:rows", url=server.lane, model="last", shapes=[large, small]) as client,
    ):
        parties = {"large": _median(client, setting, number=0), "small": _median(client, setting, number=1)}
        times = in_turn(setting.rounds, {**parties, "bare": _median(bare, setting)})
    results = {name: median(values) for name, values in times.items()}
    sent = results["large"] - results["small"]
    beside = f"{size / sent / 1e3:.1f} GB/s, pinned {size / results['bare'] / 1e3:.1f} GB/s"
    beside += f"; request {micros(results['large'])}, of 64 B {micros(results['small'])}; {gpu().name}"
    name = "a client's segment to the device, PyTorch"
    return [Row(name, results["bare"] / sent, "of pinned", at_least=0.95, beside=beside)]
