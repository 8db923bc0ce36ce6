"""Requests in columns have the same effects as the same requests one by one (tests/support/core/twin.py).

After each step all messages to clients, the batches of workers, the statistics and the clocks of both twins are equal.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.core.limits import Limits
from shmserve.core.policy import TensorSpec
from shmserve.protocol.messages import Columns, Infer, InferBatch, Options, Tensor, TensorForm, Wanted
from tests.support.core.twin import MODELS, TIGHT, Twin, X
from tests.support.hypothesis_profiles import examples


class Item(NamedTuple):
    rows: int
    fault: str
    """new, zero or same: fault of the number; short, long or empty: fault of the bytes."""
    value: int


ITEMS = st.builds(
    Item,
    st.sampled_from([1, 1, 1, 2, 3, 4, 9, 0]),
    st.sampled_from([*[""] * 14, "zero", "same", "old", "short", "long", "empty"]),
    st.integers(0, 3),
)
_ODD_FORMS = ("name", "dtype", "rank", "negative", "twice", "none", "wide", "strings")


class Group(NamedTuple):
    client: int
    model: int
    version: int
    width: int
    optional: bool
    odd: str
    items: list[Item]
    timeout_ms: int
    alone: str
    """An additional request that cannot be in columns."""


GROUPS = st.builds(
    Group,
    st.sampled_from([0, 0, 0, 1, 2, 3, 4]),
    st.sampled_from([*[0] * 6, 1, 1, 1, 2, 2, -1]),
    st.sampled_from([*[0] * 10, 1, 9]),
    st.sampled_from([1, 1, 1, 2, 0]),
    st.booleans(),
    st.sampled_from([*[""] * 24, *_ODD_FORMS]),
    st.lists(ITEMS, min_size=1, max_size=9),
    st.sampled_from([0, 0, 0, 1, 5]),
    st.sampled_from(["", "", "plain", "wanted", "options"]),
)
STEPS = st.one_of(
    st.tuples(st.just("send"), st.lists(GROUPS, min_size=1, max_size=3)),
    st.tuples(st.just("send"), st.lists(GROUPS, min_size=1, max_size=3)),
    st.tuples(st.just("finish"), st.integers(0, 5), st.booleans(), st.integers(0, 3), st.booleans(), st.just(0)),
    st.tuples(st.just("finish"), st.integers(0, 5), st.just(False), st.just(0), st.just(True), st.integers(0, 2)),
    st.tuples(st.just("cancel"), st.integers(0, 4), st.integers(0, 20)),
    st.tuples(st.just("give_back"), st.integers(0, 4)),
    st.tuples(st.just("wait"), st.sampled_from([0, 1, 5, 40])),
    st.tuples(st.just("slow"), st.integers(0, 5), st.booleans()),
    st.tuples(st.sampled_from(["crash", "gone"]), st.integers(0, 5)),
    st.tuples(st.just("deploy"), st.integers(0, 3), st.integers(0, 2)),
    st.tuples(st.just("drain")),
)


class Writer:
    """Makes the messages of a group. `numbers` counts the requests of all clients."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.numbers = 0

    def messages(self, group: Group) -> list[Any]:
        name = "nobody" if group.model < 0 else self.names[group.model % len(self.names)]
        inputs = MODELS[name][0].inputs if name in MODELS else (X,)
        specs = [spec for spec in inputs if group.optional or not spec.optional]
        forms = [self._form(spec, group) for spec in specs]
        if group.odd == "twice":
            forms *= 2
        elif group.odd == "none":
            forms = []
        found: list[Any] = []
        if group.alone:
            found.append(self._alone(name, group))
        first = self.numbers
        numbers, rows, data = [], [], []
        for item in group.items:
            self.numbers += 1
            number = {"zero": 0, "same": max(self.numbers - 1, 1), "old": max(first - 2, 1)}.get(
                item.fault, self.numbers
            )
            numbers.append(number)
            rows.append(item.rows)
            data.append(tuple(self._bytes(form, item) for form in forms))
        columns = Columns(tuple(forms), tuple(numbers), tuple(rows), tuple(data))
        return [*found, InferBatch(name, group.version, columns, group.timeout_ms * 1000)]

    def _alone(self, name: str, group: Group) -> Infer:
        self.numbers += 1
        tensor = Tensor("x", "FP32", (1, 1), bytes(4))
        outputs = (Wanted("y"),) if group.alone == "wanted" else None
        options = Options(priority=1) if group.alone == "options" else None
        return Infer(self.numbers, name, 0, (tensor,), outputs, group.timeout_ms * 1000, options)

    def _form(self, spec: TensorSpec, group: Group) -> TensorForm:
        dims: tuple[int, ...] = tuple(group.width if dim < 0 else dim for dim in spec.dims)
        name, dtype = spec.name, spec.dtype
        if group.odd == "name":
            name = "unknown"
        elif group.odd == "dtype":
            dtype = "INT64"
        elif group.odd == "strings":
            dtype = "BYTES"
        elif group.odd == "rank":
            dims = (*dims, 2)
        elif group.odd == "negative":
            dims = (-1,)
        elif group.odd == "wide":
            dims = (2**62, 4)
        return TensorForm(name, dtype, dims)

    def _bytes(self, form: TensorForm, item: Item) -> bytes:
        count = item.rows
        for dim in form.dims:
            count *= max(dim, 0)
        size = min(4 * count, 400)
        size = {"short": max(size - 4, 0), "long": size + 4, "empty": 0}.get(item.fault, size)
        if form.dtype == "BYTES":
            return (b"\1\0\0\0a" * size)[: 5 * count + {"short": -5, "long": 5}.get(item.fault, 0)][:400]
        return bytes([item.value]) * size


class Pair:
    def __init__(self, names: list[str], limits: Limits) -> None:
        if "chain" in names:
            names = ["chain", *[name for name in names if name != "chain"]]
            order = ["plain", "pair", *[name for name in names if name not in ("plain", "pair")]]
        else:
            order = names
        self.batched, self.single = Twin(order, limits, True), Twin(order, limits, False)
        self.writer = Writer(names)

    def step(self, step: tuple[Any, ...]) -> None:
        kind, *arguments = step
        if kind == "send":
            arguments = [[(group.client, self.writer.messages(group)) for group in arguments[0]]]
        for twin in (self.batched, self.single):
            getattr(twin, kind)(*arguments)
        self.compare()

    def compare(self) -> None:
        found, expected = self.batched.seen(), self.single.seen()
        for part, value in expected.items():
            assert found[part] == value, part

    def end(self) -> None:
        for twin in (self.batched, self.single):
            twin.end()
        self.compare()


@pytest.mark.hypothesis
@settings(max_examples=examples(300, quick=100))
@given(
    st.lists(st.sampled_from(sorted(MODELS)), min_size=1, max_size=3, unique=True),
    st.sampled_from(TIGHT),
    st.lists(STEPS, min_size=8, max_size=25),
)
def test_requests_in_columns_have_the_same_outcomes_as_single_requests(
    names: list[str], limits: Limits, steps: list[tuple[Any, ...]]
) -> None:
    pair = Pair(names, limits)
    for step in steps:
        pair.step(step)
    pair.end()
