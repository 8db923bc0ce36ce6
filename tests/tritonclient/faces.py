"""The four clients of `tritonclient` behind one interface.

It runs in the environment that has `tritonclient`, so it imports nothing of this project outside this folder.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import numpy as np
from tritonclient.utils import InferenceServerException
from tritonclient.utils import shared_memory as shm

A = np.arange(16, dtype=np.int32).reshape(1, 16)
B = np.full((1, 16), 3, np.int32)
BYTES = A.nbytes
ABSENT = "nothing"


class Face:
    def __init__(self, name: str, http: str, grpc: str) -> None:
        self.name = name
        self.module: Any = importlib.import_module(f"tritonclient.{name}")
        self.grpc, self.aio = name.startswith("grpc"), name.endswith("aio")
        self.url = grpc if self.grpc else http
        self.client: Any = None

    def made(self, **options: Any) -> Any:
        return self.module.InferenceServerClient(self.url, **options)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Face]:
        self.client = self.made()
        try:
            yield self
        finally:
            await done(self.client.close())

    async def ask(self, method: str, *args: Any, **options: Any) -> Any:
        return await done(getattr(self.client, method)(*args, **options))

    async def config(self, model: str) -> Any:
        found = await self.document("get_model_config", model)
        return found["config"] if self.grpc else found

    async def mapped(self, *name: str) -> list[Any]:
        """The registered regions, or the one with this name."""
        found = await self.document("get_system_shared_memory_status", *name)
        return list(found.get("regions", {}).values()) if self.grpc else found

    async def document(self, method: str, *args: Any, **options: Any) -> Any:
        """The result as JSON, for which gRPC needs an option."""
        return await self.ask(method, *args, **options, **({"as_json": True} if self.grpc else {}))

    async def refused(self, allowed: str, method: str, *args: Any, **options: Any) -> str:
        """The message of the error; `allowed` lists its HTTP statuses, separated by |."""
        try:
            result = await self.ask(method, *args, **options)
        except InferenceServerException as error:
            result = error
        assert isinstance(result, InferenceServerException), f"{method} succeeded: {result}"
        names = {"400": "INVALID_ARGUMENT", "404": "NOT_FOUND", "500": "INTERNAL"}
        expected = [f"StatusCode.{names[one]}" if self.grpc else one for one in allowed.split("|")]
        assert result.status() in expected, result
        return str(result.message())

    @asynccontextmanager
    async def regions(self, *sizes: int) -> AsyncIterator[list[Region]]:
        with ExitStack() as made:
            regions = [made.enter_context(Region(size)) for size in sizes]
            for region in regions:
                await self.ask("register_system_shared_memory", region.name, region.key, region.size)
            yield regions
            for region in regions:
                await self.ask("unregister_system_shared_memory", region.name)

    # ------------------------------------------------------------------------------------ the model `simple`

    def inputs(self) -> list[Any]:
        return [self.one("INPUT0", A, "INT32"), self.one("INPUT1", B, "INT32")]

    def outputs(self) -> list[Any]:
        return [self.module.InferRequestedOutput(name) for name in ("OUTPUT0", "OUTPUT1")]

    def one(self, name: str, array: Any, dtype: str) -> Any:
        made = self.module.InferInput(name, list(array.shape), dtype)
        made.set_data_from_numpy(array)
        return made


async def done(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def right(result: Any) -> None:
    """Checks the response of `simple` to A and B."""
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), A + B)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), A - B)


class Region:
    """A shared memory region with a unique name and key."""

    _made = 0

    def __init__(self, size: int = BYTES) -> None:
        Region._made += 1
        self.name, self.size = f"region{Region._made}", size
        self.key = f"/tritonclient-{os.getpid()}-{Region._made}"
        self.handle = shm.create_shared_memory_region(self.name, self.key, size)

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *_: object) -> None:
        shm.destroy_shared_memory_region(self.handle)

    def put(self, *arrays: Any) -> None:
        shm.set_shared_memory_region(self.handle, list(arrays))

    def array(self, offset: int = 0) -> Any:
        return shm.get_contents_as_numpy(self.handle, np.int32, [1, 16], offset)
