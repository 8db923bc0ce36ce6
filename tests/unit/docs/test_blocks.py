"""Every fenced block of the documentation is run, read, or declared with a reason."""

from __future__ import annotations

import configparser
import json
import re
import sys
from collections.abc import Callable

import yaml

from shmserve.repo.load import parse
from tests import ROOT
from tests.support.docs.page_blocks import NEEDS, NOT_RUN, RUN, TESTED, reason_not_to_run
from tests.support.docs.page_runner import Block, blocks_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).as_posix().removesuffix(".md"): path for path in sorted(DOCS.glob("**/*.md"))}
READERS: dict[str, Callable[[str], object]] = {
    "": parse,
    "ini": lambda text: configparser.ConfigParser(strict=False).read_string(text),
    "json": json.loads,
    "pbtxt": parse,
    "toml": tomllib.loads,
    "yaml": yaml.safe_load,
}
"""Blocks of these languages are data; those without a language are configurations of models unless declared."""
FIGURES = ("mermaid",)
FENCE = "```"


def blocks(page: str) -> list[Block]:
    return blocks_of(PAGES[page].read_text())


def is_run(page: str, block: Block) -> bool:
    return page in RUN and (bool(block.file) or block.language in ("sh", "python", "text"))


def problem_of(page: str, block: Block) -> str:
    """Why a block is not covered, or ""."""
    if is_run(page, block) or (page, block.language) in TESTED or reason_not_to_run(page, block.text):
        return ""
    if block.language in FIGURES:
        return ""
    reader = READERS.get(block.language)
    if reader is None:
        return "it is not run"
    try:
        reader(block.text)
    except ValueError as error:
        return f"it is not valid: {error}"
    except Exception as error:  # of the parsers
        return f"it cannot be read: {error}"
    return ""


def test_every_block_is_covered() -> None:
    problems = []
    for page, path in PAGES.items():
        fences = sum(line.startswith(FENCE) for line in path.read_text().splitlines())
        assert fences == 2 * len(blocks(page)), f"{page} has a fence that tests do not see"
        for block in blocks(page):
            if problem := problem_of(page, block):
                problems.append(f"{page}: {block.text.splitlines()[0]!r}: {problem}")
    assert problems == [], (
        "add the page to RUN of tests/support/docs/page_blocks.py, or the blocks to one of its tables"
    )


def test_the_tables_have_no_stale_entries() -> None:
    for page, words in NOT_RUN:
        assert any(block.text.startswith(words) for block in blocks(page)), (page, words)
    for page, language in TESTED:
        assert any(block.language == language for block in blocks(page)), (page, language)
        assert page not in RUN
    assert RUN.keys() <= PAGES.keys()
    assert NEEDS.keys() <= RUN.keys()
    assert all(NOT_RUN.values())
    named = {path for reason in NOT_RUN.values() for path in re.findall(r"\btests/[\w./]*\w", reason)}
    assert [path for path in sorted({*named, *TESTED.values()}) if not (ROOT / path).exists()] == []


def test_the_tests_of_the_tables_read_their_pages() -> None:
    for (page, _), module in TESTED.items():
        assert f'"{page}"' in (ROOT / module).read_text(), (module, page)
