"""The lines about the server and about one model, and a view as text and as JSON."""

from __future__ import annotations

import json
import re

import pytest

from shmserve.tools.top import plain
from shmserve.tools.top.columns import TABLES
from shmserve.tools.top.panels import BLOCKS, KEPT, TrendHistory, bar, detail, sparkline, summary, wrapped
from shmserve.tools.top.texts import Line, line_text, line_width
from shmserve.tools.top.view import View, make_view
from tests.support.clients.activity_documents import counters, document, gpu, instance, model


def texts(lines: list[Line]) -> str:
    return "\n".join(line_text(line) for line in lines)


def served() -> View:
    before = document(1, model("mlp"), model("cnn"))
    mlp = model(
        "mlp",
        counted=counters(4000, 20, reasons={"full": 30, "idle": 10}, batch_rows={"8": 30, "1": 10}),
        queued=5,
        in_flight=2,
        instances=[instance("mlp_0_0", batch_rows=8, batch_seconds=0.25), instance("mlp_0_1", state="backoff")],
    )
    server = document(3)["server"] | {"refused": {"model_queue": 7}, "held_bytes": 3 << 20, "connections": 14}
    return make_view(before, document(3, mlp, model("cnn"), server=server, gpus=[gpu(0), gpu(1, utilization=None)]))


@pytest.mark.parametrize("width", [20, 80, 250])
def test_the_summary(width: int) -> None:
    lines = summary(served(), "unix:///run/lane.sock", width)
    assert len(lines) == 4
    assert all(line_width(line) <= width for line in lines)
    text = texts(lines)
    assert text.startswith("test 1.2.3")
    if width >= 80:
        assert "READY   up 25h00m   unix:///run/lane.sock" in text
        assert "req/s 2,010   failed/s 10.0   in flight 0   queued 5   clients 14" in text
        assert "cpu [|||      25%] 4 cores   mem [|||      25%] 4.0G/16.0G   broker 10% 80.0M" in text
        assert "gpu 0 [|||| 50%] 20.0G/80.0G 300W   gpu 1 n/a 20.0G/80.0G 300W" in text
    if width == 250:
        assert "held 3.0M   shared 0B   refused 7" in text


def test_a_server_with_few_fields_and_a_gpu_out_of_service() -> None:
    answer = document(1, model("m"), server={"name": "triton", "version": "2.50", "ready": False}, notes=["no metrics"])
    text = texts(summary(make_view(None, answer), "http://host:8000", 80))
    assert text.splitlines()[0].startswith("triton 2.50   NOT READY   http://host:8000")
    assert "req/s -" in text
    assert "machine n/a" in text
    assert text.splitlines()[-1] == "no metrics"
    gpus = [
        gpu(0, throttled=["sw_thermal"], sm_clock_hertz=99e7, sm_clock_max_hertz=198e7, temperature_celsius=91),
        gpu(1, out_of_service="GPU 1 is out of service: Xid 79"),
    ]
    view = make_view(None, document(1, model("m"), gpus=gpus))
    lines = ["".join(text for text, _ in line) for line in summary(view, "", 200)]
    (found,) = [line for line in lines if "gpu 0" in line]
    assert "300W sw_thermal" in found
    assert found.rstrip().endswith("OUT OF SERVICE")
    assert [row["sm_clock_share"] for row in view.gpus] == [0.5, None]
    table = plain.text(view, "", plain.tables_of("gpus"), "", None, None)
    assert "GPU 1 is out of service: Xid 79" in table


def test_recorded_values_come_before_the_samples() -> None:
    history = TrendHistory()
    history.add(served())
    (own,) = history.of("mlp", 1).requests_per_s
    recorded: dict[str, list[float | None]] = {"requests": [*map(float, range(10))], "p99": [None, 0.5], "queue": []}
    history.seed("mlp", 1, recorded, 2)
    samples = history.of("mlp", 1)
    assert list(samples.requests_per_s) == [1.0, 3.0, 5.0, 7.0, own], "the last recorded one is the sample's"
    assert [len(values) for values in (samples.p99, samples.queued)] == [1, 1]
    history.seed("mlp", 1, recorded, 1)
    assert len(samples.requests_per_s) == 5, "once"
    history.seed("gone", 1, recorded, 1)
    assert not history.of("gone", 1).requests_per_s


