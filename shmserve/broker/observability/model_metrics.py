"""Metrics that models define. Workers write them to pages of shared memory, which are read when metrics are requested.

Invariant: each name and set of labels has one sample. Counters and histograms are sums over instances, including exited
processes as long as their model is served. For gauges that are set, the latest value counts; other gauges are sums.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from msgspec import Struct

from shmserve.broker.observability.logs import printable
from shmserve.broker.observability.metric_definitions import FAMILIES, RESERVED, labels
from shmserve.llm import figures
from shmserve.shm.counters import GAUGE, HISTOGRAM, Subject, read
from shmserve.shm.extents import memfd

log = logging.getLogger("shmserve")

PAGES = 16
"""Maximum number of pages per worker."""
_OURS = frozenset([family.name for family in FAMILIES]) | frozenset(RESERVED)
_Key = tuple[str, tuple[tuple[str, str], ...], str, tuple[float, ...]]


class _Worker(Struct):
    model: str
    pages: list[memfd.MemfdExtent] = []


class _Sample(Struct):
    subject: Subject
    numbers: list[float]


class ModelCounters:
    """`served(model)`: whether the model has running instances."""

    def __init__(self, served: Callable[[str], bool]) -> None:
        self._served = served
        self._workers: dict[int, _Worker] = {}
        self._ended: dict[str, dict[_Key, _Sample]] = {}
        """Model -> samples of its workers that have exited."""
        self._refused: set[str] = set()

    def add(self, peer: int, model: str, descriptor: int, size: int) -> None:
        """Adds a page. Takes ownership of its descriptor."""
        extent = memfd.attach(descriptor, size, False)
        worker = self._workers.setdefault(peer, _Worker(model))
        if len(worker.pages) < PAGES:
            worker.pages.append(extent)
        else:
            extent.close()

    def worker_exited(self, peer: int) -> None:
        worker = self._workers.pop(peer, None)
        if worker is None:
            return
        kept = self._ended.setdefault(worker.model, {})
        _merge(kept, (sample for sample in self._samples(worker) if sample.subject.kind != GAUGE))
        for page in worker.pages:
            page.close()

    def close(self) -> None:
        for peer in list(self._workers):
            self.worker_exited(peer)

    def text(self) -> str:
        """All samples in Prometheus format, grouped by family."""
        for model in [model for model in self._ended if not self._served(model)]:
            del self._ended[model]
        samples: dict[_Key, _Sample] = {}
        for ended in self._ended.values():
            _merge(samples, ended.values())
        for worker in self._workers.values():
            _merge(samples, self._samples(worker))
        families: dict[str, list[_Sample]] = {}
        for _, sample in sorted(samples.items()):
            family = families.setdefault(sample.subject.name, [])
            if family and family[0].subject.kind != sample.subject.kind:
                self._refuse(sample.subject, f"another model has a {family[0].subject.kind} of this name")
            else:
                family.append(sample)
        return "".join(line for family in families.values() for line in _lines(family))

    def language(self) -> dict[tuple[str, str], dict[str, Any]]:
        """What the engines of language models have counted (`llm.figures`), by model and version."""
        models: dict[str, dict[_Key, _Sample]] = {}
        for model, ended in self._ended.items():
            if self._served(model):
                _merge(models.setdefault(model, {}), ended.values())
        for worker in self._workers.values():
            _merge(models.setdefault(worker.model, {}), self._samples(worker, figures.PREFIX))
        versions: dict[tuple[str, str], list[figures.Sample]] = {}
        for model, merged in models.items():
            for subject, numbers in ((sample.subject, sample.numbers) for sample in merged.values()):
                by_name = dict(subject.labels)
                values = numbers[1:] if subject.kind == HISTOGRAM else numbers[1:2]
                versions.setdefault((model, by_name.get("version", "")), []).append(
                    (subject.name, by_name, subject.edges, values)
                )
        return {key: counts for key, samples in versions.items() if (counts := figures.counts_of(samples))}

    def _samples(self, worker: _Worker, prefix: str = "") -> Iterator[_Sample]:
        for page in worker.pages:
            try:
                for subject, numbers in read(page.memory, prefix):
                    if subject.name in _OURS:
                        self._refuse(subject, "the server has a metric of this name")
                    else:
                        yield _Sample(subject, numbers)
            except ValueError as error:
                log.error("model '%s' corrupted the shared memory of its metrics: %s", worker.model, error)

    def _refuse(self, subject: Subject, why: str) -> None:
        if subject.name not in self._refused:
            self._refused.add(subject.name)
            log.warning("omitting metric '%s' of a model: %s", printable(subject.name), why)


def _merge(into: dict[_Key, _Sample], samples: Iterable[_Sample]) -> None:
    for sample in samples:
        subject, numbers = sample.subject, sample.numbers
        key = (subject.name, subject.labels, subject.kind, subject.edges)
        have = into.get(key)
        if have is None:
            into[key] = _Sample(subject, list(numbers))
        elif subject.kind == GAUGE and (numbers[2] or have.numbers[2]):
            if numbers[2] > have.numbers[2]:
                have.numbers = list(numbers)
        else:
            have.numbers = [a + b for a, b in zip(have.numbers, numbers, strict=True)]


def _lines(family: list[_Sample]) -> Iterator[str]:
    name, kind = family[0].subject.name, family[0].subject.kind
    text = printable(family[0].subject.help).replace("\\", "\\\\")
    yield f"# HELP {name} {text}\n# TYPE {name} {kind}\n"
    for sample in family:
        pairs = sample.subject.labels
        named = labels(tuple(key for key, _ in pairs), tuple(value for _, value in pairs))
        braces = f"{{{named}}}" if named else ""
        if kind != HISTOGRAM:
            yield f"{name}{braces} {_number(sample.numbers[1])}\n"
            continue
        before = f"{named}," if named else ""
        _, total, *counts = sample.numbers
        below = 0.0
        for edge, count in zip((*sample.subject.edges, math.inf), counts, strict=True):
            below += count
            yield f'{name}_bucket{{{before}le="{_number(edge)}"}} {_number(below)}\n'
        yield f"{name}_sum{braces} {_number(total)}\n{name}_count{braces} {_number(below)}\n"


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
