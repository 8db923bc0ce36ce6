"""The answer to the query `report`: one document with the details of one version."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from shmserve.core.records import Version
from shmserve.core.service.graph import EnsembleGraph
from shmserve.core.stats.journeys import Journey
from shmserve.core.stats.statistics import Statistics

Document = dict[str, Any]


def document(
    version: Version, metadata: Document | None, config: Document, text: str, warnings: Sequence[str]
) -> Document:
    """`config` and `text` are the loaded configuration, as JSON and as annotated text, and `warnings` are about it.
    `metadata`: None while loading."""
    graph = version.service.graph
    start = time.time() - time.monotonic_ns() / 1e9  # of the monotonic clock
    return {
        "name": version.model,
        "version": str(version.number),
        "metadata": metadata,
        "config": config,
        "text": text,
        "warnings": warnings,
        "labels": [output["name"] for output in config.get("output", ()) if output.get("label_filename")],
        "errors": _errors(version.statistics, start),
        "slow": [_journey(one, start) for one in version.statistics.journeys.recent_slow()],
        "failed": [_journey(one, start) for one in version.statistics.journeys.recent_failed()],
        "graph": None if graph is None else _graph(version, graph),
    }


def _errors(counted: Statistics, start: float) -> list[Document]:
    """The last errors, the newest first. `start`: when the monotonic clock was 0, in seconds since 1970."""
    return [
        {"time": round(start + error.at / 1e9, 3), "code": error.code, "text": error.text, "count": error.count}
        for error in reversed(counted.errors)
    ]


def _journey(journey: Journey, start: float) -> Document:
    """`times`: in ns since the request arrived."""
    return {
        "model": journey.model,
        "version": str(journey.version),
        "time": round(start + journey.arrived / 1e9, 3),
        "took_ns": journey.took_ns,
        "rows": journey.rows,
        "id": journey.id,
        "code": journey.code,
        "text": journey.text,
        "instance": journey.instance,
        "batch_rows": journey.batch_rows,
        "reason": journey.reason,
        "times": [at - journey.arrived for at in journey.times],
        "steps": [{"begin_ns": step.arrived - journey.arrived} | _journey(step, start) for step in journey.steps],
    }


def _graph(version: Version, graph: EnsembleGraph) -> Document:
    """The steps of an ensemble with their counts. Executions are counted from the first report on."""
    counts = version.statistics.count_steps(len(graph.steps))
    policy = version.policy
    assert policy is not None
    return {
        "inputs": [spec.name for spec in policy.inputs],
        "outputs": [spec.name for spec in policy.outputs],
        "steps": [
            {
                "index": index,
                "model": step.model,
                "version": str(step.version or ""),
                "inputs": dict(step.inputs),
                "outputs": dict(step.outputs),
                "mapped": step.mapped,
                "condition": step.condition,
                "count": count.count,
                "failed": count.failed,
                "queue_ns": count.queue_ns,
                "input_ns": count.input_ns,
                "infer_ns": count.infer_ns,
                "output_ns": count.output_ns,
            }
            for index, (step, count) in enumerate(zip(graph.steps, counts, strict=True))
        ],
    }
