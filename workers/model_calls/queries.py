"""What a model asks the server about models, and how it changes them. An error is raised as the server's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shmserve.errors import InvalidRequest, NotFound, from_wire

if TYPE_CHECKING:
    from shmserve.workers.model_calls.calls import OutgoingCalls


def load(calls: OutgoingCalls, model: str, config: str, files: Mapping[str, bytes] | None) -> None:
    """Loads a model and waits until it is ready. `config` is JSON. `files` maps names such as "file:1/model.onnx" to
    the contents of a version's files, and requires `config`."""
    if files and not config:
        raise InvalidRequest(f"files of model '{model}' are given without a config")
    body = b""
    if config:
        head: dict[str, Any] = {"config": _json(model, config)}
        contents = [(name.removeprefix("file:"), bytes(data)) for name, data in (files or {}).items()]
        if contents:
            head["files"] = [[name, len(data)] for name, data in contents]
        body = json.dumps(head).encode() + b"\n" + b"".join(data for _, data in contents)
    _query(calls, "load", model, body=body)


def unload(calls: OutgoingCalls, model: str, dependents: bool) -> None:
    """Unloads a model without waiting for completion, because a model may unload an ensemble that contains it."""
    _query(calls, "unload", model, body=json.dumps({"unload_dependents": dependents, "wait": False}).encode())


def is_ready(calls: OutgoingCalls, model: str, version: int) -> bool:
    try:
        return bool(_query(calls, "ready", model, version)["ready"])
    except NotFound:
        return False


def is_decoupled(calls: OutgoingCalls, model: str, version: int) -> bool:
    policy = _query(calls, "config", model, version).get("model_transaction_policy") or {}
    return bool(policy.get("decoupled"))


def _query(calls: OutgoingCalls, what: str, model: str, version: int = 0, body: bytes = b"") -> dict[str, Any]:
    pending = calls.ask(what, model, version, body)
    calls.wait(pending)
    response = calls.take(pending)
    if response is not None:
        raise from_wire(response.code, response.text)
    document: dict[str, Any] = json.loads(pending.body)
    return document


def _json(model: str, config: str) -> Any:
    try:
        return json.loads(config)
    except ValueError as error:
        raise InvalidRequest(f"the config of model '{model}' is not JSON: {error}") from None