def test_bars_sparklines_and_wrapped_texts() -> None:
    assert line_text(bar(0.5, 12)) == "[||||||   50%]"
    assert line_text(bar(1.7, 12)) == "[||||||||170%]"
    assert line_text(bar(0.0, 5)) == "[   0%]"
    assert sparkline([], 10) == sparkline([1.0], 0) == ""
    assert sparkline([0.0, None, 3.5, 7.0], 10) == f"{BLOCKS[0]} {BLOCKS[4]}{BLOCKS[7]}"
    assert sparkline([9.0, 1.0, 2.0], 2) == f"{BLOCKS[4]}{BLOCKS[7]}", "only the last ones count"
    assert sparkline([0.0, 0.0], 2) == BLOCKS[0] * 2
    assert [line_text(line) for line in wrapped("one two  three\nfour", 9, "plain")] == ["one two", "three", "four"]
    assert [line_text(line) for line in wrapped("x" * 7, 3, "plain")] == ["xxx", "xxx", "x"]
    assert wrapped("", 10, "plain") == []
    assert [line_text(line) for line in wrapped("\u6f22\u5b57 " * 3, 8, "plain")] == [
        "\u6f22\u5b57",
        "\u6f22\u5b57",
        "\u6f22\u5b57",
    ]
    assert [line_text(line) for line in wrapped("\u6f22" * 3, 5, "plain")] == ["\u6f22\u6f22", "\u6f22"]


def test_the_history_is_bounded_and_forgets_models_that_are_gone() -> None:
    history, view = TrendHistory(), served()
    for _ in range(KEPT + 10):
        history.add(view)
    assert len(history.of("mlp", 1).p99) == KEPT
    history.add(make_view(None, document(5, model("cnn"))))
    assert not history.of("mlp", 1).p99
    assert len(history.of("cnn", 1).p99) == KEPT, "a view without rates has no sample"


@pytest.mark.parametrize("width", [20, 80, 250])
def test_one_model_in_detail(width: int) -> None:
    view, history = served(), TrendHistory()
    history.add(view)
    lines = detail(view, history, "mlp", 1, width, ())
    assert all(line_width(line) <= width for line in lines)
    text = texts(lines)
    assert text.splitlines()[0] == "mlp  version 1  default  READY"[:width]
    assert "cnn" not in text
    if width >= 80:
        assert re.search(r"req/s +2,010 +p50 +\d.\d\dms +queued +5 +memory +100M", text)
        assert re.search(r"full +75% █+ 30", text)
        assert re.search(r"8 rows +75% █+ 30", text)
        assert re.search(r"mlp_0_0 +ready +250ms +8", text)
        assert re.search(r"mlp_0_1 +backoff +-", text)
        assert re.search(r"p99 +\d.\d\dms  █", text)


def test_a_model_that_is_not_served() -> None:
    reason = "load failed: " + "word " * 30 + "\x1b[31m" + "x" * 100
    view = make_view(None, document(1, model("m", state="UNAVAILABLE", reason=reason, instances=[], counters={})))
    lines = detail(view, TrendHistory(), "m", 1, 40, ())
    text = texts(lines)
    assert "\x1b" not in text
    assert re.sub(r"\s", "", reason.replace("\x1b", "\\x1b")) in re.sub(r"\s", "", text)
    assert all(line_width(line) <= 40 for line in lines)
    gone = texts(detail(view, TrendHistory(), "other", 1, 80, ()))
    assert gone == "other is not listed by the server any more"


def test_as_text_and_json() -> None:
    view = served()
    text = plain.text(view, "unix:///x", TABLES, "", None, None)
    assert "  p99" in text
    assert "batches formed because" in text
    tables = text.split("\n\n")
    assert [table.split()[0] for table in tables[1:]] == ["model", "instance", "client", "gpu"]
    assert [line.split()[0] for line in tables[1].splitlines()] == ["model", "cnn", "mlp"]
    assert not any(line != line.rstrip() for line in text.splitlines())
    narrow = plain.text(view, "unix:///x", TABLES, "", None, 80)
    assert max(map(len, narrow.splitlines())) <= 80
    assert plain.text(view, "unix:///x", TABLES, "nope", None, 80).endswith("\n\nno row has the words of --filter nope")
    only = plain.text(view, "unix:///x", plain.tables_of("models"), "mlp", "requests_per_s", None)
    assert "cnn" not in only
    assert "mlp_0_0" not in only
    found = json.loads(json.dumps(plain.document(served(), "unix:///x", TABLES, "", "requests_per_s"), allow_nan=False))
    assert found["interval"] == 2
    assert [row["model"] for row in found["models"]] == ["mlp", "cnn"]
    assert found["models"][0]["requests_per_s"] == 2010
    assert found["models"][1]["p99"] is None
    assert found["server"]["failed_per_s"] == 10
    assert {"instances", "clients", "gpus", "unknown", "notes", "url"} <= found.keys()
    found = plain.document(served(), "", TABLES, "top", None)
    assert ([row["name"] for row in found["clients"]], found["models"]) == (["top"], [])
