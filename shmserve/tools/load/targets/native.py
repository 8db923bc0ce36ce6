"""shmserve over the lane, ipc or tcp, through `shmserve.AsyncClient`, as in an application."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from shmserve import AsyncClient
from shmserve.errors import Unsupported
from shmserve.extras import install_command, outdated
from shmserve.session import Raw
from shmserve.tools.load.plan import GRPC, HTTP, OPENAI, SECOND, Endpoint
from shmserve.tools.load.targets.base import (
    Arrays,
    LoadTarget,
    ModelFacts,
    PromptRequest,
    Receiver,
    RequestSlot,
    SequencePart,
    TargetOptions,
    facts_of,
    latest_statistics,
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
        return facts_of(metadata, await client.config(model, chosen), server)

    def prepare(self, arrays: Arrays, facts: ModelFacts, options: TargetOptions) -> Any:
        inputs = {
            name: Raw("BF16", value) if facts.inputs[name]["datatype"] == "BF16" else value
            for name, value in arrays.items()
        }
        details = {
            "outputs": options.outputs or None,
            "version": options.version or None,
            "timeout": options.deadline_ns / SECOND or None,
        }
        return _NativeRequest(options.model, inputs, details)

    def prepare_prompt(self, prompt: PromptRequest, facts: ModelFacts, options: TargetOptions) -> Any:
        """The inputs of Triton's vLLM backend, as far as the model has them."""
        messages = prompt.messages or [{"role": "user", "content": prompt.text}]
        is_chat = prompt.messages is not None or options.chat
        if "text_input" not in facts.inputs or (is_chat and "messages" not in facts.inputs):
            raise Unsupported(
                f"model '{options.model}' takes no {'chats: give --api completions' if is_chat else 'text'}"
            )
        values = {
            "text_input": "" if is_chat else prompt.text,
            "messages": json.dumps({"messages": messages}) if is_chat else None,
            "stream": True,
            "sampling_parameters": json.dumps({"max_tokens": prompt.max_tokens, **options.sampling}),
            "return_num_input_tokens": True,
            "return_num_output_tokens": True,
        }
        arrays = {
            name: np.array([value], object if isinstance(value, str) else np.bool_)
            for name, value in values.items()
            if value is not None and name in facts.inputs
        }
        return self.prepare(arrays, facts, options)._replace(has_tokens=True)

    async def slot(self) -> RequestSlot:
        return _NativeSlot(self._client)

    async def statistics(self, model: str, version: str) -> dict[str, Any]:
        return latest_statistics(await self._client.statistics(model, version or None))

    async def close(self) -> None:
        await self._client.close()


class _NativeRequest(NamedTuple):
    """`has_tokens`: it is for a language model, whose responses have numbers of tokens."""

    model: str
    inputs: Mapping[str, Any]
    options: dict[str, Any]
    has_tokens: bool = False


class _NativeSlot:
    def __init__(self, client: AsyncClient) -> None:
        self._submit = client.submit
        self._stream = client.stream

    async def send(self, body: Any, part: SequencePart | None) -> None:
        model, inputs, options, _ = body
        await self._submit(model, inputs, **options, **_sequence(part))

    async def stream(self, body: Any, part: SequencePart | None, on_answer: Receiver) -> None:
        if body.has_tokens:
            await self._prompt(body, on_answer)
            return
        async with self._stream(body.model, body.inputs, **body.options, **_sequence(part)) as answers:
            async for _ in answers:
                on_answer()

    async def _prompt(self, body: _NativeRequest, on_answer: Receiver) -> None:
        prompt = output = 0
        async with self._stream(body.model, body.inputs, **body.options) as answers:
            async for answer in answers:
                tokens = int(answer["num_output_tokens"].sum()) if "num_output_tokens" in answer else 1
                if tokens:
                    on_answer()
                output += tokens
                prompt = int(answer["num_input_tokens"].item()) if "num_input_tokens" in answer else prompt
        on_answer.count(prompt, output)


def _sequence(part: SequencePart | None) -> dict[str, Any]:
    if part is None:
        return {}
    return {"sequence": part.sequence, "sequence_start": part.start, "sequence_end": part.end}


def open_target(endpoint: Endpoint) -> LoadTarget:
    """The target of an endpoint. A protocol's packages are imported only if it is used."""
    if old := outdated("bench"):
        raise Unsupported(f"load cannot be generated: {old}")
    try:
        if endpoint.kind == HTTP:
            from shmserve.tools.load.targets.http import HttpTarget

            return HttpTarget(endpoint)
        if endpoint.kind == OPENAI:
            from shmserve.tools.load.targets.openai import OpenAiTarget

            return OpenAiTarget(endpoint)
        if endpoint.kind == GRPC:
            from shmserve.tools.load.targets.grpc import GrpcTarget

            return GrpcTarget(endpoint)
    except ImportError as error:
        text = f"load over {endpoint.kind}:// needs a package that is missing ({error}): {install_command('bench')}"
        raise Unsupported(text) from error
    return NativeTarget(endpoint)
