"""The generated parts of the pages are up to date."""

from __future__ import annotations

import pytest

from shmserve.core import states
from tests.support.docs.doc_tables import DOCS, PARTS, STATES, DocPart, with_part


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_generated_parts_of_pages_are_current(part: DocPart) -> None:
    page = (DOCS / part.page).read_text()
    assert with_part(page, part) == page, "write it with: make docs"


def test_every_kind_of_state_has_a_diagram() -> None:
    assert set(STATES) == set(states.TABLES)
