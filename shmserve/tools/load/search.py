"""The search for the highest load that keeps a latency limit: powers of two, then bisection.

Stateless: the next load follows from the loads tried so far.
"""

from __future__ import annotations

from collections.abc import Mapping

from shmserve.tools.load.plan import Limit


def next_load(tried: Mapping[float, bool], limit: Limit, whole: bool) -> float | None:
    """The next load to try; None at the end. `tried`: load -> whether it kept the limit. `whole`: only integers.

    If a load fails, all higher loads count as failed, whatever their results: noise must not hide the limit.
    """
    failed = min((load for load, kept in tried.items() if not kept), default=None)
    kept = max((load for load, ok in tried.items() if ok and (failed is None or load < failed)), default=None)
    if kept is None:
        return limit.low if failed is None else None
    if failed is None:
        return None if kept >= limit.high else min(limit.high, kept * 2)
    if failed - kept <= max(1.0 if whole else 0.0, kept * limit.resolution):
        return None
    middle = (kept + failed) / 2
    return float(round(middle)) if whole else middle


def best(tried: Mapping[float, bool]) -> float | None:
    """The highest load that kept the limit, below all that did not."""
    failed = min((load for load, kept in tried.items() if not kept), default=float("inf"))
    return max((load for load, kept in tried.items() if kept and load < failed), default=None)
