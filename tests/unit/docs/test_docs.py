"""The pages: links resolve, commands parse, Python compiles, and every page is linked."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.__main__ import MEASURES as GPU_MEASURES
from bench.measures import ALL
from shmserve.broker.config import command_line
from shmserve.clients.cli import parser
from tests import ROOT

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
SHELL = ("sh", "bash", "console")


def blocks(*languages: str) -> Iterator[Any]:
    for page in PAGES:
        for number, match in enumerate(FENCE.finditer(page.read_text()), 1):
            if match[1] in languages:
                yield pytest.param(match[2], id=f"{page.relative_to(ROOT)}-{number}")


def commands() -> Iterator[Any]:
    """The words of each `shmserve ...` line, without variables, pipes and redirections."""
    for block in blocks(*SHELL):
        text = str(block.values[0]).replace("\\\n", " ")
        for line in text.splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                del words[0]
            for end in ("|", "&", ">", ">>", "<", "&&", ";"):
                if end in words:
                    del words[words.index(end) :]
            if words and words[0].rpartition("/")[2] == "shmserve":
                yield pytest.param(words[1:], id=f"{block.id}: {' '.join(words)}")


def targets() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for match in LINK.finditer(FENCE.sub("", page.read_text())):
            if "://" not in match[1]:
                found.append((page.relative_to(ROOT).as_posix(), match[1]))
    return found


@pytest.mark.parametrize("words", list(commands()))
def test_commands_parse(words: list[str]) -> None:
    if words[0] == "serve":  # whose options the broker parses itself
        _, rest = command_line.parser().parse_known_args(words[1:])  # the rest are the files
        assert not [word for word in rest if word.startswith("-")]
    else:
        parser.parser().parse_args(words)


@pytest.mark.parametrize("block", list(blocks("python")))
def test_python_compiles(block: str) -> None:
    ast.parse(block)
    compile(block, "block", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize(("page", "target"), targets())
def test_links_resolve(page: str, target: str) -> None:
    assert ((ROOT / page).parent / target).exists()


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("**/*.md")), ids=lambda page: page.name)
def test_every_page_is_linked(page: Path) -> None:
    name = page.relative_to(ROOT / "docs").as_posix()
    if page.parent.name == "adr" and page.name != "index.md":
        assert f"({page.name})" in page.with_name("index.md").read_text()
        return
    if name == "index.md":
        assert f"(docs/{name})" in (ROOT / "README.md").read_text()
    else:
        assert f"({name})" in (ROOT / "docs" / "index.md").read_text()


def test_make_targets_in_the_pages_exist() -> None:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = {name for page in PAGES for name in re.findall(r"(?:^|`)make ([a-z-]+)\b", page.read_text(), re.MULTILINE)}
    assert used
    assert used <= known


def test_files_that_contributing_names_exist() -> None:
    rows = re.findall(r"^\| (`.*?) \| ", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`([a-z_.]+(?:/[a-z_.]*)+)`", row)]
    assert len(named) > 20
    assert not [name for name in named if not (ROOT / name).exists()]


def test_benchmarks_and_modules_in_the_pages_exist() -> None:
    texts = [page.read_text() for page in PAGES if page.name != "CHANGELOG.md"]
    lines = [line for text in texts for line in text.splitlines() if "make compare" not in line]  # which has its own
    measures = {name for line in lines for name in re.findall(r"--only ([a-z-]+)", line)}
    assert measures
    assert measures <= {*ALL, *GPU_MEASURES}
    modules = {
        name for text in texts for name in re.findall(r"python3? -m ((?:shmserve|bench|tests)[a-z_.]*[a-z_])", text)
    }
    assert {"shmserve.sim", "shmserve.repo.samples"} <= modules
    assert [name for name in sorted(modules) if importlib.util.find_spec(name) is None] == []
