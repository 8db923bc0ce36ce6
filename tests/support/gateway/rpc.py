"""A gRPC client generated from the .proto files, with grpcio and protobuf.

Invariant: it uses no code of the product except the descriptors.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.protobuf import message_factory

import shmserve.protocol.grpc
from shmserve.protobuf_pools import pool_of
from tests.support.patience import PATIENCE_S

INFERENCE, HEALTH = "inference.GRPCInferenceService", "grpc.health.v1.Health"
POOL = pool_of(Path(shmserve.protocol.grpc.__file__).with_name("grpc.binpb"))


def message(name: str, /, **fields: Any) -> Any:
    """A message of the package inference; names from other packages include the package."""
    full = name if name.startswith("grpc.") else f"inference.{name}"
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(full))(**fields)


class Rpcs:
    """Every method of both services, as an attribute. With `credentials`, the connection may fail."""

    def __init__(self, port: int, address: str = "127.0.0.1", credentials: Any = None) -> None:
        options = [("grpc.max_receive_message_length", -1)]
        if credentials is not None:
            self.channel = grpc.secure_channel(f"{address}:{port}", credentials, options)
        else:
            self.channel = grpc.insecure_channel(f"{address}:{port}", options)
            grpc.channel_ready_future(self.channel).result(PATIENCE_S)
        for service in (INFERENCE, HEALTH):
            for method in POOL.FindServiceByName(service).methods_by_name.values():
                kinds = ("unary", "stream")
                name = f"{kinds[method.client_streaming]}_{kinds[method.server_streaming]}"
                answer = message_factory.GetMessageClass(method.output_type)
                made = getattr(self.channel, name)(
                    f"/{service}/{method.name}", lambda request: request.SerializeToString(), answer.FromString
                )
                setattr(self, method.name, made)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def __enter__(self) -> Rpcs:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()


def infer_request(model: str, inputs: dict[str, tuple[str, Any, bytes]], **more: Any) -> Any:
    """`inputs`: name -> data-type, array, and its bytes. `more`: fields of the request; parameters as plain values."""
    made = message("ModelInferRequest", model_name=model, **{key: more[key] for key in more if key != "parameters"})
    for name, (dtype, array, data) in inputs.items():
        made.inputs.add(name=name, datatype=dtype, shape=np.shape(array))
        made.raw_input_contents.append(data)
    for name, value in more.get("parameters", {}).items():
        parameter(made.parameters[name], value)
    return made


def parameter(made: Any, value: Any) -> None:
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    setattr(made, kinds[type(value)], value)


class Talk:
    """A stream to which the test sends requests."""

    def __init__(self, rpcs: Rpcs, **metadata: str) -> None:
        self._requests: queue.Queue[Any] = queue.Queue()
        sent = iter(self._requests.get, None)
        self.answers = rpcs.ModelStreamInfer(sent, metadata=list(metadata.items()), timeout=PATIENCE_S)

    def say(self, *requests: Any) -> None:
        for request in requests:
            self._requests.put(request)

    def end(self) -> None:
        self._requests.put(None)

    def hear(self, count: int) -> list[Any]:
        return [next(self.answers) for _ in range(count)]

    def rest(self) -> list[Any]:
        self.end()
        return list(self.answers)


@contextlib.contextmanager
def talk(rpcs: Rpcs, **metadata: str) -> Iterator[Talk]:
    made = Talk(rpcs, **metadata)
    try:
        yield made
    finally:
        made.end()
        made.answers.cancel()


def outputs(answer: Any) -> dict[str, bytes]:
    assert len(answer.outputs) == len(answer.raw_output_contents)
    return {one.name: raw for one, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)}


def refused(call: Any, request: Any, **more: Any) -> tuple[str, str]:
    """The code and text that a call fails with."""
    try:
        call(request, timeout=PATIENCE_S, **more)
    except grpc.RpcError as error:
        return error.code().name, error.details()
    raise AssertionError("the call went well")
