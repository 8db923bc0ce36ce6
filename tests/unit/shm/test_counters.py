"""Metrics of Python models: workers write them to pages, the broker reads and sums them."""

from __future__ import annotations

import gc
import os
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.broker.observability.model_metrics import PAGES, ModelCounters
from shmserve.shm.counters import COUNTER, GAUGE, HISTOGRAM, PAGE_BYTES, Subject, Writer, read
from shmserve.shm.extents import memfd
from shmserve.workers.backends.python import pb_utils
from tests.support.cases import cases

Family = pb_utils.MetricFamily


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker with one page, which has no metrics yet."""
    page, package = bytearray(PAGE_BYTES), "shmserve.workers.backends.python"
    host = SimpleNamespace(page=page, count=Writer(memoryview(page)).add)
    monkeypatch.setattr(f"{package}.pb_requests._Current.host", host)
    for name, value in {"metrics": {}, "families": {}, "kept": False}.items():
        monkeypatch.setattr(f"{package}.pb_metrics._Registry.{name}", value)
    return host


def counted(host: Any) -> dict[tuple[str, Any], list[float]]:
    return {(subject.name, subject.labels): numbers[1:] for subject, numbers in read(memoryview(host.page))}


def test_counter_gauge_and_histogram(host: Any) -> None:
    counter = Family("c", "counts", Family.COUNTER).Metric(labels={"b": "2", "a": 1})
    same = Family("c", "counts", Family.COUNTER).Metric(labels={"a": "1", "b": "2"})
    gauge = Family("g", "", Family.GAUGE).Metric()
    histogram = Family("h", "", Family.HISTOGRAM).Metric(buckets=[1, 2.5])
    counter.increment(2)
    same.increment(0.5)
    gauge.increment(5)
    gauge.set(-1)
    gauge.increment(-2)
    for value in (0, 1, 2, 3, 4):
        histogram.observe(value)
    assert (counter.value(), same.value(), gauge.value()) == (2.5, 2.5, -3)
    found = counted(host)
    assert (found["c", (("a", "1"), ("b", "2"))], found["g", ()][0]) == ([2.5], -3)
    assert found["g", ()][1] > 0
    assert found["h", ()] == [10, 2, 1, 2]


def test_a_metric_that_is_dropped_leaves_the_page(host: Any) -> None:
    family = Family("c", "", Family.COUNTER)
    one, two = family.Metric(), family.Metric()
    one.increment(1)
    del one
    gc.collect()
    assert counted(host) == {("c", ()): [1]}
    del two
    gc.collect()
    assert not counted(host)
    three = family.Metric()
    three.increment(4)
    assert counted(host) == {("c", ()): [4]}


@cases(
    (lambda: Family("1c", "", Family.COUNTER), "'1c' must consist of letters"),
    (lambda: Family("nv_x", "", Family.COUNTER), "are the server's"),
    (lambda: Family("c", "", 7), "unknown kind 7"),
    (lambda: (Family("c", "", Family.COUNTER), Family("c", "", Family.GAUGE)), "is already a counter"),
    (lambda: Family("c", "", Family.COUNTER).Metric({"a-b": 1}), "cannot have a label 'a-b'"),
    (lambda: Family("h", "", Family.HISTOGRAM).Metric({"le": 1}, [1]), "cannot have a label 'le'"),
    (lambda: Family("h", "", Family.HISTOGRAM).Metric(), "needs buckets"),
    (lambda: Family("h", "", Family.HISTOGRAM).Metric(buckets=[2, 1]), "must increase"),
    (lambda: Family("c", "", Family.COUNTER).Metric(buckets=[1]), "cannot have buckets"),
    (lambda: Family("c", "", Family.COUNTER).Metric().increment(-1), "cannot be incremented by -1"),
    (lambda: Family("c", "", Family.COUNTER).Metric().set(1), "only a gauge can"),
    (lambda: Family("g", "", Family.GAUGE).Metric().observe(1), "only a histogram can"),
    (lambda: Family("h", "", Family.HISTOGRAM).Metric(buckets=[1]).increment(1), "cannot be incremented"),
    (lambda: Family("h", "", Family.HISTOGRAM).Metric(buckets=[1]).value(), "has no single value"),
)
def test_invalid_metrics_are_refused(make: Any, text: str, host: Any) -> None:
    with pytest.raises(pb_utils.TritonModelException, match=text):
        make()


class Counting:
    """A worker's page, as the broker receives it."""

    def __init__(self, tallies: ModelCounters, peer: int, model: str = "m") -> None:
        self.extent = memfd.create(PAGE_BYTES, seal_future_write=True)
        self.writer = Writer(self.extent.memory)
        tallies.add(peer, model, os.dup(self.extent.fd), PAGE_BYTES)
        self.extent.close()

    def count(self, subject: Subject, *numbers: float) -> None:
        place = self.writer.add(subject)
        assert place is not None
        place[0] = 1
        for index, number in enumerate(numbers, 1):
            place[index] = number


