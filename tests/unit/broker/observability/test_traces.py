"""Settings of the log and of traces, changed while a server runs; the trace file, and the tensors in it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.broker.observability.log_settings import LogSettings
from shmserve.broker.observability.trace_tensors import ELEMENTS, STRING_BYTES, activities
from shmserve.broker.observability.traces import TraceFile, TraceSettings, config, lines, merged, otel_settings
from shmserve.core.effects import Log, Traced
from shmserve.core.owners.trace import PER_SECOND, Sample, Traces
from shmserve.core.policy import BatchPolicy, ModelPolicy, TensorSpec
from shmserve.errors import InvalidRequest, ServeError, Unsupported
from shmserve.otel.settings import OtelSettings
from shmserve.protocol.messages import Handle, Infer, More, Options, Tensor
from tests.support.broker.log_settings import log_settings
from tests.support.cases import cases
from tests.support.core.world import Recorded
from tests.support.manual_loop import ManualLoop

pytestmark = pytest.mark.usefixtures("own_log")

OFF = {
    "trace_level": ["OFF"], "trace_rate": "1000", "trace_count": "-1", "log_frequency": "0", "trace_file": "",
    "trace_mode": "triton",
}  # fmt: skip
LOG = {
    "log_file": "", "log_info": True, "log_warning": True, "log_error": True, "log_verbose_level": 0,
    "log_format": "default",
}  # fmt: skip


class Changing:
    def __init__(self, **given: Any) -> None:
        self.tracing: list[bool] = []
        self.settings = LogSettings(log_settings(**given), self.tracing.append)

    def to(self, **changes: Any) -> dict[str, Any]:
        return self.settings.change(json.dumps(changes).encode())


def test_log_settings_change_at_run_time(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    changing = Changing()
    assert changing.settings.document() == changing.to() == LOG
    assert changing.to(log_verbose_level=2, log_format="json") == LOG | {"log_verbose_level": 2, "log_format": "json"}
    assert changing.tracing == [True]
    logging.getLogger("shmserve.test").debug("fine")
    said = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [(line["level"], line["message"]) for line in said][1:] == [("debug", "fine")]
    assert said[0]["message"] == "log settings changed: log_format json, log_verbose 2"
    assert changing.to(log_info=False, log_warning=None, log_verbose_level=0)["log_info"] is False
    assert changing.tracing == [True, False]
    logging.getLogger("shmserve.test").info("not wanted")
    assert not capfd.readouterr().err
    changing = Changing(log_file=tmp_path / "server.log")
    assert changing.to(log_verbose_level=1)["log_file"] == "server.log", "without the directory"
    assert "log settings changed" in (tmp_path / "server.log").read_text()
    with pytest.raises(Unsupported, match=r"^log file location can not be updated through network protocol"):
        changing.to(log_file="server.log", log_info=False)
    assert changing.settings.document()["log_info"] is True


@cases(
    ({"log_error": "true"}, "expect boolean for 'log_error'"),
    *(({"log_verbose_level": value}, "expect int32 for 'log_verbose_level'") for value in (True, -1, 2**31)),
    ({"log_format": 1}, "expect string for 'log_format'"),
    ({"log_format": "xml"}, "invalid argument for log_format, got: xml; expected one of default, ISO8601, json"),
    ({"log_level": 1}, "unknown setting 'log_level' of the log; expected one of: log_file, log_info,"),
)
def test_invalid_log_settings_change_nothing(changes: dict[str, Any], text: str) -> None:
    changing = Changing()
    with pytest.raises(InvalidRequest) as refused:
        changing.to(log_warning=False, **changes)
    assert str(refused.value).startswith(text)
    assert changing.settings.document() == LOG
    assert changing.tracing == []


@pytest.mark.parametrize("body", [b"[]", b"1", b'{"log_info"', b"\xff", b"[" * 5000])
def test_a_body_that_is_not_an_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="settings of the log must be a JSON object"):
        Changing().settings.change(body)
    with pytest.raises(InvalidRequest, match="settings of the traces must be a JSON object"):
        tracing().change("", body)


def tracing(traces: Traces | None = None, **given: Any) -> TraceSettings:
    return TraceSettings(given, traces or Traces(), lambda: {"a", "b"})


def changed(settings: TraceSettings, model: str = "", **changes: Any) -> dict[str, Any]:
    return settings.change(model, json.dumps(changes).encode())


def test_trace_settings_are_inherited_from_the_server_and_the_flags() -> None:
    samples = (traces := Traces()).samples
    settings = tracing(traces)
    assert settings.document("") == settings.document("a") == changed(settings) == OFF
    assert changed(settings, trace_rate="3", trace_count=5) == OFF | {"trace_rate": "3", "trace_count": "5"}
    assert samples == {}
    changed(settings, trace_level=["TIMESTAMPS"])
    assert samples == {"": Sample(3, 5)}
    changed(settings, trace_level=["OFF"])
    assert (samples, settings.document("")["trace_count"]) == ({}, "5")
    for attempt in (settings.document, partial(changed, settings, trace_rate=1)):
        with pytest.raises(InvalidRequest, match=r"^Request for unknown model : c$"):
            attempt("c")
    settings = tracing(traces, trace_level=("TIMESTAMPS",), trace_rate=7, trace_file="/some/where/t.json")
    assert settings.document("a") == OFF | {"trace_level": ["TIMESTAMPS"], "trace_rate": "7", "trace_file": "t.json"}
    changed(settings, "a", trace_count=["9"], log_frequency="2")
    assert samples == {"": Sample(7), "a": Sample(7, 9)}
    samples["a"].take(1)
    changed(settings, trace_rate="1")
    assert samples == {"": Sample(1), "a": Sample(1, 9)}
    samples[""].take(1)
    samples["a"].take(1)
    assert settings.document("a")["trace_count"] == "8"
    changed(settings, "b", trace_level="OFF")
    assert not samples["b"].take(1)
    assert samples["a"].remaining == 8  # counting continues
    changed(settings, "a", trace_count=8)
    assert samples["a"] == Sample(1, 8)
    changed(settings, "a", trace_count=None, log_frequency=[])
    changed(settings, "b", trace_level=None)
    changed(settings, trace_rate=None)
    assert samples == {"": Sample(7)}
    assert settings.document("a") == settings.document("b") == settings.document("")


@cases(
    ({"trace_file": "x"}, Unsupported, "trace file location can not be updated through network protocol"),
    ({"trace_level": ["TENSOR", "TIMESTAMPS"]}, InvalidRequest, "Unable to parse 'trace_level', got: TENSOR;"),
    ({"trace_level": ["OFF", "TIMESTAMPS"]}, InvalidRequest, "Expect only one trace level 'OFF' is specified"),
    ({"trace_level": ["MAX"]}, InvalidRequest, "Unable to parse 'trace_level', got: MAX"),
    ({"trace_level": 1}, InvalidRequest, "Unable to parse 'trace_level'"),
    ({"trace_rate": "x"}, InvalidRequest, "Unable to parse 'trace_rate', got: x"),
    ({"trace_rate": -1}, InvalidRequest, "Unable to parse 'trace_rate', value is out of range [ 0, "),
    ({"trace_count": "-2"}, InvalidRequest, "Unable to parse 'trace_count', value is out of range [ -1, "),
    ({"log_frequency": True}, InvalidRequest, "Unable to parse 'log_frequency', got: True"),
    ({"trace_count": ["1", "2"]}, InvalidRequest, "expect only 1 value for 'trace_count'"),
    ({"trace_mode": "opentelemetry"}, Unsupported, "the trace mode cannot be changed from"),
    ({"rate": 1}, InvalidRequest, "unknown setting 'rate' of the traces; expected one of: trace_file, trace_level,"),
)
def test_invalid_trace_settings_are_refused(changes: dict[str, Any], kind: type[ServeError], text: str) -> None:
    settings = tracing()
    with pytest.raises(kind) as refused:
        changed(settings, **{"trace_rate": 1, "log_frequency": 1} | changes)
    assert str(refused.value).startswith(text)
    assert settings.document("") == OFF


@cases(
    ("triton,file=a.json", ("trace_file", "a.json")),
    ("triton,log-frequency=5", ("log_frequency", 5)),
    ("rate=0", ("trace_rate", 0)),
    ("count=-1", ("trace_count", -1)),
    ("level=TIMESTAMPS", ("trace_level", ("TIMESTAMPS",))),
    ("mode=triton", ("trace_mode", "triton")),
    ("mode=opentelemetry", ("trace_mode", "opentelemetry")),
    ("opentelemetry,url=http://a,b/c", ("opentelemetry,url", "http://a,b/c")),
    ("opentelemetry,url=localhost:4318/v1/traces", ("opentelemetry,url", "http://localhost:4318/v1/traces")),
    *((text, None) for text in ("triton,file=/tmp/a,b=c", "triton,file=", "triton,rate=1", "file=a")),
    *((text, None) for text in ("mode=zipkin", "opentelemetry,url=", "level=TENSOR", "rate=x", "rate")),
)
def test_the_trace_config_flag_is_parsed(text: str, found: tuple[str, Any] | None) -> None:
    if found is None:
        with pytest.raises(ValueError, match=r"trace|missing"):
            config(text)
    else:
        assert config(text) == found


def test_trace_levels_of_several_flags_are_combined() -> None:
    values = [config(text) for text in ("level=TIMESTAMPS", "rate=2", "level=TENSORS", "rate=3", "level=OFF")]
    assert merged(values) == {"trace_level": ("TIMESTAMPS", "TENSORS"), "trace_rate": 3}
    assert merged([config("level=OFF")]) == {"trace_level": ("OFF",)}
    samples = (traces := Traces()).samples
    settings = tracing(traces, **merged(values))
    assert settings.document("")["trace_level"] == ["TIMESTAMPS", "TENSORS"]
    assert samples == {"": Sample(3, -1, timestamps=True, tensors=True)}
    changed(settings, trace_level=["TENSORS"])
    assert samples == {"": Sample(3, -1, timestamps=False, tensors=True)}


def traced(number: int, times: tuple[int, ...] = (3, 4, 5, 6), **more: Any) -> Traced:
    fields = {"trace_id": "", "model": "a", "version": 1, "request": number, **more}
    return Traced(fields, 2, times, 7, None, number=number, model="a")


def nothing(parts: tuple[Handle, ...]) -> bytes | None:
    """The memory of a tensor that cannot be read."""
    return None


def read(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def test_the_file_is_json_at_any_time(tmp_path: Path) -> None:
    path, loop = tmp_path / "t.json", ManualLoop()
    path.write_text("what was there before" * 1000)
    file = TraceFile(loop, path, lambda model: 0, nothing)
    file.write(traced(1, id="mine"))
    loop.fire()
    first = read(path)
    assert first[0] == {"id": 1, "model_name": "a", "model_version": 1, "request_id": "mine"}
    assert {line["id"] for line in first} == {1}
    assert [(line["timestamps"][0]["name"], line["timestamps"][0]["ns"]) for line in first[1:]] == [
        ("REQUEST_START", 2), ("QUEUE_START", 2), ("COMPUTE_START", 3), ("COMPUTE_INPUT_END", 4),
        ("COMPUTE_OUTPUT_START", 5), ("COMPUTE_END", 6), ("INFER_RESPONSE_COMPLETE", 7), ("REQUEST_END", 7),
    ]  # fmt: skip
    file.write(traced(2, ()))
    file.write(traced(3))
    assert read(path) == first
    file.close()
    assert [line["id"] for line in read(path)] == [1] * 9 + [2] * 5 + [3] * 9
    # A log frequency splits traces into numbered files.
    frequency = 2
    file = TraceFile(loop, path, lambda model: frequency, nothing)
    for number, frequency in enumerate((2, 2, 2, 2, 2, 0, 2, 2), 1):  # noqa: B007 - read by the file
        file.write(traced(number))
    file.close()
    found = {path.name: sorted({line["id"] for line in read(path)}) for path in tmp_path.iterdir()}
    assert found == {"t.json.0": [1, 2], "t.json.1": [3, 4], "t.json.2": [5, 7], "t.json.3": [8], "t.json": [6]}


def test_steps_and_calls_are_in_the_trace_file_of_their_request(tmp_path: Path) -> None:
    """The settings of the request apply, not those of the steps' own models."""
    asked = []

    def frequency(model: str) -> int:
        asked.append(model)
        return 1

    file = TraceFile(ManualLoop(), tmp_path / "t", frequency, nothing)
    for number in (3, 6):
        file.write(replace(traced(number, model="b"), number=number, parent=number - 1))
        file.write(replace(traced(number, model="c"), number=number - 1, parent=number - 2))
        file.write(replace(traced(number), number=number - 2))
    file.close()
    assert set(asked) == {"a"}
    for name, numbers in (("t.0", (3, 2, 1)), ("t.1", (6, 5, 4))):
        whose = [line for line in read(tmp_path / name) if "model_name" in line]
        assert [line["id"] for line in whose] == list(numbers)
        assert [line.get("parent_id") for line in whose] == [*numbers[1:], None]


