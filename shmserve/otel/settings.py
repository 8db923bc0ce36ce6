"""The settings of `--trace-config opentelemetry,...`, with Triton's names."""

from __future__ import annotations

import re
from typing import Any

from msgspec import Struct, field

PREFIX = "opentelemetry,"
CHOICES = {"protocol": ("http", "grpc"), "spans": ("shmserve", "triton")}
_MAX = 2**31 - 1
_NUMBERS = ("bsp_max_queue_size", "bsp_schedule_delay", "bsp_max_export_batch_size", "contexts_per_second")
KEYS = ("url", "resource", *CHOICES, *_NUMBERS)


class OtelSettings(Struct, frozen=True):
    """`spans`: the product whose names the spans have. `bsp_schedule_delay` is in ms. An empty `url` means
    OTEL_EXPORTER_OTLP_ENDPOINT, or a collector on this machine."""

    url: str = ""
    protocol: str = "http"
    spans: str = "shmserve"
    resource: dict[str, str] = field(default_factory=dict)
    bsp_max_queue_size: int = 20_000
    bsp_schedule_delay: int = 1000
    bsp_max_export_batch_size: int = 512
    contexts_per_second: int = 1000


def parsed(text: str) -> tuple[str, Any]:
    """The key and value of `KEY=VALUE`, without the prefix. Raises ValueError."""
    key, equals, value = text.partition("=")
    if key not in KEYS or not equals:
        raise ValueError(f"unknown trace setting '{PREFIX}{text}'; expected one of {keys_text()}")
    if key == "resource":
        name, equals, value = value.partition("=")
        if not name or not equals:
            raise ValueError(f"found '{PREFIX}{text}', expected {PREFIX}resource=NAME=VALUE")
        return key, (name, value)
    if value not in CHOICES.get(key, (value,)):
        raise ValueError(f"unknown {key} '{value}'; expected {' or '.join(CHOICES[key])}")
    if key == "url":
        value = value if "://" in value else f"http://{value}"  # as in Triton: the scheme may be missing
        if not re.match("https?://[^/]", value):
            raise ValueError(f"found '{value}', expected a URL such as http://localhost:4318/v1/traces")
    if key not in _NUMBERS:
        return key, value
    if not (value.isascii() and value.isdecimal()) or not 1 <= int(value) <= _MAX:
        raise ValueError(f"found '{value}' for {key}, expected a number from 1 to {_MAX}")
    return key, int(value)


def keys_text() -> str:
    return ", ".join(f"{PREFIX}{key}=" for key in KEYS)
