"""Calls to the replicas of an application from Python programs on the cluster, with retries.

Ray retries requests that a replica has not begun. If a replica is lost while a request runs, the handle sends the
request to another replica, unless it belongs to a sequence: the sequence's state was lost with the replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
from ray import serve
from ray.exceptions import RayActorError, RayTaskError

from shmserve.errors import ConnectionLost, DeadlineExceeded, ServeError, Unavailable

SERVER = "Server"
"""The deployment of the replicas."""
RETRIES = 3
Outputs = dict[str, np.ndarray[Any, Any]]


def is_lost(error: BaseException) -> bool:
    """Whether the replica, or its server, ended before it responded."""
    return isinstance(error, RayActorError | ConnectionLost)


def as_serve_error(error: BaseException) -> BaseException:
    """The error for the caller: the one that the server raised, without Ray's wrapper."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, ServeError):
        return type(cause)(str(cause.args[0]) if cause.args else "")
    if isinstance(error, RayActorError):
        return ConnectionLost("the server failed while processing this request")
    if isinstance(error, TimeoutError | asyncio.TimeoutError):  # another class before Python 3.11
        return DeadlineExceeded("the request timed out")
    if isinstance(error, serve.exceptions.BackPressureError | serve.exceptions.DeploymentUnavailableError):
        return Unavailable(str(error))
    return error


class Handle:
    """`app`: the name of the Serve application. `timeout` is the default for `infer`, in seconds. `retries`: maximum
    number of times a request is sent again after its replica was lost.

    Arrays are passed through Ray's object store: the replica reads inputs in place, and the caller reads outputs in
    place.
    """

    def __init__(self, app: str = "default", *, timeout: float | None = None, retries: int = RETRIES) -> None:
        self._handle = serve.get_deployment_handle(SERVER, app)
        self._timeout = timeout
        self._retries = retries

    def infer(self, model: str, inputs: Mapping[str, Any], *, timeout: float | None = None, **options: Any) -> Outputs:
        """Runs the model once and returns its outputs by name. `options` are those of `shmserve.Client.infer`."""
        timeout = self._timeout if timeout is None else timeout
        chosen = _chosen(self._handle, model, options)
        for remaining in range(_attempts(options, self._retries), -1, -1):
            try:
                result: Outputs = chosen.infer.remote(model, dict(inputs), timeout=timeout, **options).result(
                    timeout_s=timeout
                )
                return result
            except Exception as error:
                if not (remaining and is_lost(error)):
                    raise as_serve_error(error) from None
        raise AssertionError("the loop returns or raises")

    async def infer_async(
        self, model: str, inputs: Mapping[str, Any], *, timeout: float | None = None, **options: Any
    ) -> Outputs:
        """`infer` for asyncio."""
        timeout = self._timeout if timeout is None else timeout
        chosen = _chosen(self._handle, model, options)
        for remaining in range(_attempts(options, self._retries), -1, -1):
            try:
                result: Outputs = await asyncio.wait_for(
                    _result(chosen.infer.remote(model, dict(inputs), timeout=timeout, **options)), timeout
                )
                return result
            except Exception as error:
                if not (remaining and is_lost(error)):
                    raise as_serve_error(error) from None
        raise AssertionError("the loop returns or raises")


async def _result(response: Any) -> Any:
    return await response


def _attempts(options: Mapping[str, Any], retries: int) -> int:
    return 0 if options.get("sequence") is not None else retries


def _chosen(handle: Any, model: str, options: Mapping[str, Any]) -> Any:
    """The handle for this request, with the model (for replicas with many models) and the sequence (to stay on one
    replica) as routing keys."""
    sequence = options.get("sequence")
    return handle.options(multiplexed_model_id=model, session_id="" if sequence is None else f"{model}:{sequence}")