def test_without_a_file_traces_go_to_the_log_but_not_too_many(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger().addHandler(caplog.handler)
    file = TraceFile(ManualLoop(), None, lambda model: 0, nothing)
    with caplog.at_level("INFO"):
        file.write(replace(traced(1), times=(), log=Log("info", "trace why: OK", {"trace_id": "why"})))
        for number in range(2 * PER_SECOND):
            file.write(traced(number))
    file.close()
    texts = [record.getMessage() for record in caplog.records]
    assert texts[:2] == ["trace why: OK", "sample 1: model a, version 1, request 1"]
    assert len(texts) == 1 + PER_SECOND
    file = TraceFile(ManualLoop(), tmp_path / "none" / "t", lambda model: 0, nothing)
    file.write(traced(1))
    file.close()
    assert f"cannot write 9 lines of traces to {tmp_path}/none/t: No such file or directory" in caplog.text


def test_flags_of_the_mode_opentelemetry() -> None:
    flags = ["url=http://h/v1/traces", "resource=a=1", "resource=b=2", "bsp_max_queue_size=9"]
    values = [config(text) for text in ("mode=opentelemetry", "rate=100", *(f"opentelemetry,{flag}" for flag in flags))]
    assert otel_settings(values[1:]) is None
    assert otel_settings(values) == OtelSettings(
        url="http://h/v1/traces", resource={"a": "1", "b": "2"}, bsp_max_queue_size=9
    )
    samples = (traces := Traces()).samples
    settings = tracing(traces, **merged(values))
    assert samples == {"": Sample(100)}, "the level need not be given"
    assert settings.document("")["trace_mode"] == "opentelemetry"
    assert changed(settings, trace_mode="opentelemetry", trace_rate=5)["trace_rate"] == "5"
    with pytest.raises(Unsupported, match="cannot be changed from 'opentelemetry' to 'triton'"):
        changed(settings, trace_mode="triton")
    changed(settings, trace_level="OFF")
    assert not samples


MS = 1_000_000
X, Y = (TensorSpec("x", "FP32", (1,)),), (TensorSpec("y", "FP32", (1,)),)


def data(tensor: Tensor, read: Callable[[tuple[Handle, ...]], bytes | None] = nothing) -> str:
    """What a trace shows of a tensor."""
    (found,) = activities(1, "TENSOR_QUEUE_INPUT", [tensor], read)
    return str(found["tensor"]["data"])


def packed(*texts: bytes) -> bytes:
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)


