"""Client processes of `bench.endpoints`: the native client, and each of Triton's Python clients.

Handlers run in different environments, so imports are local. One response is converted to an array before timing
starts.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from time import perf_counter
from typing import Any

from bench.lib.child import Answer, Handler
from bench.lib.clock import durations, pipelined, summary


def _input(size: int) -> Any:
    import numpy as np

    return np.random.default_rng(3).standard_normal((1, size)).astype(np.float32)


def native(url: str, model: str, size: int, flight: int) -> Handler:
    """Orders: `way` is lone (Client) or many (AsyncClient with `flight` tasks)."""
    from shmserve import AsyncClient, Client

    x = _input(size)
    feed = {"x": x}
    client = Client(url)

    async def many(seconds: float) -> float:
        async with AsyncClient(url) as connected:
            return await _keep_asking(lambda: connected.infer(model, feed), lambda result: result["y"], seconds, flight)

    def handle(seconds: float, way: str) -> Answer:
        if way == "many":
            return {"per_s": asyncio.run(many(seconds))}
        return summary(durations(lambda: client.infer(model, feed)["y"], seconds, warm=50))

    return handle


async def _keep_asking(ask: Callable[[], Any], take: Callable[[Any], Any], seconds: float, flight: int) -> float:
    """Responses per second of `flight` tasks, each of which sends its next request after the previous response."""
    count, end = 0, 0.0

    async def task() -> None:
        nonlocal count
        while perf_counter() < end:
            take(await ask())
            count += 1

    await ask()
    start = perf_counter()
    end = start + seconds
    await asyncio.gather(*(task() for _ in range(flight)))
    return count / (perf_counter() - start)


SEQUENTIAL_CLIENTS = ("http", "grpc")
CONCURRENT_CLIENTS = ("grpc callbacks", "grpc.aio", "http.aio", "http greenlets")


def tritonclient(http: str, grpc: str, model: str, size: int, flight: int) -> Handler:
    """Orders: `way` is one of SEQUENTIAL_CLIENTS or CONCURRENT_CLIENTS."""
    import importlib

    x = _input(size)

    def client_of(kind: str, **options: Any) -> tuple[Any, Any, Any]:
        module = importlib.import_module(f"tritonclient.{kind}")
        provided = module.InferInput("x", list(x.shape), "FP32")
        provided.set_data_from_numpy(x)
        wanted = module.InferRequestedOutput("y")
        return module.InferenceServerClient(http if kind.startswith("http") else grpc, **options), provided, wanted

    async def by_asyncio(kind: str, seconds: float) -> float:
        client, provided, wanted = client_of(kind)
        try:
            return await _keep_asking(
                lambda: client.infer(model, [provided], outputs=[wanted]),
                lambda result: result.as_numpy("y"),
                seconds,
                flight,
            )
        finally:
            await client.close()

    def handle(seconds: float, way: str) -> Answer:
        if way.endswith(".aio"):
            return {"per_s": asyncio.run(by_asyncio(way, seconds))}
        client, provided, wanted = client_of(way.split()[0], **({"concurrency": flight} if "greenlets" in way else {}))
        try:
            if way == "grpc callbacks":
                return {"per_s": _by_callbacks(client, model, provided, wanted, seconds, flight)}
            if way == "http greenlets":
                return {"per_s": _by_greenlets(client, model, provided, wanted, seconds, flight)}
            ask = lambda: client.infer(model, [provided], outputs=[wanted]).as_numpy("y")  # noqa: E731
            return summary(durations(ask, seconds, warm=50))
        finally:
            client.close()

    return handle


def _by_callbacks(client: Any, model: str, tensor: Any, wanted: Any, seconds: float, flight: int) -> float:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask() -> None:
        client.async_infer(model, [tensor], lambda result, error: answers.put(result), outputs=[wanted])

    return pipelined(seconds, flight, ask, lambda _: answers.get().as_numpy("y"))


def _by_greenlets(client: Any, model: str, tensor: Any, wanted: Any, seconds: float, flight: int) -> float:
    return pipelined(
        seconds,
        flight,
        lambda: client.async_infer(model, [tensor], outputs=[wanted]),
        lambda call: call.get_result().as_numpy("y"),
    )
