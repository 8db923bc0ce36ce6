"""A pytest plugin that attributes what a test and its fixtures execute to the test, for coverage.py.

Its own contexts do not know tests with `@given`: the first function of theirs that it sees is Hypothesis's.
"""

from __future__ import annotations

from collections.abc import Generator

import coverage
import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    recording = coverage.Coverage.current()
    assert recording is not None
    recording.switch_context(item.nodeid.partition("[")[0])
    try:
        return (yield)
    finally:
        recording.switch_context("")