@cases(
    ("INT32", "<i4", [0, -1, 2], "0,-1,2"),
    ("UINT64", "<u8", [2**64 - 1], str(2**64 - 1)),
    ("BOOL", "?", [True, False], "1,0"),
    ("FP32", "<f4", [0.1, 1.0, 1e-9], "0.1,1,1e-09"),
    ("FP64", "<f8", [0.5], "0.5"),
    ("FP16", "<f2", [0.25], "0.25"),
    ("BF16", "<u2", [0x3FC0], "1.5"),
    ("INT8", "i1", [], ""),
)
def test_numbers_and_strings(dtype: str, kind: str, values: list[Any], text: str) -> None:
    assert data(Tensor("x", dtype, (len(values),), np.array(values, kind).tobytes())) == text
    assert data(Tensor("x", "BYTES", (3,), packed(b"a", "é".encode(), b"\xff"))) == "a,é,\N{REPLACEMENT CHARACTER}"
    long = [b"a" * 100] * STRING_BYTES
    assert len(data(Tensor("x", "BYTES", (len(long),), packed(*long)))) < STRING_BYTES
    assert data(Tensor("x", "FP32", (2,), (Handle(1, 0, 8),))) == "", "it cannot be read"


def test_only_the_first_elements_of_large_tensors_are_read() -> None:
    memory = np.arange(ELEMENTS + 500, dtype="<i4").tobytes()
    parts = (Handle(1, 0, 400), Handle(1, 400, len(memory) - 400))
    read: list[int] = []

    def reads(asked: tuple[Handle, ...]) -> bytes:
        read.extend(part.size for part in asked)
        return b"".join(memory[part.offset : part.offset + part.size] for part in asked)

    shown = data(Tensor("x", "INT32", (ELEMENTS + 500,), parts), reads)
    assert (shown, read) == (",".join(map(str, range(ELEMENTS))), [400, 4 * ELEMENTS - 400])


