"""Request traces: the settings, with Triton's names, and the trace file, in Triton's format.

Invariant: while nothing is traced, the core's table of samples is empty, and requests incur no cost.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from shmserve.broker.observability.log_settings import decode_changes
from shmserve.broker.observability.logs import log_record
from shmserve.broker.observability.trace_tensors import Read, activities
from shmserve.core.effects import Traced
from shmserve.core.owners.trace import PER_SECOND, PerSecond, Sample, Traces
from shmserve.errors import InvalidRequest, Unsupported
from shmserve.otel import settings as otel
from shmserve.otel.settings import OtelSettings

TRITON, OPENTELEMETRY = MODES = ("triton", "opentelemetry")
"""Targets of traces: the trace file, or an OpenTelemetry collector."""
NAMES = ("trace_file", "trace_level", "trace_rate", "trace_count", "log_frequency", "trace_mode")
LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")
_OLD_LEVELS = {"MIN": "TIMESTAMPS", "MAX": "TIMESTAMPS"}
"""Deprecated values that Triton's flags still accept -> current value."""
OFF = ("OFF",)
MAXIMUM = 2**31 - 1
FLUSH_S = 0.2
"""How long traces are buffered before they are written."""
_MINIMUM = {"trace_rate": 0, "trace_count": -1, "log_frequency": 0}
_KEYS = {"rate": "trace_rate", "count": "trace_count", "level": "trace_level", "mode": "trace_mode"}
_FILE_KEYS = {"file": "trace_file", "log-frequency": "log_frequency"}
_TIMES = ("COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END")
_encode = msgspec.json.Encoder().encode


class TraceSetting(Struct):
    """Fields that are None take the server's value, or that of the command line."""

    trace_level: tuple[str, ...] | None = None
    trace_rate: int | None = None
    trace_count: int | None = None
    log_frequency: int | None = None

    def with_defaults(self, other: TraceSetting) -> TraceSetting:
        """A copy with unset values taken from `other`."""
        names = self.__struct_fields__
        return TraceSetting(*(getattr(other if getattr(self, name) is None else self, name) for name in names))


DEFAULTS = TraceSetting(OFF, 1000, -1, 0)


class TraceSettings:
    """Tells `traces`, in the core, what to sample. `known` returns the names of models."""

    def __init__(self, options: Mapping[str, Any], traces: Traces, known: Callable[[], Collection[str]]) -> None:
        self._traces = traces
        self._model_names = known
        self._file = str(options.get("trace_file", ""))
        self._mode = str(options.get("trace_mode", TRITON))
        names = TraceSetting.__struct_fields__
        initial = {name: value for name, value in options.items() if name in names}
        if self._mode == OPENTELEMETRY:
            initial.setdefault("trace_level", ("TIMESTAMPS",))
        self._server = self._initial = TraceSetting(**initial).with_defaults(DEFAULTS)
        self._models: dict[str, TraceSetting] = {}
        self._sampled: dict[str, TraceSetting] = {}
        """Model -> the setting from which its current sample was made."""
        self._update_samples()

    def of(self, model: str) -> TraceSetting:
        """The effective setting for a model; "" for models without their own."""
        return self._models.get(model, TraceSetting()).with_defaults(self._server)

    def document(self, model: str) -> dict[str, Any]:
        """The settings in Triton's format, with numbers as strings. The count is the remaining number of traces."""
        if model:
            self._find(model)
        now = self.of(model)
        samples = self._traces.samples
        sample = samples.get(model) or samples.get("")
        return {
            "trace_level": list(now.trace_level or OFF),
            "trace_rate": str(now.trace_rate),
            "trace_count": str(now.trace_count if sample is None or now.trace_level == OFF else sample.remaining),
            "log_frequency": str(now.log_frequency),
            "trace_file": Path(self._file).name,
            "trace_mode": self._mode,
        }

    def change(self, model: str, body: bytes) -> dict[str, Any]:
        """`body`: the changes as JSON; null restores the inherited value. Raises InvalidRequest and Unsupported."""
        if model:
            self._find(model)
        changes = {name: _checked(name, value) for name, value in decode_changes(body, "traces", NAMES).items()}
        mode = changes.pop("trace_mode", None) or self._mode
        if mode != self._mode:
            raise Unsupported(
                f"the trace mode cannot be changed from '{self._mode}' to '{mode}' while the server runs; set it with "
                "--trace-config mode="
            )
        before = self._models.get(model, TraceSetting()) if model else self._server
        after = TraceSetting(**{name: changes.get(name, getattr(before, name)) for name in before.__struct_fields__})
        if not model:
            self._server = after.with_defaults(self._initial)
        elif after == TraceSetting():
            self._models.pop(model, None)
        else:
            self._models[model] = after
        if changes:
            self._sampled.pop(model, None)  # restart the sample even if the values are equal
        self._update_samples()
        if changes:
            whose = f"of model '{model}'" if model else "of the server"
            log_record("info", f"trace settings {whose} changed", {"model": model} if model else None)
        return self.document(model)

    def _find(self, model: str) -> None:
        if model not in self._model_names():
            raise InvalidRequest(f"Request for unknown model : {model}")

    def _update_samples(self) -> None:
        """Restarts samples whose settings have changed; the others continue."""
        effective = {model: self.of(model) for model in ("", *self._models)}
        if all(setting.trace_level == OFF for setting in effective.values()):
            effective.clear()
        samples = {model: sample for model, sample in self._traces.samples.items() if model in effective}
        for model, setting in effective.items():
            if self._sampled.get(model) != setting:
                count = 0 if setting.trace_level == OFF else setting.trace_count
                assert count is not None
                assert setting.trace_rate is not None
                level = setting.trace_level or OFF
                samples[model] = Sample(
                    setting.trace_rate,
                    count,
                    timestamps="TIMESTAMPS" in level,
                    tensors="TENSORS" in level and self._mode == TRITON,
                )
        self._sampled = effective
        self._traces.change_sampling(samples)


