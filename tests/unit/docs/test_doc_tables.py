"""The generated parts of the pages are up to date."""

from __future__ import annotations

import pytest

from tests.support.docs.doc_tables import DOCS, PARTS, DocPart, with_part


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_generated_parts_of_pages_are_current(part: DocPart) -> None:
    page = (DOCS / part.page).read_text()
    assert with_part(page, part) == page, "write it with: make docs"
