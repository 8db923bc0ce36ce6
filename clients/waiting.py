"""Shared parts of `wait_ready` of both clients: polling, retryable errors, error texts."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from shmserve.errors import ConnectionLost, DeadlineExceeded, NotFound, ServeError, Unavailable

POLL_S = 0.05
"""Initial polling interval; grows by half each time, up to ten times this."""
REASONS = 5
REASON_CHARACTERS = 300
"""Maximum number of reasons in an error text, and maximum length of each: a reason may be a model's traceback."""

OUT_OF_SERVICE = "it is out of service; `shmserve drain --undrain` puts it back"


class ReadyWait:
    """The state of one `wait_ready`. A client queries repeatedly, reports each answer or error, and pauses in
    between."""

    def __init__(self, url: str, model: str | None, timeout: float | None) -> None:
        self._url = url
        self._model = model
        self._timeout = timeout
        self._end = math.inf if timeout is None else time.monotonic() + timeout
        self._pause = POLL_S
        self._last: ServeError | None = None
        self._loading_ended = False
        self._out_of_service = False

    def remaining_time(self) -> float | None:
        """Timeout for the next query."""
        return None if self._timeout is None else max(0.001, self._end - time.monotonic())

    def not_yet(self, answer: Mapping[str, Any]) -> None:
        self._loading_ended = answer.get("settled", False)
        self._out_of_service = answer.get("out_of_service", False)
        self._last = None

    def failed(self, error: ServeError) -> None:
        """Raises the error if waiting cannot help. A query that only timed out replaces nothing that was learned."""
        if isinstance(error, DeadlineExceeded):
            self._last = self._last or error
            return
        self._loading_ended = self._out_of_service = False
        if isinstance(error, (ConnectionLost, Unavailable)) or (self._model and isinstance(error, NotFound)):
            self._last = error
        else:
            raise error

    def is_over(self) -> bool:
        """Whether there is no time for another query, or no model is being loaded any more."""
        return self._loading_ended or time.monotonic() + self._pause >= self._end

    def next_pause(self) -> float:
        pause = self._pause
        self._pause = min(pause * 1.5, 10 * POLL_S)
        return pause

    def error(self, index: list[dict[str, Any]]) -> ServeError:
        """The error when the wait is over, with the reasons from the states of the models."""
        what = f"model '{self._model}' at {self._url}" if self._model else f"the server at {self._url}"
        reasons = summary(why_not_ready(self._model, index))
        if self._loading_ended:
            return Unavailable(
                f"{what} is not ready, and nothing is being loaded: {reasons or 'no model could be loaded'}"
            )
        if self._last is not None and not isinstance(self._last, DeadlineExceeded):
            reasons = str(self._last)
        elif self._out_of_service:
            reasons = OUT_OF_SERVICE
        return DeadlineExceeded(f"{what} is not ready after {self._timeout:g} s{f': {reasons}' if reasons else ''}")


def failed_changes(model: str | None, index: list[dict[str, Any]]) -> list[str]:
    """A text for each model that still serves its previous state because its last change failed."""
    texts: dict[str, str] = {}
    for entry in index:
        failed = entry.get("last_failed_change")
        if failed is not None and model in (None, entry["name"]):
            text = f"model '{entry['name']}' still serves its previous version: {failed_change(failed)}"
            texts.setdefault(entry["name"], text)
    return list(texts.values())


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


def summary(reasons: list[str]) -> str:
    """The first reasons in one line of limited length."""
    more = [f"and {len(reasons) - REASONS:,} more"] if len(reasons) > REASONS else []
    return "; ".join([*map(shortened, reasons[:REASONS]), *more])


def shortened(reason: str) -> str:
    """The reason in one line of limited length."""
    text = " ".join(reason.split())
    return text if len(text) <= REASON_CHARACTERS else text[: REASON_CHARACTERS - 3] + "..."
