"""How Hypothesis chooses examples.

`make test` tries the same examples every time, so that it fails because of a change and not by chance.
SHMSERVE_EXPLORE=N, which `make stress` sets, searches for new bugs with random examples, N times as many.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

TIMES = int(os.environ.get("SHMSERVE_EXPLORE", "0"))


def examples(count: int = 100) -> int:
    """The value for `max_examples`, the only setting that tests use."""
    return count * max(TIMES, 1)


def load_profile() -> None:
    settings.register_profile(
        "explore",
        max_examples=examples(),
        # The time of an example, or of making its data, depends on how busy the machine is.
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
        print_blob=True,
    )
    # With several processes, as in `make test`, the timeout would end a test while it shrinks a failure. Without them,
    # the test finds the same failure, and shrinks it.
    several = "PYTEST_XDIST_WORKER" in os.environ
    settings.register_profile(
        "suite",
        settings.get_profile("explore"),
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate] if several else list(Phase),
    )
    settings.load_profile("explore" if TIMES else "suite")
    if not TIMES:
        # Hypothesis also tries the constants in the modules imported so far, which depend on the tests that the process
        # has run before.
        providers._get_local_constants = Constants
