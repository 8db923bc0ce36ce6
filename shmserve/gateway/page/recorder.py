"""An hour of what the page shows, in fixed arrays: every second of five minutes, and ten seconds of an hour.

Invariant: all lines have a value, or none, for the same seconds, which are those of the broker's monotonic clock. So a
page can continue the history of one gateway with the events of another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

SERIES = ("requests", "failed", "p50", "p99", "queue", "running", "wait")
"""Requests and failures per second, seconds of 50 % and 99 % of the requests, requests that wait and that run, and the
mean seconds in the queue."""
FINE, COARSE, STEP = 300, 360, 10
"""Values kept of each second and of each step, and the seconds of a step."""
TREND = 60
"""Seconds of a version's requests that the overview shows."""
GROWTH = 128
"""Lines that the arrays are extended by: 18 KiB each."""
SERVER = ("", "")
"""The key of the line for all versions together."""

Key = tuple[str, str]
Curves = dict[str, list[float | None]]
_REQUESTS, _FAILED = (SERIES.index(name) for name in ("requests", "failed"))
_MEASURED = [SERIES.index(name) for name in ("p50", "p99", "wait")]
_HIGHEST = [SERIES.index(name) for name in ("p99", "queue", "running")]
"""A step shows the highest of its values. The other series show their mean."""
_NAN = np.float32(np.nan)


class Recorder:
    """The history of the server and of its versions."""

    def __init__(self) -> None:
        self.second = 0
        """The last second with values."""
        self._lines: dict[Key, int] = {}
        self._free: list[int] = []
        self._last = np.zeros((0, len(SERIES)), np.float32)
        """The values of the last second."""
        self._fine = np.zeros((0, len(SERIES), FINE), np.float32)
        self._coarse = np.zeros((0, len(SERIES), COARSE), np.float32)
        self._line(SERVER)

    def record(
        self, second: int, seconds: float, versions: Iterable[Key], changed: Mapping[Key, Mapping[str, Any]]
    ) -> None:
        """Writes the values of the interval of `seconds` up to this second; 0: the interval is unknown. `versions`: all
        that exist. `changed`: the values of the server, and of versions that were not idle."""
        known = {SERVER, *versions}
        for key in self._lines.keys() - known:
            self._free.append(self._lines.pop(key))
        self._last[:, [_REQUESTS, _FAILED]] = 0.0
        self._last[:, _MEASURED] = _NAN
        for key in known - self._lines.keys():
            self._line(key)
        for key, values in changed.items():
            self._last[self._lines[key]] = [_NAN if (value := values[name]) is None else value for name in SERIES]
        passed = np.arange(max(self.second, second - COARSE * STEP) + 1, second + 1)
        covered = passed[-max(1, ceil(seconds)) :]
        self._fine[:, :, passed % FINE] = _NAN
        self._fine[:, :, covered % FINE] = self._last[:, :, None]
        self._coarse[:, :, passed // STEP % COARSE] = _NAN
        for end in passed[(passed % STEP == STEP - 1) & (passed >= second - FINE + STEP)]:
            self._summarize(int(end) // STEP)
        self.second = max(self.second, second)

    def _summarize(self, step: int) -> None:
        values = self._fine[:, :, np.arange(step * STEP, (step + 1) * STEP) % FINE]
        count = np.count_nonzero(~np.isnan(values), axis=2)
        means = np.nansum(values, axis=2) / np.where(count, count, _NAN)
        means[:, _HIGHEST] = np.fmax.reduce(values[:, _HIGHEST], axis=2)
        self._coarse[:, :, step % COARSE] = means

    def _line(self, key: Key) -> None:
        if not self._free:
            count = len(self._last)
            for array in (self._last, self._fine, self._coarse):
                array.resize((count + GROWTH, *array.shape[1:]), refcheck=False)  # in place: no second copy
            self._free = list(range(count + GROWTH - 1, count - 1, -1))
        line = self._lines[key] = self._free.pop()
        self._last[line] = _idle()
        self._fine[line] = self._coarse[line] = _NAN

    def curves(self, key: Key) -> dict[str, Curves] | None:
        """The values of a version, or of the server; None if the version does not exist."""
        line = self._lines.get(key)
        if line is None:
            return None
        seconds = np.arange(self.second - FINE + 1, self.second + 1) % FINE
        end = (self.second + 1) // STEP
        steps = np.arange(end - COARSE, end) % COARSE
        return {"fine": _curves(self._fine[line][:, seconds]), "coarse": _curves(self._coarse[line][:, steps])}

    def trends(self) -> Iterator[dict[str, Any]]:
        """The last minute of the versions that had requests in the last five, with their failures if there are any. All
        are those of the same second, whatever is recorded in between."""
        seconds = np.arange(self.second - FINE + 1, self.second + 1) % FINE
        busy, failing = (np.nansum(self._fine[:, one], axis=1) > 0 for one in (_REQUESTS, _FAILED))
        lines = [(key, line) for key, line in self._lines.items() if key[0] and busy[line]]
        numbers = np.array([line for _, line in lines], int)[:, None]
        requests = self._fine[numbers, _REQUESTS, seconds[-TREND:]]
        failed = self._fine[numbers, _FAILED, seconds]
        for index, ((name, version), line) in enumerate(lines):
            curves = {"requests": _values(requests[index])}
            if failing[line]:
                curves["failed"] = _values(failed[index])
            yield {"name": name, "version": version, **curves}


def _idle() -> NDArray[np.float32]:
    values = np.zeros(len(SERIES), np.float32)
    values[_MEASURED] = _NAN
    return values


def _curves(values: NDArray[np.float32]) -> Curves:
    return {name: _values(series) for name, series in zip(SERIES, values, strict=True)}


def _values(series: NDArray[np.float32]) -> list[float | None]:
    """The values with four significant digits; None where there is none."""
    return [None if value != value else float(f"{value:.4g}") for value in series.tolist()]
