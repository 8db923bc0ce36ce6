"""The deployment that owns a server: one replica per node, which receives requests from handles and from the
ingress."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
from ray import ObjectRef, serve

from shmserve import AsyncClient
from shmserve.errors import ConnectionLost, NotFound, Unavailable
from shmserve.ray.autoscaling import QueueTimes, free_bytes
from shmserve.ray.config import AppConfig
from shmserve.ray.forward import Fields, Forwarder
from shmserve.ray.node_server import NodeServer
from shmserve.ray.routing import ASLEEP, AWAKE, LOADING, ROOM

RECONNECT_S = 60.0
"""How long requests wait for a server that is being restarted."""
NOTICE_S = 1.0
"""How long to wait, after a connection was lost, for a notice that the server has ended, the usual cause. A request is
then sent again once the next server is ready."""
REFUSED = (NotFound, Unavailable)
"""Errors of a restarted server that has not loaded the model yet. (ConnectionLost, a subclass of Unavailable, concerns
the connection instead.)"""


class MultiplexedModel:
    """Serve's record of a model that was loaded on demand."""

    def __init__(self, run: int) -> None:
        self.run = run
        """The server's run in which the model was loaded."""
        self.lock = asyncio.Lock()


class ServerReplica:
    """Serve constructs it on the node. `reconfigure` and the methods without a docstring are hooks of Serve."""

    def __init__(self, config: AppConfig) -> None:
        self._config = config
        replica = serve.get_replica_context().replica_id.unique_id
        self._server = NodeServer(config.server(), replica)
        self._server.start(config.start_seconds)
        self._client = AsyncClient(runtime_dir=self._server.runtime_dir, reconnect_timeout=RECONNECT_S)
        self._forward = Forwarder()
        self._queue_times = QueueTimes(self._client)

    async def __del__(self) -> None:
        server: NodeServer | None = getattr(self, "_server", None)
        if server is None:
            return  # __init__ has failed
        try:
            await self._client.close()
            await self._forward.close()
        finally:
            server.close()

    # ------------------------------------------------------------------------------------------------ requests

    async def infer(self, model: str, inputs: Mapping[str, Any], **options: Any) -> dict[str, np.ndarray[Any, Any]]:
        """The outputs of `AsyncClient.infer`, which takes the same options. Inputs may be in the object store."""
        arrays = {name: await one if isinstance(one, ObjectRef) else one for name, one in inputs.items()}
        run = await self._ready_for(model)
        try:
            return dict(await self._client.infer(model, arrays, **options))
        except REFUSED as error:
            if not self._is_from_restart(error, run):
                raise
        await self._ready_for(model)
        return dict(await self._client.infer(model, arrays, **options))

    async def stream(
        self, model: str, inputs: Mapping[str, Any], **options: Any
    ) -> AsyncIterator[dict[str, np.ndarray[Any, Any]]]:
        """The responses of `AsyncClient.stream`."""
        run = await self._ready_for(model)
        begun = False
        try:
            async for part in self._client.stream(model, inputs, **options):
                begun = True
                yield dict(part)
            return
        except REFUSED as error:
            if begun or not self._is_from_restart(error, run):
                raise
        await self._ready_for(model)
        async for part in self._client.stream(model, inputs, **options):
            yield dict(part)

    async def http(
        self, model: str, method: str, target: str, fields: Fields, body: bytes
    ) -> tuple[int, Fields, bytes]:
        """Handles a request of the ingress. Returns status, header fields and body of the response."""
        async with self._passed_on(model):
            return await self._forward.http(self._port("http"), method, target, fields, body)

    async def http_stream(
        self, model: str, method: str, target: str, fields: Fields, body: bytes
    ) -> AsyncIterator[tuple[int, Fields] | bytes]:
        """Yields the status and header fields of the response, then its body as it arrives."""
        async with self._passed_on(model):
            async for part in self._forward.http_stream(self._port("http"), method, target, fields, body):
                yield part

    async def call(self, model: str, path: str, message: bytes, metadata: Mapping[str, str]) -> tuple[int, str, bytes]:
        """Handles a unary gRPC call of the ingress. Returns code, details and response."""
        async with self._passed_on(model):
            try:
                return 0, "", await self._forward.call(self._port("grpc"), path, message, metadata)
            except grpc.aio.AioRpcError as error:
                return error.code().value[0], error.details() or "", b""

    async def stream_call(
        self, model: str, path: str, message: bytes, metadata: Mapping[str, str]
    ) -> AsyncIterator[bytes]:
        """The responses to one message of a gRPC stream of the ingress."""
        async with self._passed_on(model):
            try:
                async for answer in self._forward.stream(self._port("grpc"), path, _only(message), metadata):
                    yield answer
            except grpc.aio.AioRpcError as error:
                raise Unavailable(error.details() or error.code().name) from None

    async def service(self) -> dict[str, Any]:
        """What `AsyncClient.service` returns, with the revision of the repository and the models' states."""
        models = {entry["name"]: entry["state"] for entry in await self._client.models()}
        return {"revision": self._config.revision, "models": models, **(await self._client.service())}

    @asynccontextmanager
    async def _passed_on(self, model: str) -> AsyncIterator[None]:
        """Wraps a request that is passed to an endpoint of the server."""
        run = await self._ready_for(model)
        try:
            yield
        except ConnectionLost:
            await asyncio.to_thread(self._server.wait_end, run, NOTICE_S)
            raise

    def _port(self, endpoint: str) -> int:
        port = self._server.ports.get(endpoint, 0)
        if not port:
            raise ConnectionLost("the server is being restarted")
        return port

    async def _ready_for(self, model: str) -> int:
        """Waits for a server that is being restarted, and loads the model if models are loaded on demand. Returns the
        number of the server's run."""
        if not self._server.is_ready:
            # The deadline is computed here: a request may first have to wait for one of the few threads.
            await asyncio.to_thread(self._server.wait_ready, time.monotonic() + RECONNECT_S)
        if self._config.multiplexed and model:
            await self._load(model)
        return self._server.runs

    def _is_from_restart(self, error: Exception, run: int) -> bool:
        """Whether the server was restarted in the meantime, and refused the request because it had not loaded the model
        yet."""
        restarted = self._server.runs != run or not self._server.is_ready
        return restarted and not isinstance(error, ConnectionLost)

    # ------------------------------------------------------------------------------------------------ many models

    async def _load(self, model: str) -> None:
        loaded: MultiplexedModel = await self._loaded(model)
        if loaded.run != self._server.runs:  # a restarted server has none of these models
            async with loaded.lock:
                run = self._server.runs
                if loaded.run != run:
                    await self._client.load(model)
                    loaded.run = run

    @serve.multiplexed(max_num_models_per_replica=-1)
    async def _loaded(self, model: str) -> MultiplexedModel:
        """Deploys a model on this server at its first request. From then on the server decides, by its memory budget,
        whether the model is awake."""
        loaded = MultiplexedModel(self._server.runs)
        await self._client.load(model)
        return loaded

    async def record_routing_stats(self) -> dict[str, Any]:
        if not self._config.multiplexed:
            return {}
        models = await self._client.models()
        ready = [one for one in models if one["state"] == "READY"]
        awake = {one["name"] for one in ready if not one["asleep"]}
        asleep = {one["name"] for one in ready} - awake
        loading = {one["name"] for one in models if one["state"] == "LOADING"}
        room = free_bytes(await self._client.metrics())  # queried after the models, so that it covers all of them
        return {AWAKE: sorted(awake), ASLEEP: sorted(asleep), LOADING: sorted(loading), ROOM: room}

    # ------------------------------------------------------------------------------------------------ Serve's hooks

    async def check_health(self) -> None:
        if self._server.failure:
            raise Unavailable(f"there is no server: {self._server.failure}")
        if not await self._client.ready() and not await self._is_busy_loading():
            raise Unavailable("the server is not ready; `shmserve models` says why")

    async def _is_busy_loading(self) -> bool:
        """Whether the server is still loading, and so may become ready by itself."""
        return any(
            one["state"] in ("LOADING", "UNLOADING") or one.get("reloading") for one in await self._client.models()
        )

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return await self._queue_times.measured()


async def _only(message: bytes) -> AsyncIterator[bytes]:
    yield message