class TraceFile:
    """Writes traces to a file, or to the log if no file is configured. With log_frequency N, a new file starts after
    every N traces: FILE.0, FILE.1 and so on. A file is valid JSON at any time."""

    def __init__(self, loop: Any, path: Path | None, frequency: Callable[[str], int], read: Read) -> None:
        self._loop = loop
        self._read = read
        self._path = path
        self._frequency = frequency
        self._lines: list[bytes] = []
        """Lines that have not been written yet."""
        self._ends: dict[Path, int] = {}
        """File -> offset at which its array continues."""
        self._now = path
        """The current file."""
        self._files = 0
        """Number of the current numbered file."""
        self._in_file = 0
        """Number of traces in it."""
        self._timer: Any = None
        self._logged = PerSecond()

    def write(self, traced: Traced) -> None:
        if traced.log is not None:
            log_record(traced.log.level, traced.log.text, traced.log.fields)
        if self._path is None:
            self._log(traced)
            return
        frequency = self._frequency(traced.model)
        place = self._path.with_name(f"{self._path.name}.{self._files}") if frequency else self._path
        if place != self._now:
            self._flush()
            self._now = place
        self._lines += lines(traced, self._read)
        if frequency and not traced.parent:  # the trace of a step or call belongs to that of its request
            self._in_file += 1
        if frequency and self._in_file >= frequency:
            self._flush()
            del self._ends[place]
            self._files += 1
            self._in_file = 0
        elif self._timer is None:
            self._timer = self._loop.call_later(FLUSH_S, self._flush_soon)

    def _log(self, traced: Traced) -> None:
        """Logs a trace, up to PER_SECOND per second, as people read the log."""
        if self._logged.count(traced.answered) <= PER_SECOND:
            fields = {name: value for name, value in traced.fields.items() if value != ""}
            shown = ", ".join(f"{name} {value}" for name, value in fields.items())
            parent = f" of {traced.parent}" if traced.parent else ""
            log_record("info", f"sample {traced.number}{parent}: {shown}", fields)

    def _flush_soon(self) -> None:
        self._timer = None
        self._flush()

    def _flush(self) -> None:
        pending, self._lines = self._lines, []
        if not pending or self._now is None:
            return
        end = self._ends.setdefault(self._now, 0)
        data = (b",\n" if end else b"[\n") + b",\n".join(pending)
        try:
            descriptor = os.open(self._now, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (0 if end else os.O_TRUNC), 0o600)
            try:
                os.pwrite(descriptor, data + b"\n]\n", end)
            finally:
                os.close(descriptor)
        except OSError as error:
            log_record("error", f"cannot write {len(pending)} lines of traces to {self._now}: {error.strerror}")
        else:
            self._ends[self._now] = end + len(data)

    def close(self) -> None:
        """Writes buffered traces."""
        if self._timer is not None:
            self._timer.cancel()
        self._flush()