def test_pages_of_all_workers_are_added_up() -> None:
    served = {"m"}
    tallies = ModelCounters(served.__contains__)
    one, two = Counting(tallies, 1), Counting(tallies, 2)
    counter = Subject("c", "what\n\\it is", COUNTER, (("x", 'a"b'),))
    other = Subject("c", counter.help, COUNTER)
    moved, put = Subject("moved", "", GAUGE), Subject("put", "", GAUGE)
    histogram = Subject("h", "", HISTOGRAM, (("k", "v"),), (0.5, 1.0))
    one.count(counter, 1)
    two.count(counter, 2.5)
    two.count(other, 1e300)
    for page, value, when in ((one, 3, 20), (two, 4, 10)):
        page.count(moved, value, 0)
        page.count(put, value, when)
        page.count(histogram, value, 1, 2, 3)
    two.count(Subject("c", "", GAUGE), 9, 9)
    two.count(Subject("nv_inference_count", "", COUNTER), 9)
    expected = (
        '# HELP c what\\\\n\\\\it is\n# TYPE c counter\nc 1e+300\nc{x="a\\"b"} 3.5\n'
        '# HELP h \n# TYPE h histogram\nh_bucket{k="v",le="0.5"} 2\nh_bucket{k="v",le="1"} 6\n'
        'h_bucket{k="v",le="+Inf"} 12\nh_sum{k="v"} 7\nh_count{k="v"} 12\n'
        "# HELP moved \n# TYPE moved gauge\nmoved 7\n"
        "# HELP put \n# TYPE put gauge\nput 3\n"
    )
    assert tallies.text() == expected
    tallies.worker_exited(1)  # its gauges are removed; its counts remain
    assert tallies.text() == expected.replace("moved 7", "moved 4").replace("put 3", "put 4")
    tallies.worker_exited(2)
    assert "# TYPE h histogram" in tallies.text()
    assert "gauge" not in tallies.text()
    served.clear()
    assert tallies.text() == ""


def test_pages_are_limited() -> None:
    tallies = ModelCounters(lambda _: True)
    for number in range(PAGES + 2):
        Counting(tallies, 1).count(Subject(f"c{number}", "", COUNTER), 1)
    assert tallies.text().count("# TYPE") == PAGES
    tallies.close()
    assert tallies.text().count("# TYPE") == PAGES
    writer = Writer(memoryview(bytearray(1024)))
    made = 0
    while writer.add(Subject(f"c{made}", "", COUNTER)) is not None:
        made += 1
    assert 5 < made < 30


@given(st.binary(max_size=200), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_any_bytes_in_a_page(noise: bytes, used: int, size: int, length: int) -> None:
    page = memoryview(bytearray(4096))
    page[16 : 16 + len(noise)] = noise
    page[:8] = used.to_bytes(8, "little")
    page[8:12] = size.to_bytes(4, "little")
    page[12:16] = length.to_bytes(4, "little")
    try:
        for subject, numbers in read(page):
            assert len(numbers) == subject.count
    except ValueError:
        pass


def test_counts_of_language_models_by_version() -> None:
    """Of two instances, one of which ends, without the model's other metrics and labels of another model."""
    tallies = ModelCounters(lambda model: model == "m")
    for peer, model in ((1, "m"), (2, "m"), (3, "unloaded")):
        page, labels = Counting(tallies, peer, model), (("model", "another"), ("version", "2"))
        page.count(Subject("llm_generation_tokens_total", "", COUNTER, labels), 5)
        page.count(Subject("llm_slots", "", GAUGE, (*labels, ("model_instance", str(peer)))), 4, 1)
        page.count(Subject("mine", "", GAUGE, labels), 1, 1)
    assert tallies.language()["m", "2"] == {"generated_tokens": 10, "slots": 8}
    tallies.worker_exited(2)
    tallies.worker_exited(3)
    assert tallies.language() == {("m", "2"): {"generated_tokens": 10, "slots": 4}}
    tallies.close()
