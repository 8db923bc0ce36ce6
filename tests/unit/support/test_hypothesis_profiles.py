"""`make test` relies on this: the examples of a test depend on that test alone."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.hypothesis_profiles import TIMES, examples


def drawn() -> list[tuple[int, str]]:
    found = []

    @settings(max_examples=examples(300))
    @given(st.integers(), st.text())
    def test(number: int, text: str) -> None:
        found.append((number, text))

    test()
    return found


@pytest.mark.skipif(TIMES > 0, reason="SHMSERVE_EXPLORE asks for random examples")
def test_examples_do_not_depend_on_the_modules_imported_so_far(tmp_path: Path) -> None:
    before = drawn()
    path = tmp_path / "of_constants.py"
    path.write_text("\n".join(f"N{number} = {number}, 'text {number}'" for number in range(10**6, 10**6 + 200)))
    spec = spec_from_file_location("of_constants", path)
    assert spec is not None
    sys.modules["of_constants"] = module_from_spec(spec)
    try:
        assert drawn() == before
    finally:
        del sys.modules["of_constants"]


def test_a_test_that_sets_the_number_of_examples_keeps_the_profile() -> None:
    profile = settings()
    own = settings(max_examples=examples(7))
    assert own.max_examples == 7 * max(TIMES, 1)
    assert own.derandomize == profile.derandomize == (not TIMES)
    assert own.deadline is None
    assert (own.database is None) == (not TIMES)