def lines(traced: Traced, read: Read) -> list[bytes]:
    """The lines of one trace in Triton's format: its identity, tensors, and timestamps in ns of the monotonic clock."""
    fields, number = traced.fields, traced.number
    who: dict[str, Any] = {"id": number, "model_name": fields["model"], "model_version": fields["version"]}
    if "id" in fields:
        who["request_id"] = fields["id"]
    if traced.parent:
        who["parent_id"] = traced.parent
    records = [_encode(who)]
    if traced.tensors is not None:
        inputs, outputs = traced.tensors
        records += map(_encode, activities(number, "TENSOR_QUEUE_INPUT", inputs, read))
        records += map(_encode, activities(number, "TENSOR_BACKEND_OUTPUT", outputs, read))
    if not traced.timestamps:
        return records
    times = [("REQUEST_START", traced.arrived), ("QUEUE_START", traced.arrived)]
    times += zip(_TIMES, traced.times, strict=False)
    times += [("INFER_RESPONSE_COMPLETE", traced.answered), ("REQUEST_END", traced.answered)]
    return records + [_encode({"id": number, "timestamps": [{"name": name, "ns": ns}]}) for name, ns in times]


# ---------------------------------------------------------------------------------------- values


def config(text: str) -> tuple[str, Any]:
    """Parses a value of --trace-config: `triton,file=PATH`, `triton,log-frequency=N`, `level=L`, `rate=N`, `count=N`,
    `mode=MODE` or `opentelemetry,KEY=VALUE`. Returns (setting, value). Raises ValueError."""
    if text.startswith(otel.PREFIX):
        key, value = otel.parsed(text.removeprefix(otel.PREFIX))
        return otel.PREFIX + key, value
    name, comma, rest = text.rpartition(",")
    key, equals, value = rest.partition("=")
    keys = _FILE_KEYS if comma else _KEYS
    if (comma and name != "triton") or not equals or key not in keys:
        known = ", ".join([*(f"triton,{key}=" for key in _FILE_KEYS), *(f"{key}=" for key in _KEYS), otel.keys_text()])
        raise ValueError(f"unknown trace setting '{text}'; expected one of {known}")
    try:
        if key == "file":
            if not value:
                raise InvalidRequest("missing file name")
            return keys[key], value
        return keys[key], _checked(keys[key], [_OLD_LEVELS.get(value, value)] if key == "level" else value)
    except (InvalidRequest, Unsupported) as error:
        raise ValueError(str(error)) from None


def _checked(name: str, value: Any) -> Any:
    if name == "trace_file":
        raise Unsupported(
            "trace file location can not be updated through network protocol; --trace-config triton,file= names it"
        )
    if isinstance(value, list) and name != "trace_level":  # gRPC sends every value as a list
        if len(value) > 1:
            raise InvalidRequest(f"expect only 1 value for '{name}'")
        value = value[0] if value else None
    if value is None or value == []:
        return None
    match name:
        case "trace_level":
            return _level([value] if isinstance(value, str) else value)
        case "trace_mode":
            if value not in MODES:
                raise Unsupported(
                    f"trace mode '{str(value)[:80]}' is not supported; expected one of {', '.join(MODES)}"
                )
            return value
    return _number(name, value)


def merged(values: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """All values of --trace-config as settings. As in Triton, levels add up; for others, the last value counts."""
    settings = dict(values)
    levels = [level for name, value in values if name == "trace_level" for level in value or OFF]
    if levels:
        settings["trace_level"] = tuple(dict.fromkeys(level for level in levels if level != "OFF")) or OFF
    return settings


def otel_settings(values: Sequence[tuple[str, Any]], compatible: bool = False) -> OtelSettings | None:
    """The settings for OpenTelemetry; None in another mode. `compatible`: spans have Triton's names by default."""
    if dict(values).get("trace_mode") != OPENTELEMETRY:
        return None
    options = {name.removeprefix(otel.PREFIX): value for name, value in values if name.startswith(otel.PREFIX)}
    options.setdefault("spans", "triton" if compatible else "shmserve")
    options["resource"] = dict(value for name, value in values if name == otel.PREFIX + "resource")
    return OtelSettings(**options)


def _level(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise InvalidRequest("Unable to parse 'trace_level': expected a list of OFF, or of TIMESTAMPS and TENSORS")
    for value in values:
        if value not in LEVELS:
            raise InvalidRequest(f"Unable to parse 'trace_level', got: {value[:80]}; expected {', '.join(LEVELS)}")
    if "OFF" in values and len(values) > 1:
        raise InvalidRequest("Expect only one trace level 'OFF' is specified")
    return tuple(dict.fromkeys(values))


def _number(name: str, value: Any) -> int:
    minimum = _MINIMUM[name]
    try:
        number = int(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else None
    except ValueError:
        number = None
    if number is None:
        raise InvalidRequest(f"Unable to parse '{name}', got: {str(value)[:80]}")
    if not minimum <= number <= MAXIMUM:
        raise InvalidRequest(
            f"Unable to parse '{name}', value is out of range [ {minimum}, {MAXIMUM} ], got: {str(value)[:80]}"
        )
    return number