def test_trace_lines_have_the_format_of_triton() -> None:
    x, y = (np.array([values], "<i4").tobytes() for values in ([0, 1], [1, 2]))
    tensors = ((Tensor("INPUT0", "INT32", (1, 2), x),), (Tensor("OUTPUT0", "INT32", (1, 2), y),))
    traced = Traced({"model": "m", "version": 1}, 1, (), 2, None, tensors, timestamps=False, number=1)
    assert lines(traced, nothing) == [
        b'{"id":1,"model_name":"m","model_version":1}',
        b'{"id":1,"activity":"TENSOR_QUEUE_INPUT","tensor":{"name":"INPUT0","data":"0,1","shape":"1,2","dtype":"INT32"}}',
        b'{"id":1,"activity":"TENSOR_BACKEND_OUTPUT","tensor":{"name":"OUTPUT0","data":"1,2","shape":"1,2","dtype":"INT32"}}',
    ]
    timed = [json.loads(line) for line in lines(replace(traced, timestamps=True), nothing)]
    assert sum("timestamps" in line for line in timed) == 4


class Sampled(Recorded):
    def __init__(self, policy: ModelPolicy) -> None:
        super().__init__()
        self.deploy(policy, large="y")
        self.core.state.observers.traces.change_sampling({"": Sample(1, tensors=True)})
        self.client = self.connect("c")


