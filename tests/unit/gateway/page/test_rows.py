"""The rows of the event stream: a page that applies them has the state of the server, whichever events it missed."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.gateway.page.feed import KEPT_GONE, SLICE, VersionRows
from shmserve.gateway.page.timeline import Timeline
from shmserve.protocol.rates import MEMORY_STEP
from tests.support.hypothesis_profiles import examples

Document = dict[str, Any]


def model(name: str, version: str = "1", **more: Any) -> Document:
    return {"name": name, "version": version, "state": "READY", "reason": "", **more}


def instance(**more: Any) -> Document:
    return {"name": "m_0", "state": "ready", "pid": 7, "memory_bytes": 10 * MEMORY_STEP, "cpu_seconds": 1.5, **more}


def update(rows: VersionRows, *models: Document, seconds: float = 1.0, names: Iterable[str] | None = None) -> None:
    for _ in rows.update(copy.deepcopy(list(models)), seconds, names):
        pass


def since(rows: VersionRows, number: int) -> tuple[list[Document], list[list[str]]]:
    changed, gone = rows.since(number)
    return json.loads(changed), json.loads(gone)


def test_a_row_omits_empty_values() -> None:
    rows = VersionRows(Timeline())
    counters = {"success": 3, "failed": 0, "reasons": {}, "request_times": {17: 3}}
    update(rows, model("m", default=True, queued=0, counters=counters, instances=[instance(restarts=0)]))
    assert since(rows, 0) == (
        [
            {
                "name": "m",
                "version": "1",
                "state": "READY",
                "default": True,
                "counters": {"success": 3, "request_times": {"17": 3}},
                "instances": [
                    {"name": "m_0", "state": "ready", "pid": 7, "memory_bytes": 10 * MEMORY_STEP, "cpu_seconds": 1.5}
                ],
            }
        ],
        [],
    )


def test_an_idle_process_changes_nothing() -> None:
    rows = VersionRows(Timeline())
    update(rows, model("m", instances=[instance()]))
    update(rows, model("m", instances=[instance(cpu_seconds=2.5, memory_bytes=11 * MEMORY_STEP - 1)]))
    assert since(rows, 1) == ([], [])
    update(rows, model("m", queued=1, instances=[instance(cpu_seconds=3.5)]))
    (row,), _ = since(rows, 2)
    assert row["instances"][0]["cpu_seconds"] == 3.5, "a row that is sent has the current time"


def test_figures_of_language_models_are_of_the_last_interval() -> None:
    """A model that has become idle is sent once more."""
    rows = VersionRows(Timeline())
    for tokens in (0, 50, 50, 50):
        update(rows, model("m", language={"generated_tokens": tokens, "slots": 4}))
    sent = [{row["name"]: row["figures"] for row in since(rows, number)[0]} for number in (0, 2, 3)]
    idle = {"slots": 4, "generated_tokens": 50, "prompt_tokens_per_s": 0, "generated_tokens_per_s": 0}
    assert sent == [{"m": idle}, {"m": idle}, {}]
    update(rows, model("m", language={"generated_tokens": 90, "slots": 4}), seconds=2.0)
    assert since(rows, 4)[0][0]["figures"]["generated_tokens_per_s"] == 20


def test_other_work_runs_between_slices() -> None:
    models = [model(f"m{number}") for number in range(4 * SLICE)]
    assert sum(1 for _ in VersionRows(Timeline()).update(models, 1.0)) == 4


def test_the_number_of_remembered_removals_is_bounded() -> None:
    rows = VersionRows(Timeline())
    update(rows, *[model(f"m{number}") for number in range(KEPT_GONE + 1)])
    update(rows, model("m0"))
    assert (rows.complete_since, len(since(rows, 1)[1])) == (1, KEPT_GONE)
    update(rows)
    assert rows.complete_since == 2, "a viewer with event 1 may have a version that is not listed as removed"
    assert len(since(rows, 2)[1]) == 1


KEYS = st.sampled_from([("a", "1"), ("a", "2"), ("b", "1"), ("c", "")])
MODELS = st.dictionaries(KEYS, st.integers(0, 2), max_size=4)


@given(st.lists(st.tuples(MODELS, st.sets(st.integers(0, 2))), max_size=12), st.booleans())
@settings(max_examples=examples(150))
def test_viewers_catch_up_after_missed_events(
    events: list[tuple[dict[tuple[str, str], int], set[int]]], partial: bool
) -> None:
    """Three viewers; each event reaches only some of them. `partial`: the broker sends only models that changed."""
    known: dict[tuple[str, str], int] = {}
    rows = VersionRows(Timeline())
    seen: list[dict[tuple[str, str], Document]] = [{}, {}, {}]
    numbers = [0, 0, 0]
    for state, reached in events:
        names = {key[0] for key in {*state, *known} if state.get(key) != known.get(key)} if partial else None
        chosen = [(key, queued) for key, queued in sorted(state.items()) if names is None or key[0] in names]
        update(rows, *[model(*key, queued=queued) for key, queued in chosen], names=names)
        known = state
        for viewer in reached:
            changed, gone = since(rows, 0 if numbers[viewer] < rows.complete_since else numbers[viewer])
            if numbers[viewer] < rows.complete_since:
                seen[viewer] = {}
            for key in gone:
                seen[viewer].pop((key[0], key[1]), None)
            for row in changed:
                seen[viewer][row["name"], row.get("version", "")] = row
            numbers[viewer] = rows.number
            assert {key: row.get("queued", 0) for key, row in seen[viewer].items()} == state
