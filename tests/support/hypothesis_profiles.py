"""How Hypothesis chooses examples.

`make test` tries the same few examples every time, so that it fails because of a change and not by chance.
SHMSERVE_EXPLORE=N searches for new bugs with random examples: as many as the tests ask for with 1, which
`make test-long` sets, and N times as many with N. The pytest plugin in this module prints the commands that repeat the
failures of a search.
"""

from __future__ import annotations

import os
import shlex

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

TIMES = int(os.environ.get("SHMSERVE_EXPLORE", "0"))


def examples(count: int = 100, quick: int | None = None) -> int:
    """The value for `max_examples`, the only setting that tests use. `quick`: the number in `make test`, for tests with
    slow examples."""
    return count * TIMES if TIMES else quick or count


def load_profile() -> None:
    # With several processes, the timeout would end a test while it shrinks a failure. Without them, the test finds the
    # same failure, and shrinks it.
    several = "PYTEST_XDIST_WORKER" in os.environ
    settings.register_profile(
        "explore",
        max_examples=examples(),
        phases=[Phase.explicit, Phase.generate] if several else list(Phase),
        # The time of an example, or of making its data, depends on how busy the machine is.
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
        print_blob=True,
    )
    settings.register_profile("suite", settings.get_profile("explore"), derandomize=True, database=None)
    settings.load_profile("explore" if TIMES else "suite")
    # Hypothesis also tries the constants in the modules imported so far, which depend on the tests that the process has
    # run before. Without them, a seed gives the same examples when a test is repeated alone.
    providers._get_local_constants = Constants  # noqa: SLF001 - Hypothesis has no setting for it


load_profile()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The commands that repeat the failures of a search. A test prints its shortest failing example itself."""
    seed = config.getoption("--hypothesis-seed", None)
    failed = [report for report in terminalreporter.getreports("failed") if "hypothesis" in report.keywords]
    if not TIMES or seed is None or not failed:
        return
    terminalreporter.section(f"hypothesis, seed {seed}")
    for report in failed:
        command = ["python", "-m", "pytest", f"--hypothesis-seed={seed}", report.nodeid]
        terminalreporter.write_line(f"SHMSERVE_EXPLORE={TIMES} {shlex.join(command)}")
    terminalreporter.write_line("Make a scenario (tests/scenarios) or another plain test of each example above.")
