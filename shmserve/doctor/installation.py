"""Checks of the installation: Python, the packages of the server, engines, GPUs."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from shmserve.doctor.machine import ERROR, INFO, OK, WARNING, Finding, Machine
from shmserve.extras import GATEWAY, NEEDED, PACKAGES, install_command
from shmserve.repo import gpus as gpus_of
from shmserve.repo.gpu_state import RESET, read_states
from shmserve.workers.backends.registry import BACKENDS

PYTHON = (3, 10)
DISTRIBUTIONS = {
    "dali": ("nvidia-dali-cuda120", "nvidia-dali-cuda130"),
    "fil": ("treelite",),
    "identity": (),
    "llamacpp": ("xllamacpp",),
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "openvino": ("openvino",),
    "paddle": ("paddlepaddle", "paddlepaddle-gpu"),
    "python": (),
    "pytorch": ("torch",),
    "tensorflow": ("tensorflow-cpu", "tensorflow"),
    "tensorrt": ("tensorrt",),
    "tflite": ("ai-edge-litert",),
}
"""Backend -> alternative packages with its engine; () if it needs none."""
DRIVER = "proc/driver/nvidia/version"
CONTROL = "dev/nvidiactl"
ONE = ("onnxruntime", "onnxruntime-gpu")
"""Packages that install the same module."""


def python(machine: Machine) -> list[Finding]:
    found = f"{machine.implementation} {machine.python[0]}.{machine.python[1]}"
    needed = f"CPython {PYTHON[0]}.{PYTHON[1]}"
    if machine.implementation == "CPython" and machine.python >= PYTHON:
        return [Finding("python", OK, found, needed)]
    return [Finding("python", ERROR, found, needed, "create the environment with another Python: python3.11 -m venv")]


def packages(machine: Machine) -> list[Finding]:
    wanted = (*NEEDED, *GATEWAY)
    missing = [name for name in wanted if not machine.has_module(name)]
    if not missing:
        return [Finding("packages", OK, "all of the server", f"{len(wanted)} packages")]
    state = ERROR if set(missing) & set(NEEDED) else WARNING
    found = f"missing: {', '.join(PACKAGES.get(name, name) for name in missing)}"
    return [Finding("packages", state, found, f"{len(wanted)} packages", _install(machine, "server"))]


def _install(machine: Machine, extra: str) -> str:
    """The command for an extra. An environment can have only one of the packages of ONNX Runtime (docs/install.md)."""
    if extra == "gpu" and machine.version("onnxruntime"):
        return f"in another environment, without onnxruntime: {install_command(extra)}"
    if extra == "server" and machine.version("onnxruntime-gpu"):
        extra = "runtime"
    return install_command(extra)


def engines(machine: Machine) -> list[Finding]:
    """One finding for each backend that has an engine. A missing engine is not a fault."""
    findings = []
    for backend, names in sorted(DISTRIBUTIONS.items()):
        installed = [f"{name} {version}" for name in names if (version := machine.version(name))]
        if len(installed) > 1 and set(names) <= set(ONE):
            fix = "pip uninstall onnxruntime onnxruntime-gpu, then install one of them"
            findings.append(Finding(f"backend {backend}", WARNING, " and ".join(installed), "one of them", fix))
        elif installed:
            findings.append(Finding(f"backend {backend}", OK, ", ".join(installed)))
        elif names:
            fix = _install(machine, BACKENDS[backend].extra)
            findings.append(Finding(f"backend {backend}", INFO, "not installed", "only for its models", fix))
    return findings


def _gpu_health(found: Sequence[gpus_of.Gpu]) -> list[Finding]:
    """GPUs that cannot be used or should be reset, and memory errors."""
    findings = []
    for uuid, state in read_states(found).items():
        own = [gpu for gpu in found if uuid in (gpu.uuid, gpu.parent)]
        check, pci = f"GPU {', '.join(str(gpu.number) for gpu in own)}", own[0].pci
        if state.problem is not None:
            findings.append(Finding(check, ERROR, state.problem.what, "usable", state.problem.fix.format(pci=pci)))
        elif state.needs_reset:
            fix = f"stop all programs on it, then {RESET.format(pci=pci)}"
            findings.append(Finding(check, WARNING, state.needs_reset, "", fix))
        elif state.uncorrected > 0:
            fix = f"nvidia-smi -q -d ECC -i {pci}; replace the GPU if the number keeps growing"
            findings.append(Finding(check, WARNING, f"{state.uncorrected} uncorrected memory errors", "0", fix))
    return findings


def gpus(machine: Machine) -> list[Finding]:
    """The driver, the GPUs that it lists, and whether an engine can use them."""
    if not machine.path(CONTROL).exists():
        return [Finding("GPUs", INFO, "no NVIDIA driver", "only for models on a GPU")]
    driver = next(iter(machine.read(DRIVER).splitlines()), "").removeprefix("NVRM version: ")
    listed = gpus_of.discover(machine.environment, machine.path(CONTROL))
    if not listed.found:
        fix = _install(machine, "gpu") if "nvidia-ml-py" in listed.why else "nvidia-smi"
        return [Finding("GPUs", WARNING, listed.why or f"none visible, driver {driver}", "1", fix)]
    names = ", ".join(f"{gpu.number}: {gpu.name}" for gpu in listed.found)
    sliced = sum(bool(gpu.parent) for gpu in listed.found)
    notes = [driver, f"{sliced} MIG slices" if sliced else ""]
    more = ", ".join(note for note in notes if note)
    findings = [Finding("GPUs", OK, f"{names} ({more})" if more else names, "1")]
    findings += _gpu_health(listed.found)
    if not machine.version("onnxruntime-gpu"):
        found = "onnxruntime-gpu is not installed: ONNX models run on the CPU"
        fix = _install(machine, "gpu")
        findings.append(Finding("ONNX on GPUs", WARNING, found, "onnxruntime-gpu", fix))
    elif "CUDAExecutionProvider" not in (providers := importlib.import_module("onnxruntime").get_available_providers()):
        found, fix = f"providers {', '.join(providers)}", "pip install --force-reinstall onnxruntime-gpu"
        findings.append(Finding("ONNX on GPUs", WARNING, found, "CUDAExecutionProvider", fix))
    return findings
