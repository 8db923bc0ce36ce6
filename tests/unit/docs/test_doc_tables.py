"""The generated parts of the pages are up to date."""

from __future__ import annotations

import pytest

from shmserve.core import states
from tests.support.docs.doc_tables import DOCS, PARTS, STATES, DocPart, size, with_part


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_generated_parts_of_pages_are_current(part: DocPart) -> None:
    page = (DOCS / part.page).read_text()
    assert with_part(page, part) == page, "write it with: make docs"


def test_a_page_without_the_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="has 0 times the markers"):
        with_part("text", PARTS[0])


def test_every_kind_of_state_has_a_diagram() -> None:
    assert set(STATES) == set(states.TABLES)


def test_units_of_sizes() -> None:
    assert size("queue_bytes", 1 << 30) == "1 GiB"
    assert size("queue_bytes", 1000) == "1000"
    assert size("requests", 1 << 10) == "1024"
