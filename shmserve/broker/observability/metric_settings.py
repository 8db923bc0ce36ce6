"""The value of --metrics-config: which latency metrics to collect, and the quantiles of summaries."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from msgspec import Struct

QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)
_SWITCHES = ("counter_latencies", "histogram_latencies", "summary_latencies")
_NAMES = (*_SWITCHES, "summary_quantiles")
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)")


class MetricSettings(Struct, frozen=True):
    counter_latencies: bool = True
    histogram_latencies: bool = False
    summary_latencies: bool = False
    summary_quantiles: tuple[float, ...] = QUANTILES
    cpu: bool = True
    interval_s: float = 0.0
    """Minimum interval between samples of the machine's CPU usage."""


DEFAULTS = MetricSettings()


def config(text: str) -> tuple[str, Any]:
    """Parses a value of --metrics-config, NAME=VALUE. Raises ValueError."""
    name, equals, value = text.partition("=")
    if not equals or name not in _NAMES:
        close = get_close_matches(name, _NAMES, 1)
        more = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"unknown metrics setting '{text}'; expected one of {', '.join(_NAMES)}{more}")
    if name == "summary_quantiles":
        return name, _quantiles(value)
    if value.lower() not in ("true", "false"):
        raise ValueError(f"{name}: '{value}' is neither true nor false")
    return name, value.lower() == "true"


def _quantiles(text: str) -> tuple[float, ...]:
    """Parses QUANTILE:ERROR,... As in Triton, the error is accepted, but it is not used: values are always within
    1.6 %."""
    quantiles = []
    for pair in text.split(","):
        quantile, colon, error = pair.partition(":")
        match = _NUMBER.fullmatch(quantile)
        if match is None or not 0 <= float(match[1]) <= 1 or (colon and not _NUMBER.match(error)):
            raise ValueError(f"summary_quantiles: '{pair}' is not QUANTILE:ERROR with numbers from 0 to 1")
        quantiles.append(float(match[1]))
    return tuple(quantiles)


def metric_settings(given: Sequence[tuple[str, Any]], cpu: bool, interval_s: float) -> MetricSettings:
    """Merges the values of --metrics-config. If a setting is repeated, its last value counts."""
    return MetricSettings(**dict(given), cpu=cpu, interval_s=interval_s)
