"""Timelines of made-up recordings: the rows, the arrows, and what is left out."""

from __future__ import annotations

import io
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.core.service.form import Reason
from shmserve.tools import timeline
from shmserve.tools.timeline import Collected, TraceTimeline, lanes, summary, text, write
from tests.support.clients.trace_events import check

US = 1000
SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)).map(lambda span: (span[0], sum(span))), max_size=40)


@given(SPANS, st.integers(1, 8))
def test_spans_of_a_row_do_not_overlap_and_no_row_is_wasted(spans: list[tuple[int, int]], most: int) -> None:
    found = lanes(spans, most)
    rows: dict[int, list[tuple[int, int]]] = {}
    for span, row in zip(spans, found, strict=True):
        if row is not None:
            rows.setdefault(row, []).append(span)
    for taken in rows.values():
        taken.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(taken))
    at_once = max((sum(begin <= time < end for begin, end in spans) for time in range(51)), default=0)
    assert sorted(rows) == list(range(min(at_once, most)))
    assert (None in found) == (at_once > most)


def request(number: int, arrived: int, **more: Any) -> list[Any]:
    fields = {"client": 1, "own": number, "id": "", "parent": 0, "rows": 1} | more
    gone = fields.pop("gone", False)
    return [number, *fields.values(), arrived * US, gone]


def batch(number: int, times: tuple[int, int, int, int], *requests: list[Any], **more: Any) -> list[Any]:
    fields = {"model": "m", "version": 1, "instance": "m_0", "reason": "full", "lease": 0} | more
    return [
        "batch", fields["model"], fields["version"], fields["instance"], number, fields["reason"], len(requests),
        [time * US for time in times], times[3] * US, fields["lease"], list(requests),
    ]  # fmt: skip


def end(kind: str, code: str, ended: int, request: list[Any], model: str = "m") -> list[Any]:
    return ["end", model, 1, kind, code, ended * US, request]


def collected(*records: list[Any], limit: int = 100, left_out: int = 0) -> Collected:
    found = Collected(limit)
    found.add({"records": list(records), "clients": {"1": "app"}, "left_out": left_out})
    return found


def events(found: Collected) -> list[dict[str, Any]]:
    file = io.BytesIO()
    write(file, TraceTimeline(found).events(), {"server": "s"})
    document = json.loads(file.getvalue())
    assert document["otherData"] == {"server": "s"}
    check(document["traceEvents"])
    return list(document["traceEvents"])