def test_inputs_and_outputs_of_a_request_are_traced() -> None:
    world = Sampled(ModelPolicy("m", 1, 4, X, Y, BatchPolicy()))
    world.client.sends(1)
    x = Tensor("x", "FP32", (1, 1), bytes(4))
    world.turn([(world.client.peer, Infer(1, "m", 0, (x,)))])
    world.worker("m_0").finish(world.now)
    world.settle()
    (found,) = world.of(Traced)
    assert found.tensors is not None
    inputs, (y,) = found.tensors
    assert inputs == (x,)
    assert y.data, "in shared memory that can be read in this turn"
    assert not isinstance(y.data, bytes)


def test_memory_of_earlier_parts_is_not_read() -> None:
    """The caller may have returned the memory, and it may hold another caller's bytes."""
    world = Sampled(ModelPolicy("m", 1, 4, X, Y, BatchPolicy(), decoupled=True))
    client, worker = world.client, world.worker("m_0")
    client.sends(1, 5)
    options = Options(window=5)
    world.turn([(client.peer, Infer(1, "m", 0, (Tensor("x", "FP32", (1, 1), bytes(4)),), None, 0, options))])
    world.turn([(client.peer, More(1, 1))])
    (request,) = worker.streams
    for last in (False, True):
        worker.part(request, last)
        world.turn(world.heard(worker))
    (found,) = world.of(Traced)
    assert found.tensors is not None
    assert [bool(tensor.data) for tensor in found.tensors[1]] == [False, True]
