"""`bench.published`: ratios, the table and the chart, and that the forms of a step of the text pipeline agree."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest

from bench.published import __main__ as published
from bench.published import texts
from bench.published.__main__ import EXPERIMENTS, Claim, results_of

CLAIMS = (Claim("faster", "f", "new", "old", 2.0, "of the machine"), Claim("other", "o", "old", "new", None, "unknown"))


def test_the_table_and_the_chart() -> None:
    results = results_of(CLAIMS, {"new": 30.0, "old": 20.0})
    assert published.markdown(results).splitlines()[2:] == [
        "| faster | 2.00 | 1.50 | of the machine |",
        "| other | - | 0.67 | unknown |",
    ]
    svg = ElementTree.fromstring(published.chart(results, "a machine"))
    assert [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")] == [
        "ratio measured here", "f", "1.50", "o", "0.67", "ratio claimed", "f", "2.00", "o", "-", "a machine",
    ]  # fmt: skip


def test_names_in_the_chart_are_unique() -> None:
    names = [claim.short for _, claims in EXPERIMENTS.values() for claim in claims]
    assert len(names) == len(set(names)) == 10


def test_the_forms_of_a_step_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # no threads are left behind
    pytest.importorskip("tokenizers")
    rows = [text.decode() for (text,) in texts.some_texts()]
    rows[0] = "W7 unknown " + "w3 " * texts.LENGTH
    fast, loop = texts.tokens_fast([row.lower() for row in rows]), texts.tokens_loop(rows)
    assert [array.tolist() for array in fast] == [array.tolist() for array in loop]
    vectors = np.random.default_rng(0).random((5, 64), np.float32)
    assert texts.labels_numpy(vectors).tolist() == texts.labels_loop(vectors).tolist()


def test_the_phases_of_called_models_are_means() -> None:
    def document(count: int, ns: int) -> dict[str, object]:
        stats = {name: {"count": count, "ns": ns} for name in published.PHASES}
        return {"model_stats": [{"name": "a", "inference_stats": stats}]}

    (line,) = published.phases(document(1, 5_000_000), document(3, 9_000_000))
    assert line.startswith("a: queue 2.000 ms, compute_input 2.000 ms")
    assert published.phases(document(3, 1), document(3, 1)) == []
