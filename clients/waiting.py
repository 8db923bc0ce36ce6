"""What wait_ready has in common in both clients: how long to pause, what to bear, what to say at last."""

from __future__ import annotations

from typing import Any

from shmserve.errors import ConnectionLost, DeadlineExceeded, NotFound, ServeError, Unavailable

POLL_S = 0.05
"""Between two questions; half as long again each time, up to ten times this."""


def pause_after(error: ServeError, model: str | None) -> ServeError:
    """The error, if waiting may help; raises it otherwise."""
    if isinstance(error, (ConnectionLost, Unavailable, DeadlineExceeded)) or (model and isinstance(error, NotFound)):
        return error
    raise error


def not_ready(
    url: str, model: str | None, timeout: float, last: ServeError | None, index: list[dict[str, Any]]
) -> DeadlineExceeded:
    """Says what was waited for and what stands in the way."""
    what = f"model '{model}'" if model else "the server"
    if last is not None and not isinstance(last, DeadlineExceeded):
        return DeadlineExceeded(f"{what} at {url} is not ready after {timeout:g} s: {last}")
    reasons = why_not_ready(model, index)
    told = f": {'; '.join(reasons)}" if reasons else ""
    return DeadlineExceeded(f"{what} at {url} is not ready after {timeout:g} s{told}")


def why_not_ready(model: str | None, index: list[dict[str, Any]]) -> list[str]:
    """A text for each version that stands in the way. That a model is not loaded matters only to who names it."""
    reasons = []
    for entry in index:
        if entry["name"] == model or (not model and entry["state"]):
            if entry["state"] != "READY":
                why = f" ({entry['reason']})" if entry["reason"] else ""
                name = f"{entry['name']} {entry['version']}".rstrip()
                reasons.append(f"{name} is {entry['state'] or 'not loaded'}{why}")
    return reasons
