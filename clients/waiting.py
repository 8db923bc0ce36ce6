"""Shared parts of `wait_ready` of both clients: polling, retryable errors, error texts."""

from __future__ import annotations

import time
from typing import Any

from shmserve.errors import ConnectionLost, DeadlineExceeded, NotFound, ServeError, Unavailable

POLL_S = 0.05
"""Initial polling interval; grows by half each time, up to ten times this."""


def pause_after(error: ServeError, model: str | None, last: ServeError | None) -> ServeError:
    """The error to report if this was the last attempt; raises it if waiting cannot help. An attempt that merely ran
    out of time does not replace the previous error.
    """
    if isinstance(error, DeadlineExceeded):
        return last or error
    if isinstance(error, (ConnectionLost, Unavailable)) or (model and isinstance(error, NotFound)):
        return error
    raise error


def not_ready(
    url: str, model: str | None, timeout: float, last: ServeError | None, index: list[dict[str, Any]]
) -> DeadlineExceeded:
    """The error for an expired wait, with the reasons."""
    what = f"model '{model}'" if model else "the server"
    if last is not None and not isinstance(last, DeadlineExceeded):
        return DeadlineExceeded(f"{what} at {url} is not ready after {timeout:g} s: {last}")
    reasons = why_not_ready(model, index)
    details = f": {'; '.join(reasons)}" if reasons else ""
    return DeadlineExceeded(f"{what} at {url} is not ready after {timeout:g} s{details}")


def will_not_be(url: str, model: str | None, index: list[dict[str, Any]]) -> Unavailable:
    """The error if waiting cannot help: nothing is being loaded, and a model has failed."""
    what = f"model '{model}'" if model else "the server"
    reasons = "; ".join(why_not_ready(model, index)) or "no model could be loaded"
    return Unavailable(f"{what} at {url} is not ready, and nothing is being loaded: {reasons}")


def failed_changes(model: str | None, index: list[dict[str, Any]]) -> list[str]:
    """A text for each model that still serves its previous state because its last change failed."""
    found: dict[str, str] = {}
    for entry in index:
        failed = entry.get("last_failed_change")
        if failed is not None and model in (None, entry["name"]):
            text = f"model '{entry['name']}' still serves its previous version: {failed_change(failed)}"
            found.setdefault(entry["name"], text)
    return list(found.values())


def degraded(model: str | None, index: list[dict[str, Any]]) -> list[str]:
    """A text for each version that serves with only some of its instances."""
    return [
        f"{entry['name']} {entry['version']} is {entry['reason']}"
        for entry in index
        if entry.get("degraded") and model in (None, entry["name"])
    ]


def failed_change(failed: dict[str, Any]) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(failed["time"]))
    return f"the change at {at} failed: {failed['reason']}"


def why_not_ready(model: str | None, index: list[dict[str, Any]]) -> list[str]:
    """A text for each version that is not ready. Models that are not loaded are only listed if asked for by name."""
    reasons = []
    for entry in index:
        if entry["name"] == model or (not model and entry["state"]):
            if entry["state"] != "READY":
                why = f" ({entry['reason']})" if entry["reason"] else ""
                name = f"{entry['name']} {entry['version']}".rstrip()
                reasons.append(f"{name} is {entry['state'] or 'not loaded'}{why}")
    return reasons