def named(found: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (event,) = [event for event in found if event["name"] == name and event["ph"] == "X"]
    return event


def test_a_batch_with_its_requests() -> None:
    found = events(
        collected(
            batch(7, (100, 110, 150, 160), request(1, 40), request(2, 90, id="mine", own=5, rows=3)),
            batch(9, (160, 160, 170, 180), request(3, 95)),
            end("batch", "INVALID_ARG", 180, request(3, 95)),
        )
    )
    first, second = named(found, "batch of 2"), named(found, "batch of 1")
    assert (first["ts"], first["dur"]) == (60, 60)
    assert first["args"] == {
        "batch": 7, "rows": 2, "reason": "full: no further request fits", "requests": [1, 2], "clients": ["1 (app)"],
        "longest wait us": 60,
    }  # fmt: skip
    parts = [(event["name"], event["ts"], event["dur"]) for event in found if event.get("cat") == "part"]
    assert parts[:3] == [("gather", 60, 10), ("compute", 70, 40), ("scatter", 110, 10)]
    waits = named(found, "request 2")
    assert (waits["ts"], waits["dur"]) == (50, 10)
    assert waits["args"] == {
        "request": 2, "rows": 3, "client": "1 (app)", "number of the client": 5, "id": "mine", "result": "OK",
        "waited us": 10, "batch": 7, "batch size": 2, "reason": "full",
    }  # fmt: skip
    assert named(found, "request 3: INVALID_ARG")["args"]["result"] == "INVALID_ARG"
    ends = {event["id"]: event for event in found if event["ph"] == "f"}
    starts = {event["id"]: event for event in found if event["ph"] == "s"}
    rows = {event["tid"]: event["args"]["request"] for event in found if event.get("cat") == "request"}
    assert len(rows) == 3, "they waited at the same time"
    arrows = {rows[starts[number]["tid"]]: (ends[number]["tid"], ends[number]["ts"]) for number in ends}
    assert arrows == {1: (first["tid"], 60), 2: (first["tid"], 60), 3: (second["tid"], 120)}
    depths = [(event["ts"], event["args"]["requests"]) for event in found if event["ph"] == "C"]
    assert depths == [(0, 1), (50, 2), (55, 3), (60, 1), (120, 0)]


def test_requests_that_no_batch_answers() -> None:
    found = events(
        collected(
            end("queued", "DEADLINE_EXCEEDED", 50, request(1, 10)),
            end("cached", "", 20, request(2, 20)),
            end("ensemble", "", 90, request(3, 10), model="e"),
            batch(8, (30, 30, 40, 40), request(4, 20, parent=3)),
            end("stream", "", 80, request(5, 21)),
            batch(9, (40, 40, 45, 45), request(5, 21)),
        )
    )
    assert named(found, "request 1: DEADLINE_EXCEEDED")["dur"] == 40
    assert named(found, "request 2 (cached)")["dur"] == 0.001
    whole, step = named(found, "request 3"), named(found, "request 4")
    assert (whole["dur"], step["args"]["made for request"]) == (80, 3)
    assert named(found, "request 5 (stream)")["dur"] == 40
    (arrow,) = [event for event in found if event["name"] == "for" and event["ph"] == "s"]
    assert (arrow["tid"], arrow["ts"]) == (whole["tid"], step["ts"])


def test_calls_and_further_runs_of_a_request() -> None:
    """An arrow leads from the row of the instance to the call; a request waits again after the end of its batch."""
    call = batch(9, (40, 40, 50, 50), request(2, 30, parent=1), model="n")
    found = events(collected(batch(8, (10, 10, 90, 90), request(1, 5)), call))
    (arrow,) = [event for event in found if event["name"] == "for" and event["ph"] == "s"]
    assert (arrow["tid"], arrow["ts"]) == (10001, 25)
    found = events(collected(batch(8, (10, 10, 20, 20), request(1, 5)), batch(9, (30, 30, 40, 40), request(1, 5))))
    assert [(event["ts"], event["dur"]) for event in found if event["name"] == "request 1"] == [(0, 5), (15, 10)]
    assert events(collected()) == []
    assert set(timeline.REASONS) == {reason.value for reason in Reason}


def test_what_exceeds_the_limit_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [
        batch(number, (10 * number,) * 4, *[request(4 * number + place, 0) for place in range(4)])
        for number in range(1, 5)
    ]
    found = collected(*many, limit=10, left_out=3)
    assert (found.requests, found.left_out, found.missing) == (8, 8, 11)
    monkeypatch.setattr(timeline, "lanes", lambda spans: lanes(spans, 3))
    made = TraceTimeline(found)
    assert made.not_shown == 5
    assert sum(event.get("cat") == "request" for event in check(made.events())) == 3


def test_a_summary() -> None:
    found = collected(
        batch(8, (100, 110, 150, 160), request(1, 50), request(2, 90)),
        batch(9, (160, 160, 210, 220), request(3, 95), reason="idle"),
        end("batch", "INTERNAL", 220, request(3, 95)),
        end("queued", "QUEUE_TIMEOUT", 300, request(4, 100)),
        end("ensemble", "", 90, request(5, 10), model="e"),
    )
    e, m = summary(found)
    assert (e["model"], e["requests"], e["batches"], e["queue_p50_us"]) == ("e", 1, 0, None)
    assert m == {
        "model": "m", "version": 1, "requests": 4, "failed": 2, "batches": 2, "rows": 3, "queue_p50_us": 50,
        "queue_p99_us": 65, "compute_p50_us": 40, "reasons": {"full": 1, "idle": 1},
        "errors": {"INTERNAL": 1, "QUEUE_TIMEOUT": 1},
    }  # fmt: skip
    assert "full 50 %, idle 50 %" in text([e, m])
    assert text([]) == ""
