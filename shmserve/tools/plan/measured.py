"""Measured service times for a plan, from `bench --save`, `tune --json`, or a server's statistics."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from msgspec import Struct

from shmserve.errors import InvalidRequest
from shmserve.sim.service import Measured


class MeasuredModel(Struct, frozen=True):
    """`instances`, `max_batch` and `delay_ns`: those of the measured model; 0 and -1: unknown."""

    service: Measured
    origin: str
    instances: int = 0
    max_batch: int = 0
    delay_ns: int = -1


def read_measured(document: Any, model: str = "") -> MeasuredModel:
    """Raises InvalidRequest if the document has none of these formats, or no times."""
    if isinstance(document, dict):
        try:
            if "service_times" in document:
                return _of_tune(document)
            if "points" in document:
                return _of_bench(document)
            if "model_stats" in document:
                return _of_statistics(document, model)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidRequest(f"it is incomplete: {type(error).__name__} {error}") from error
    raise InvalidRequest("it is neither from `bench --save` or `tune --json` nor statistics (`stats --json`)")


def _service(times: dict[int, list[float]], where: str) -> Measured:
    if not times:
        raise InvalidRequest(f"{where} has no execution times; send requests first")
    return Measured(tuple((rows, fmean(durations)) for rows, durations in sorted(times.items())))


def _of_tune(document: dict[str, Any]) -> MeasuredModel:
    """The times of the chosen setting, or of the current one if none was chosen."""
    setting, samples = document["chosen"] or document["present"], document["service_times"]
    pair = setting["instances"], setting["threads"]
    own = [sample for sample in samples if (sample["instances"], sample["threads"] or 0) == pair]
    times: dict[int, list[float]] = {}
    for sample in own or samples:  # the setting may not have been measured itself
        times.setdefault(max(1, round(sample["rows"])), []).append(sample["measured_ms"] * 1e6)
    service = _service(times, "the report")
    return MeasuredModel(
        service,
        f"tune of {document['model']}",
        setting["instances"],
        setting["batch"],
        round(setting["delay_us"] * 1e3),
    )


def _of_bench(document: dict[str, Any]) -> MeasuredModel:
    """What the server counted for each load. Its times are means over requests, in which a batch counts as often as it
    has rows; so they are those of a batch of the mean size that a row sees, which is more than the mean size."""
    times: dict[int, list[float]] = {}
    largest = 0
    for point in document["points"]:
        server = point.get("server")
        if server and server["batches"]:
            parts = server["parts"]
            took = parts["compute"] + parts.get("gather", 0.0) + parts.get("scatter", 0.0)
            counts = {int(rows): count for rows, count in server.get("batch_sizes", {}).items()}
            if counts:
                seen = sum(count * rows * rows for rows, count in counts.items()) / sum(
                    count * rows for rows, count in counts.items()
                )
            else:
                seen = server["rows"] / server["batches"]
            times.setdefault(max(1, round(seen)), []).append(took)
            largest = max(largest, *times, *counts)
    return MeasuredModel(_service(times, "the run"), "bench", max_batch=largest)


def _of_statistics(document: dict[str, Any], model: str) -> MeasuredModel:
    results = [entry for entry in document["model_stats"] if not model or entry["name"] == model]
    names = sorted({str(entry["name"]) for entry in results})
    if len(names) != 1:
        known = ", ".join(sorted({str(entry["name"]) for entry in document["model_stats"]})) or "none"
        raise InvalidRequest(f"choose a model with --model; the models are {known}")
    times: dict[int, list[float]] = {}
    latest = max(results, key=lambda entry: int(entry["version"]))
    for batch in latest.get("batch_stats", []):
        parts = [batch[f"compute_{part}"] for part in ("input", "infer", "output")]
        if int(parts[1]["count"]):
            took = sum(int(part["ns"]) for part in parts) / int(parts[1]["count"])
            times.setdefault(int(batch["batch_size"]), []).append(took)
    return MeasuredModel(
        _service(times, f"model '{names[0]}'"), f"statistics of {names[0]}", max_batch=max(times, default=0)
    )
