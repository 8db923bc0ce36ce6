"""Readers of the values of the server's own flags, and of values in the environment and in the configuration file."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from shmserve.broker.listeners import access
from shmserve.broker.observability import metrics, traces
from shmserve.broker.processes.cpus import host_policy
from shmserve.broker.processes.gpus import xids
from shmserve.core.limits import NAMED
from shmserve.core.owners.rate_limiter import ANY, SHARED
from shmserve.errors import InvalidRequest
from shmserve.repo.remote.address import RemoteAddress, is_remote, parse_address
from shmserve.settings.flag import Flag
from shmserve.settings.limits import GATEWAY_LIMITS, read_limit
from shmserve.settings.values import COMMON, Reader, number, text_value


def from_text(flag: Flag, text: str) -> Any:
    """Parses one value from the command line or a variable. Raises ValueError."""
    return READERS[flag.kind](flag, text)


def from_environment(flag: Flag, text: str) -> Any:
    """Parses a variable. Values of a repeatable flag are separated by ':' if all are paths, otherwise by ';'."""
    if not flag.repeatable:
        return from_text(flag, text)
    are_paths = flag.kind == "repository" and not is_remote(text)
    return [from_text(flag, part) for part in text.split(":" if are_paths else ";") if part]


def from_toml(flag: Flag, value: Any, folder: Path) -> Any:
    """Parses a value of the configuration file. Paths are relative to `folder`, the file's directory. Raises
    ValueError."""
    if flag.repeatable:
        values = value if isinstance(value, list) else [value]
        return [_one_from_toml(flag, one, folder) for one in values]
    return _one_from_toml(flag, value, folder)


def _one_from_toml(flag: Flag, value: Any, folder: Path) -> Any:
    types: tuple[tuple[type, ...], str]
    match flag.kind:
        case "boolean":
            types = (bool,), "true or false"
        case "integer":
            types = (int,), "a whole number"
        case "bytes":
            types = (int, str), 'a whole number or text like "256 MiB"'
        case "seconds":
            types = (int, float), "a number"
        case _:
            types = (str,), "text" + (" or an array of it" if flag.repeatable else "")
    if not isinstance(value, types[0]) or (isinstance(value, bool) and flag.kind != "boolean"):
        raise ValueError(f"found {_toml_type(value)}, expected {types[1]}")
    converted = from_text(flag, str(value))
    return folder / converted if isinstance(converted, Path) else converted


def _toml_type(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return f'the text "{value}"'
    if isinstance(value, list):
        return "an array"
    return "a table" if isinstance(value, dict) else "a date or time"


def _repository(flag: Flag, text: str) -> Path | RemoteAddress:
    if not is_remote(text):
        return Path(text_value(flag, text))
    try:
        return parse_address(text)
    except InvalidRequest as error:
        raise ValueError(error.message) from None


def _cache(text: str) -> int:
    """Size of the response cache in bytes."""
    name, _, setting = text.partition(",")
    key, _, value = setting.partition("=")
    if name != "local":
        raise ValueError(f"unknown cache '{name}'; expected local,size=BYTES")
    if key != "size":
        raise ValueError(f"unknown cache setting '{setting}'; expected size=BYTES")
    return number(value, True, 1)


def _pool(text: str) -> tuple[int, int]:
    """Returns (GPU, bytes); GPU -1: all GPUs."""
    gpu, _, size = text.rpartition(":")
    if gpu and not (gpu.isascii() and gpu.isdecimal()):
        raise ValueError(f"found '{text}', expected N or GPU:N, as in 0:67108864")
    return int(gpu) if gpu else -1, number(size, True, 0)


def _resource(text: str) -> tuple[str, int, int]:
    """A resource of the rate limiter: name, device, count."""
    name, _, rest = text.partition(":")
    count, _, device = rest.partition(":")
    if not name or not count.isdecimal() or not (device in ("", "global") or device.isdecimal()):
        raise ValueError(f"found '{text}', expected NAME:COUNT, NAME:COUNT:DEVICE or NAME:COUNT:global")
    return name, {"": ANY, "global": SHARED}[device] if not device.isdecimal() else int(device), int(count)


def _setting(text: str) -> tuple[str, str]:
    """`onnxruntime,key=value` -> ("onnxruntime,key", "value"); `key=value` is for all backends: (",key", "value")."""
    name, equals, value = text.partition("=")
    backend, comma, key = name.rpartition(",")
    if not equals or not key or (comma and not backend) or "," in backend:
        raise ValueError(f"'{text}' is neither BACKEND,KEY=VALUE nor KEY=VALUE")
    return f"{backend},{key}", value


def _trace(flag: Flag, text: str) -> tuple[str, Any]:
    return traces.config(f"{flag.setting}={text}" if flag.setting else text)


def _device_fraction(text: str) -> tuple[int, float]:
    """Parses DEVICE:FRACTION."""
    device, _, share = text.partition(":")
    try:
        if device.isascii() and device.isdecimal() and 0 <= float(share) <= 1:
            return int(device), float(share)
    except ValueError:
        pass
    raise ValueError(f"found '{text}', expected DEVICE:FRACTION, as in 0:0.9")


def _decimal(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"'{text}' is not a number") from None


def _of_text(read: Any) -> Reader:
    return lambda _, text: read(text)


_TEXTS = {
    "setting": _setting,
    "policy": host_policy,
    "xid": xids.rule,
    "access": access.rule,
    "group": access.group_id,
    "limit": partial(read_limit, (*NAMED, *GATEWAY_LIMITS)),
    "cache": _cache,
    "resource": _resource,
    "pool": _pool,
    "metrics": metrics.metrics_config,
    "fraction": _device_fraction,
    "decimal": _decimal,
}
_OF_GATEWAYS = "roles", "servers", "HTTP restriction", "gRPC restriction"
"""Kinds that gateways read."""
READERS: Mapping[str, Reader] = {
    **COMMON,
    **{kind: _of_text(read) for kind, read in _TEXTS.items()},
    **dict.fromkeys(_OF_GATEWAYS, text_value),
    "repository": _repository,
    "trace": _trace,
}
