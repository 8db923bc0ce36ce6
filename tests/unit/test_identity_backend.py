"""The backend `identity` as a stand-in for slow models."""

from __future__ import annotations

from pathlib import Path

import pytest

from shmserve.errors import InvalidRequest
from shmserve.repo.load import parse
from shmserve.workers.backends import Context
from shmserve.workers.backends.identity import Identity

CONFIG = """
name: "slow" backend: "identity"
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
parameters [ { key: "creation_delay_sec" value { string_value: "DELAY" } } ]
"""


def load(delay: str) -> None:
    context = Context("slow", 1, "slow_0_0", Path(), Path(), {})
    Identity(context).load(parse(CONFIG.replace("DELAY", delay)))


def test_loading_takes_as_long_as_the_configuration_says(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("select.select", lambda *given: waited.append(given[3]))
    load("2.5")
    assert waited == [2.5]


def test_a_delay_that_is_no_number_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="creation_delay_sec"):
        load("long")
