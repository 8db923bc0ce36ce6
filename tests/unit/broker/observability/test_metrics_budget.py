"""How often the metrics page is built: for every query, within a share of the broker's time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace

from shmserve.broker.admin.queries import METRICS_PERIOD_S, METRICS_SHARE, MetricsPage
from shmserve.protocol.messages import Ask


def built(took_s: float, limited: bool = True) -> tuple[SimpleNamespace, Callable[[], bytes]]:
    """A clock on which only building a page takes time, and a query of the page."""
    clock, pages = SimpleNamespace(now=0.0), itertools.count(1)

    def build() -> str:
        clock.now += took_s
        return str(next(pages))

    page = MetricsPage([build], limited, lambda: clock.now)
    return clock, lambda: bytes(page.answer(Ask(1, "metrics", "", 0)))


def test_a_page_is_fresh_until_the_share_is_used_up() -> None:
    clock, ask = built(took_s=0.01)
    few = round(METRICS_SHARE * METRICS_PERIOD_S / 0.01)
    assert [ask() for _ in range(few + 2)] == [f'"{min(n, few)}"'.encode() for n in range(1, few + 3)]
    clock.now = METRICS_PERIOD_S
    assert ask() == f'"{few + 1}"'.encode()


def test_a_page_that_takes_long_is_kept_for_longer() -> None:
    clock, ask = built(took_s=1.0)
    for now in (0.0, 1.0, 19.9):
        clock.now = max(clock.now, now)
        assert ask() == b'"1"'
    clock.now = 1.0 / METRICS_SHARE
    assert ask() == b'"2"'
    _, ask = built(took_s=1.0, limited=False)
    assert [ask() for _ in range(3)] == [b'"1"', b'"2"', b'"3"']
