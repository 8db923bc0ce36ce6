"""The pages: links resolve, commands parse, Python compiles, and every page is linked."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator

from bench.gpu.__main__ import MEASURES as GPU_MEASURES
from bench.measures import ALL
from shmserve.broker.config import command_line
from shmserve.clients.cli import parser
from tests import ROOT
from tests.support.docs.page_runner import blocks_of

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCKS = [(page.relative_to(ROOT).as_posix(), block) for page in PAGES for block in blocks_of(page.read_text())]
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")


def commands() -> Iterator[tuple[str, list[str]]]:
    """The page and the words of each `shmserve ...` line, without variables, pipes and redirections."""
    for page, block in BLOCKS:
        for line in block.lines if block.language in ("sh", "bash", "console") else ():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                del words[0]
            for end in ("|", "&", ">", ">>", "<", "&&", ";"):
                if end in words:
                    del words[words.index(end) :]
            if words and words[0].rpartition("/")[2] == "shmserve":
                yield page, words[1:]


def parses(words: list[str]) -> bool:
    try:
        if words[0] in ("serve", "tritonserver"):  # whose options the broker parses itself
            _, rest = command_line.parser().parse_known_args(words[1:])  # the rest are the files
            return not [word for word in rest if word.startswith("-")]
        parser.parser().parse_args(words)
    except SystemExit:
        return False
    return True


def test_commands_parse_and_python_compiles() -> None:
    for page, block in BLOCKS:
        if block.language == "python":
            compile(block.text, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    found = list(commands())
    assert len(found) > 100
    assert [f"{page}: {shlex.join(words)}" for page, words in found if not parses(words)] == []


def test_links_resolve() -> None:
    links = [
        (page, match[1])
        for page in PAGES
        for match in LINK.finditer(re.sub(r"(?ms)^```.*?^```$", "", page.read_text()))
    ]
    local = [(page, target) for page, target in links if "://" not in target]
    assert len(local) > 100
    assert [f"{page.name}: {target}" for page, target in local if not (page.parent / target).exists()] == []


def test_every_page_is_linked() -> None:
    docs = ROOT / "docs"
    for page in sorted(docs.glob("**/*.md")):
        index = ROOT / "README.md" if page == docs / "index.md" else docs / "index.md"
        assert f"({page.relative_to(index.parent).as_posix()})" in index.read_text(), page


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
