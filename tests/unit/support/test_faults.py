"""The faults of `make mutation` fit the source: a rename must not disable one."""

from __future__ import annotations

from tests import ROOT
from tests.mutation.covering import process_tests
from tests.mutation.faults import FAULTS


def test_the_text_that_a_fault_replaces_occurs_once() -> None:
    for fault in FAULTS:
        assert (ROOT / fault.file).read_text().count(fault.old) == 1, fault.name
        assert fault.new != fault.old
        assert process_tests(fault.file)


def test_names_of_faults_occur_once() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
