"""The processes of the measures: bare CUDA and bare PyTorch without a server, and clients.

Each is a target of `bench.lib.child.Child`.
"""

from __future__ import annotations

import importlib
import mmap
import os
from collections import deque
from time import perf_counter
from typing import Any

from bench.lib.child import Answer, Handler
from bench.lib.clock import durations, summary

PORTABLE = 1


# ------------------------------------------------------------------------------------------------ bare CUDA


def copies(size: int, place: str) -> Handler:
    """One asynchronous copy to the device, and waiting for it. `place` of the source: "device", "pinned" (allocated by
    CUDA), "registered" (a memfd as clients use it, pinned afterwards), "pageable" (the same, not pinned)."""
    runtime: Any = importlib.import_module("cupy.cuda.runtime")
    runtime.setDevice(0)
    target, stream = runtime.malloc(size), runtime.streamCreateWithFlags(runtime.streamNonBlocking)
    mapping, memory = _memfd(size)
    if place == "device":
        source, kind = runtime.malloc(size), runtime.memcpyDeviceToDevice
    else:
        source, kind = runtime.hostAlloc(size, 0) if place == "pinned" else memory, runtime.memcpyHostToDevice
    if place == "registered":
        runtime.hostRegister(source, size, PORTABLE)
    copy, wait = runtime.memcpyAsync, runtime.streamSynchronize

    def once() -> None:
        copy(target, source, size, kind, stream)
        wait(stream)

    def handle(seconds: float) -> Answer:
        assert mapping.size() == size
        return summary(durations(once, seconds))

    return handle


def _memfd(size: int) -> tuple[mmap.mmap, int]:
    """Shared memory of which all pages exist, and its address."""
    import numpy as np

    descriptor = os.memfd_create("bench")
    os.ftruncate(descriptor, size)
    mapping = mmap.mmap(descriptor, size)
    os.close(descriptor)
    array = np.frombuffer(mapping, np.uint8)
    array[:] = 1
    return mapping, int(array.ctypes.data)


# ------------------------------------------------------------------------------------------------ bare PyTorch


def engine(model: str, shape: list[int], device: str) -> Handler:
    """Batches from pinned memory to the device, through the model, and back, one after another. `per_s`: rows."""
    import torch

    on = torch.device(device)
    program = torch.jit.load(model, map_location=on).eval()
    pinned = on.type == "cuda"
    batches: dict[int, Any] = {}

    def handle(seconds: float, batch: int) -> Answer:
        if batch not in batches:
            created = torch.randn(batch, *shape)
            batches[batch] = created.pin_memory() if pinned else created
        x = batches[batch]
        with torch.inference_mode():
            taken = summary(durations(lambda: program(x.to(on, non_blocking=True)).cpu(), seconds))
        return {**taken, "per_s": taken["per_s"] * batch}

    return handle


def streams(model: str, batch: int, shape: list[int], device: str) -> Handler:
    """Batches in turn on `count` CUDA streams, so that the copies of one overlap with the computation of another."""
    import torch

    on = torch.device(device)
    program = torch.jit.load(model, map_location=on).eval()
    lanes = [torch.cuda.Stream(on) for _ in range(4)]
    x = [torch.randn(batch, *shape).pin_memory() for _ in lanes]
    with torch.inference_mode():
        y = [program(part.to(on)).cpu().pin_memory() for part in x]

    def queue(lane: int) -> None:
        with torch.cuda.stream(lanes[lane]):
            y[lane].copy_(program(x[lane].to(on, non_blocking=True)), non_blocking=True)

    def handle(seconds: float, count: int) -> Answer:
        done = 0
        with torch.inference_mode():
            for lane in range(count):
                queue(lane)
            began = perf_counter()
            while (now := perf_counter()) < began + seconds:
                lane = done % count
                lanes[lane].synchronize()
                done += 1
                queue(lane)
            torch.cuda.synchronize(on)
        return {"per_s": done * batch / (now - began)}

    return handle


# ------------------------------------------------------------------------------------------------ clients


def lone(url: str, requests: dict[str, list[Any]]) -> Handler:
    """One request at a time. `requests`: name -> model, elements of x, its device ("" for the host), the value of x,
    and that of the last element of y."""
    import numpy as np

    from shmserve import Client

    client = Client(url)
    feeds: dict[str, tuple[str, dict[str, Any], float]] = {}
    for name, (model, elements, device, value, expected) in requests.items():
        x: Any = client.empty((elements,), "float32", **({"device": device} if device else {}))
        filled = np.full(elements, value, np.float32)
        _write(x, filled) if device else np.copyto(x, filled)
        feeds[name] = model, {"x": x}, expected

    def handle(seconds: float, name: str) -> Answer:
        model, feed, expected = feeds[name]
        result = client.infer(model, feed)["y"][-1]
        assert result == expected, f"{model} answered {result} instead of {expected}"
        return summary(durations(lambda: client.infer(model, feed)["y"], seconds, warm=20))

    return handle


def _write(x: Any, values: Any) -> None:
    runtime: Any = importlib.import_module("cupy.cuda.runtime")
    address = x.__cuda_array_interface__["data"][0]
    runtime.memcpyAsync(address, values.ctypes.data, values.nbytes, runtime.memcpyHostToDevice, 0)
    runtime.streamSynchronize(0)


def on_device(url: str, elements: int) -> Handler:
    """Requests with x and y on the GPU. Order: model, the sum that it adds, number of requests."""
    import numpy as np

    from shmserve import Client

    client = Client(url)
    x, y = (client.empty((elements,), "float32", device="cuda:0") for _ in range(2))
    _write(x, np.full(elements, 3, np.float32))

    def handle(model: str, more: float, count: int) -> Answer:
        for _ in range(count):
            client.infer(model, {"x": x}, outputs={"y": y})
        result = y.numpy()
        assert (result == 3 + more).all(), f"{model} answered {result[:4]}"
        return {}

    return handle


def rows(url: str, model: str, shapes: list[list[int]]) -> Handler:
    """One request at a time with an input in shared memory. Order: the number of its shape."""
    import numpy as np

    from shmserve import Client

    client, feeds = Client(url), []
    for shape in shapes:
        x = client.empty(tuple(shape), "float32")
        x[...] = np.arange(shape[-1], dtype=np.float32)
        feeds.append(({"x": x}, np.float32(shape[-1] - 1)))

    def handle(seconds: float, number: int) -> Answer:
        feed, expected = feeds[number]
        assert client.infer(model, feed)["y"][0, 0] == expected
        return summary(durations(lambda: client.infer(model, feed)["y"], seconds, warm=20))

    return handle


def stream(url: str, shape: list[int], names: list[str], flight: int) -> Handler:
    """Keeps up to `flight` requests in flight, with inputs in shared memory. Order: model, number in flight."""
    import numpy as np

    from shmserve import Client

    client = Client(url)
    random, (provided, created) = np.random.default_rng(2), names
    feeds = []
    for _ in range(min(flight, 16)):
        x = client.empty((1, *shape), "float32")
        x[...] = random.standard_normal(x.shape, np.float32)
        feeds.append({provided: x})

    def handle(seconds: float, model: str, flight: int) -> Answer:
        out = deque(client.submit(model, feeds[number % len(feeds)]) for number in range(flight))
        taken: list[float] = []
        began = perf_counter()
        while (now := perf_counter()) < began + seconds:
            out.popleft().result()[created]
            out.append(client.submit(model, feeds[len(taken) % len(feeds)]))
            taken.append(now)
        while out:
            out.popleft().result()
        return {"per_s": len(taken) / (now - began), "count": len(taken)}

    return handle
