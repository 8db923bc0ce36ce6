"""The known faults of `python -m tests.faults` fit the source: a rename must not disable one."""

from __future__ import annotations

import pytest

from tests import ROOT, faults


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.name)
def test_the_text_that_a_fault_replaces_occurs_once(fault: faults.Fault) -> None:
    assert (ROOT / fault.file).read_text().count(fault.old) == 1
    assert fault.new != fault.old
    assert any(fault.file.startswith(f"{package}/") for package in faults.WHERE)
