"""Answers to questions about the server and its models. Reads the core's tables, changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from shmserve.broker.catalog import Catalog
from shmserve.core.core import Core
from shmserve.core.states import VersionState
from shmserve.core.versions import Version
from shmserve.errors import InvalidRequest, NotFound, ServeError
from shmserve.messages import FIELD_BYTES, Answer, Ask, Fail
from shmserve.repo.schema import as_triton_json

NAME = "shmserve"
CHUNK = FIELD_BYTES // 2


class Control:
    def __init__(self, core: Core, catalog: Catalog, version: str, strict: bool) -> None:
        self._core = core
        self._catalog = catalog
        self._version = version
        self._strict = strict
        self._answers: dict[str, Callable[[Ask], Any]] = {
            "live": lambda ask: {"live": not self._core.state.draining},
            "ready": self._ready,
            "models": self._models,
            "metadata": self._metadata,
            "config": self._config,
            "statistics": self._statistics,
        }

    def answer(self, ask: Ask) -> list[Answer | Fail]:
        """The messages of the answer, in order."""
        try:
            answer = self._answers.get(ask.what)
            if answer is None:
                known = ", ".join(self._answers)
                raise InvalidRequest(f"unknown question '{ask.what}'; known are: {known}")
            body = msgspec.json.encode(answer(ask))
        except ServeError as error:
            return [Fail(ask.request, error.code, error.message)]
        starts = range(0, len(body), CHUNK)
        return [Answer(ask.request, body[start : start + CHUNK], start + CHUNK < len(body)) for start in starts]

    # ------------------------------------------------------------------------------------ the questions

    def server_ready(self) -> bool:
        """With strict readiness every version must be READY; without it, loading must only have ended."""
        states = [version.state for version in self._versions()]
        if self._core.state.draining or VersionState.LOADING in states:
            return False
        refused = any(model.reason for model in self._core.state.models.values())
        return not self._strict or (not refused and all(state is VersionState.READY for state in states))

    def _versions(self) -> list[Version]:
        return [version for model in self._core.state.models.values() for version in model.versions.values()]

    def _ready(self, ask: Ask) -> Any:
        if not ask.model:
            return {"ready": self.server_ready()}
        found = self._find(ask)
        return {"ready": any(version.healthy for version in found)}

    def _models(self, ask: Ask) -> Any:
        index = []
        for model in self._core.state.models.values():
            if not model.versions:
                index.append({"name": model.name, "version": "", "state": "UNAVAILABLE", "reason": model.reason})
            for version in sorted(model.versions.values(), key=lambda version: version.number):
                index.append(
                    {
                        "name": model.name,
                        "version": str(version.number),
                        "state": version.state.value,
                        "reason": version.reason,
                    }
                )
        return sorted(index, key=lambda entry: entry["name"])

    def _find(self, ask: Ask) -> list[Version]:
        model = self._core.state.models.get(ask.model)
        if model is None:
            raise NotFound(f"Request for unknown model: '{ask.model}' is not found")
        if not ask.version:
            default = model.default()
            return [default] if default else list(model.versions.values())
        version = model.versions.get(ask.version)
        if version is None:
            raise NotFound(f"Request for unknown model: '{ask.model}' version {ask.version} is not found")
        return [version]

    def _one(self, ask: Ask) -> Version:
        found = self._find(ask)
        if not found:
            reason = self._core.state.models[ask.model].reason
            raise NotFound(f"Request for unknown model: '{ask.model}' has no available versions: {reason}")
        return max(found, key=lambda version: version.number)

    def _metadata(self, ask: Ask) -> Any:
        if not ask.model:
            return {"name": NAME, "version": self._version, "extensions": ["statistics", "model_configuration"]}
        version = self._one(ask)
        config = self._catalog.config(version.model, version.number)
        policy = version.policy
        assert policy is not None
        lead = (-1,) if policy.max_batch else ()
        return {
            "name": version.model,
            "versions": [str(number) for number in sorted(self._core.state.models[version.model].versions)],
            "platform": config.platform or config.backend,
            "inputs": [{"name": t.name, "datatype": t.dtype, "shape": lead + t.dims} for t in policy.inputs],
            "outputs": [{"name": t.name, "datatype": t.dtype, "shape": lead + t.dims} for t in policy.outputs],
        }

    def _config(self, ask: Ask) -> Any:
        version = self._one(ask)
        return as_triton_json(self._catalog.config(version.model, version.number))

    def _statistics(self, ask: Ask) -> Any:
        found = self._find(ask) if ask.model else self._versions()
        return {"model_stats": [self._of(version) for version in found]}

    def _of(self, version: Version) -> dict[str, Any]:
        counted = version.statistics
        last_ns = 0
        if counted.last_inference_ns:  # from the monotonic clock to that on the wall
            last_ns = time.time_ns() - (time.monotonic_ns() - counted.last_inference_ns)
        return {
            "name": version.model,
            "version": str(version.number),
            "last_inference": last_ns // 1_000_000,
            "inference_count": counted.inference_count,
            "execution_count": counted.execution_count,
            "inference_stats": {
                "success": _duration(counted.success_count, counted.success_ns),
                "fail": _duration(counted.fail_count, counted.fail_ns),
                "queue": _duration(counted.success_count, counted.queue_ns),
                "compute_input": _duration(counted.success_count, counted.input_ns),
                "compute_infer": _duration(counted.success_count, counted.infer_ns),
                "compute_output": _duration(counted.success_count, counted.output_ns),
            },
            "batch_stats": [
                {
                    "batch_size": rows,
                    "compute_input": _duration(batch.count, batch.input_ns),
                    "compute_infer": _duration(batch.count, batch.infer_ns),
                    "compute_output": _duration(batch.count, batch.output_ns),
                }
                for rows, batch in sorted(counted.batches.items())
            ],
            "batch_reasons": {reason.value: count for reason, count in counted.reasons.items()},
            "rejected": counted.rejected,
            "cancelled": counted.cancelled,
            "queued": version.queue.count,
        }


def _duration(count: int, ns: int) -> dict[str, int]:
    return {"count": count, "ns": ns}
