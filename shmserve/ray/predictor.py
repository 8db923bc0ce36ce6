"""A model for `ray.data.Dataset.map_batches`: one server per node, shared by the actors on that node.

Each row of a batch is in exactly one request, and the batch returns when all are answered. A request that is sent again
after a server restart is answered once. If an actor or its node is lost, Ray runs its batches again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
import ray

from shmserve import Client, Future
from shmserve.errors import Cancelled, ConnectionLost, InvalidRequest, Unavailable
from shmserve.ray.config import ServerConfig
from shmserve.ray.node_server import NodeServer

IN_FLIGHT = 4
"""Number of requests of a batch that are sent before the first is answered."""
RECONNECT_S = 60.0
"""How long requests wait for a server that is being restarted."""
RETRIES = 3
Batch = dict[str, np.ndarray[Any, Any]]


class Predictor:
    """Runs `model` on every batch and returns the batch with the outputs as additional columns.

        dataset.map_batches(
            shmserve.ray.Predictor,
            fn_constructor_kwargs={"model": "mlp", "models": "/srv/models"},
            compute=ray.data.ActorPoolStrategy(size=4),
        )

    `models` are repositories or files, `options` flags of `shmserve serve`. `inputs` maps inputs of the model to
    columns (default: columns with their names), and `outputs` outputs to columns (default: all outputs, by name).
    `keep=False` returns the outputs only. `rows` is the size of a request (default: the model's max_batch_size), and
    `in_flight` the maximum number of requests that an actor has in flight; Ray holds back preceding stages.
    """

    def __init__(
        self,
        model: str,
        models: str | Sequence[str],
        *,
        options: Sequence[str] = (),
        inputs: Mapping[str, str] | None = None,
        outputs: Mapping[str, str] | None = None,
        keep: bool = True,
        rows: int = 0,
        in_flight: int = IN_FLIGHT,
        start_seconds: float = 600.0,
    ) -> None:
        if in_flight < 1 or rows < 0:
            raise InvalidRequest(f"in_flight={in_flight} must be at least 1, and rows={rows} not negative")
        named = (models,) if isinstance(models, str) else tuple(models)
        self._config = ServerConfig(named, tuple(options))
        self.server = NodeServer(self._config, _key(self._config), on_failure=self._lost)
        self._start_seconds = start_seconds
        self._model = model
        self._keep = keep
        self._in_flight = in_flight
        self._client = self._connected()
        self._await_model()
        metadata, config = self._client.metadata(model), self._client.config(model)
        self._inputs = dict(inputs) if inputs is not None else {one["name"]: one["name"] for one in metadata["inputs"]}
        self._outputs = (
            dict(outputs) if outputs is not None else {one["name"]: one["name"] for one in metadata["outputs"]}
        )
        limit = int(config.get("max_batch_size", 0))
        if not limit and not rows:
            text = f"model '{model}' has max_batch_size 0; if the first axis of its tensors are rows, pass rows="
            raise InvalidRequest(text)
        self._rows = min(rows or limit, limit or rows)

    def __call__(self, batch: Batch) -> Batch:
        columns = {name: _column(batch, column) for name, column in self._inputs.items()}
        count = len(next(iter(columns.values())))
        if not count:
            raise InvalidRequest("the batch has no rows")
        parts: list[Mapping[str, Any]] = []
        waiting: list[tuple[Future, slice]] = []
        for rows in _slices(count, self._rows):
            if len(waiting) == self._in_flight:
                parts.append(self._answer(*waiting.pop(0), columns))
            waiting.append((self._submit(columns, rows), rows))
        parts += [self._answer(future, rows, columns) for future, rows in waiting]
        results = {column: _joined([part[name] for part in parts]) for name, column in self._outputs.items()}
        return {**batch, **results} if self._keep else results

    # ------------------------------------------------------------------------------------------------ internals

    def _connected(self) -> Client:
        """A client of the server, which is started if this process is its first owner."""
        self.server.start(self._start_seconds)
        return Client(runtime_dir=self.server.runtime_dir, reconnect_timeout=RECONNECT_S)

    def _await_model(self) -> None:
        self._client.wait_ready(self._model, timeout=self._start_seconds)

    def _lost(self) -> None:
        """Called in another thread when the host has ended: cancels the requests, which `_answer` sends again."""
        self._client.close()

    def _submit(self, columns: Mapping[str, Any], rows: slice) -> Future:
        inputs = {name: column[rows] for name, column in columns.items()}
        while True:
            if self.server.failure:
                self.server.close()
                self._client = self._connected()
                self._await_model()
            try:
                return self._client.submit(self._model, inputs, outputs=list(self._outputs))
            except Unavailable:
                if not self.server.failure:
                    raise

    def _answer(self, future: Future, rows: slice, columns: Mapping[str, Any]) -> Mapping[str, Any]:
        """The outputs of the rows, from another server if this one was lost with its host. Closing the client of the
        lost server has cancelled its other requests."""
        for remaining in range(RETRIES, -1, -1):
            try:
                result: Mapping[str, Any] = future.result()
                return result
            except (ConnectionLost, Cancelled):
                if not remaining:
                    raise
                future = self._submit(columns, rows)
        raise AssertionError("the loop returns or raises")


def _key(config: ServerConfig) -> str:
    """Actors of one job on one node with the same settings share a server."""
    context = ray.get_runtime_context()
    where = f"{context.get_job_id()}\n{context.get_node_id()}\n".encode()
    return blake2b(where + msgspec.json.encode(config), digest_size=8).hexdigest()


def _column(batch: Batch, name: str) -> np.ndarray[Any, Any]:
    try:
        return batch[name]
    except KeyError:
        text = f"the dataset has no column '{name}', only {', '.join(batch)}; name the columns with inputs="
        raise InvalidRequest(text) from None


def _slices(count: int, size: int) -> Iterator[slice]:
    return (slice(begin, min(begin + size, count)) for begin in range(0, count, size))


def _joined(parts: list[Any]) -> np.ndarray[Any, Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
