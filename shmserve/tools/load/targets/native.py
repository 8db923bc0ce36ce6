"""shmserve over the lane, ipc or tcp, through `shmserve.AsyncClient`, as in an application."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shmserve import AsyncClient
from shmserve.errors import Unsupported
from shmserve.extras import install_command, outdated
from shmserve.session import Raw
from shmserve.tools.load.plan import GRPC, HTTP, SECOND, Endpoint
from shmserve.tools.load.targets.base import (
    Arrays,
    ModelFacts,
    Part,
    RequestOptions,
    Slot,
    Target,
    latest_statistics,
    optional_inputs,
)

CONNECT_S = 5.0


class NativeTarget:
    """All slots share one connection, as in an application."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._client = AsyncClient(
            endpoint.url,
            runtime_dir=endpoint.runtime_dir,
            reconnect_timeout=CONNECT_S,
            memory=endpoint.memory,
            server_key=endpoint.server_key,
            key_file=endpoint.key_file,
        )

    async def facts(self, model: str, version: str) -> ModelFacts:
        client, chosen = self._client, version or None
        server, metadata = await client.metadata(), await client.metadata(model, chosen)
        config = await client.config(model, chosen)
        return ModelFacts(
            inputs={spec["name"]: dict(spec) for spec in metadata["inputs"]},
            outputs={spec["name"]: dict(spec) for spec in metadata["outputs"]},
            optional=optional_inputs(config),
            max_batch=int(config.get("max_batch_size", 0)),
            decoupled=bool(config.get("model_transaction_policy", {}).get("decoupled", False)),
            server={"name": str(server["name"]), "version": str(server["version"])},
        )

    def prepare(self, arrays: Arrays, facts: ModelFacts, options: RequestOptions) -> Any:
        inputs = {
            name: Raw("BF16", value) if facts.inputs[name]["datatype"] == "BF16" else value
            for name, value in arrays.items()
        }
        return (
            inputs,
            {
                "outputs": options.outputs or None,
                "version": options.version or None,
                "timeout": options.deadline_ns / SECOND or None,
            },
            options.model,
        )

    async def slot(self) -> Slot:
        return _NativeSlot(self._client)

    async def statistics(self, model: str, version: str) -> dict[str, Any]:
        return latest_statistics(await self._client.statistics(model, version or None))

    async def close(self) -> None:
        await self._client.close()


class _NativeSlot:
    def __init__(self, client: AsyncClient) -> None:
        self._submit = client.submit
        self._stream = client.stream

    async def send(self, body: Any, part: Part | None) -> None:
        inputs, options, model = body
        await self._submit(model, inputs, **options, **_sequence(part))

    async def stream(self, body: Any, part: Part | None, on_answer: Callable[[], None]) -> None:
        inputs, options, model = body
        async with self._stream(model, inputs, **options, **_sequence(part)) as answers:
            async for _ in answers:
                on_answer()


def _sequence(part: Part | None) -> dict[str, Any]:
    if part is None:
        return {}
    return {"sequence": part.sequence, "sequence_start": part.start, "sequence_end": part.end}


def open_target(endpoint: Endpoint) -> Target:
    """The target of an endpoint. A protocol's packages are imported only if it is used."""
    if old := outdated("bench"):
        raise Unsupported(f"load cannot be generated: {old}")
    try:
        if endpoint.kind == HTTP:
            from shmserve.tools.load.targets.http import HttpTarget

            return HttpTarget(endpoint)
        if endpoint.kind == GRPC:
            from shmserve.tools.load.targets.grpc import GrpcTarget

            return GrpcTarget(endpoint)
    except ImportError as error:
        text = f"load over {endpoint.kind}:// needs a package that is missing ({error}): {install_command('bench')}"
        raise Unsupported(text) from error
    return NativeTarget(endpoint)
