"""Selects the implementation of the GPU interface. There is one, on CuPy, for CUDA and ROCm; tests set another."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

from shmserve.gpu.interface import ClientDevices, GpuDevice


class Implementation(NamedTuple):
    """`device` and `client_devices` are functions, or their names as "module:name", imported on first use."""

    name: str
    device: str | Callable[[], GpuDevice]
    client_devices: str | Callable[[], ClientDevices]


CUPY = Implementation("cupy", "shmserve.workers.gpu.api:Cuda", "shmserve.session.gpu.cuda:ClientCuda")
chosen = CUPY


def open_device() -> GpuDevice:
    """Opens the device of this worker."""
    device: GpuDevice = _function(chosen.device)()
    return device


def open_client_devices() -> ClientDevices:
    devices: ClientDevices = _function(chosen.client_devices)()
    return devices


def _function(given: str | Callable[[], Any]) -> Callable[[], Any]:
    found: Callable[[], Any] = pkgutil.resolve_name(given) if isinstance(given, str) else given
    return found
