"""How often the metrics page is built: for every query, within a share of the broker's time."""

from __future__ import annotations

from typing import Any

from shmserve.broker.admin.queries import METRICS_PERIOD_S, METRICS_SHARE, Control
from shmserve.core.core import Core
from shmserve.protocol.messages import Ask


class Built:
    """Building a page takes `took_s` on a clock that otherwise stands still."""

    def __init__(self, took_s: float) -> None:
        self.now = 0.0
        self.pages = 0
        catalog: Any = None
        self.control = Control(Core("test"), catalog, "test", "1", True)
        self.control.clock = lambda: self.now
        self.control.metrics = [self._build]
        self._took_s = took_s

    def _build(self) -> str:
        self.now += self._took_s
        self.pages += 1
        return str(self.pages)

    def ask(self) -> bytes:
        (answer,) = self.control.answer(Ask(1, "metrics", "", 0), 7, {})
        return bytes(answer.body)  # type: ignore[union-attr]


def test_a_page_is_fresh_until_the_share_is_used_up() -> None:
    built = Built(took_s=0.01)
    few = round(METRICS_SHARE * METRICS_PERIOD_S / 0.01)
    assert [built.ask() for _ in range(few + 2)] == [f'"{min(n, few)}"'.encode() for n in range(1, few + 3)]
    built.now = METRICS_PERIOD_S
    assert built.ask() == f'"{few + 1}"'.encode()


def test_a_page_that_takes_long_is_kept_for_longer() -> None:
    built = Built(took_s=1.0)
    for now in (0.0, 1.0, 19.9):
        built.now = max(built.now, now)
        assert built.ask() == b'"1"'
    built.now = 1.0 / METRICS_SHARE
    assert built.ask() == b'"2"'
    built.control.metrics_budget = False
    assert [built.ask() for _ in range(3)] == [b'"3"', b'"4"', b'"5"']
