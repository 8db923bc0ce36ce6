"""The pages: links resolve, commands parse, Python compiles, every page is linked, generated parts are current, and
what pages name or quote is in the source."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import shmserve
from bench.gpu.__main__ import MEASURES as GPU_MEASURES
from bench.measures import ALL
from shmserve.broker.config import command_line
from shmserve.clients.cli import parser
from shmserve.errors import BY_CODE
from tests import ROOT
from tests.site.__main__ import list_versions
from tests.site.links import broken_links
from tests.site.stage import page_names
from tests.support.docs import pages, terminal
from tests.support.docs.doc_tables import DOCS, PARTS, DocPart, with_part
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


def test_make_help_fits_a_screen() -> None:
    text = (ROOT / "Makefile").read_text().partition("\nhelp:\n")[2].partition("\n\n")[0]
    shown = re.findall(r"^\t@echo '(.*)'$", text, re.MULTILINE)
    assert 30 < len(shown) <= 50
    assert max(map(len, shown)) <= 80


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


API_NAMES = re.findall(r"^::: ([\w.]+)$", pages.page("api"), re.MULTILINE)


def test_the_page_has_all_public_names() -> None:
    public = {f"shmserve.{name}" for name in shmserve.__all__ if name != "__version__"}
    assert {*API_NAMES} - {"shmserve.testing.Server"} == public
    assert len(API_NAMES) == len({*API_NAMES})


def test_everything_public_has_a_docstring() -> None:
    for name in API_NAMES:
        module, _, attribute = name.rpartition(".")
        found = getattr(importlib.import_module(module), attribute)
        assert found.__doc__, name
        if name in ("shmserve.Client", "shmserve.AsyncClient", "shmserve.testing.Server"):
            methods = {key: value for key, value in inspect.getmembers(found, inspect.isfunction) if key[0] != "_"}
            assert methods
            assert [key for key, value in methods.items() if not value.__doc__] == []


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_generated_parts_of_pages_are_current(part: DocPart) -> None:
    page = (DOCS / part.page).read_text()
    assert with_part(page, part) == page, "write it with: make docs"


def test_the_terminal_recording_is_that_of_the_home_page() -> None:
    assert terminal.FILE.read_text() == terminal.recording(), "draw it with: make docs"


def test_figures_have_dark_variants_and_are_shown() -> None:
    texts = "".join(page.read_text() for page in DOCS.glob("**/*.md"))
    figures = list((DOCS / "figures").glob("*.svg"))
    assert figures
    for figure in figures:
        assert "@media (prefers-color-scheme: dark)" in figure.read_text(), figure.name
        assert f"(figures/{figure.name})" in texts


OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
SERVICE = (ROOT / "systemd" / "shmserve.service").read_text()


def string_constants() -> str:
    """All string constants of the source; values in f-strings are written {}."""
    texts = []
    for folder in ("shmserve", "workers", "repo", "clients"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values]
                    texts.append("".join(parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
    return "\n".join(texts)


def rows(header: str) -> list[str]:
    """The quoted words of the first column of the table with that header."""
    table = OPERATIONS.partition(f"| {header} |")[2].partition("\n\n")[0]
    return [word for line in table.splitlines()[2:] for word in re.findall(r"`([^`]*)`", line.split("|")[1])]


def test_quoted_texts_are_in_the_source() -> None:
    source = string_constants()
    quoted = rows("Text")
    assert len(quoted) > 10
    assert not [text for text in quoted if text not in source]


def test_codes_settings_and_paths_are_those_of_the_source() -> None:
    client = {"CANCELLED", "UNKNOWN", "ALREADY_EXISTS"}  # not relevant to operators
    assert set(rows("Code")) == set(BY_CODE) - client
    numbers = "WatchdogSec=30 RestartSec=1 StartLimitBurst=10 StartLimitIntervalSec=300 RestartPreventExitStatus=2"
    for setting in (*numbers.split(), "LimitNOFILE=65536"):
        assert f"\n{setting}\n" in SERVICE
    made = (ROOT / "Makefile").read_text() + (ROOT / "systemd" / "tmpfiles.d" / "shmserve.conf").read_text()
    places = "/opt/shmserve /usr/lib/systemd/system /etc/shmserve /srv/shmserve/models /usr/local/bin/shmserve"
    assert [place for place in places.split() if place not in OPERATIONS or place not in made] == []


def test_every_page_is_in_the_navigation_once() -> None:
    configuration = (ROOT / "mkdocs.yml").read_text()
    nav = re.findall(r"^ +- (?:.*: )?(\S+\.md)$", configuration.partition("\nnav:\n")[2], re.MULTILINE)
    assert sorted(nav) == sorted(page_names(ROOT)), "add each page to `nav` in mkdocs.yml"


def test_the_newest_version_of_the_site_is_the_first(tmp_path: Path) -> None:
    for name in ("0.9.0", "0.10.0", "0.2.1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").touch()
    list_versions(tmp_path)
    assert [one["version"] for one in json.loads((tmp_path / "versions.json").read_text())] == [
        "0.10.0",
        "0.9.0",
        "0.2.1",
    ]
    assert 'url=0.10.0/index.html"' in (tmp_path / "index.html").read_text()


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "site" / "sub").mkdir(parents=True)
    broken = ["https://example.org/x.png", "#new", "../../outside.html", "../a.html#gone", "c.html", "code.js"]
    texts = {
        "outside.html": "",
        "site/a.html": '<h1 id="top">A</h1><a href="#top"></a><a href="sub/b.html#part"></a><a href="sub/"></a>'
        '<a href="https://example.org/x"></a><a href="mailto:a@example.org"></a><img src="plot%20one.svg">',
        "site/plot one.svg": "<svg/>",
        "site/sub/index.html": '<a href="../a.html#top">',
        "site/sub/b.html": '<p id="part"></p><script src="code.js"></script>'
        + "".join(f'<a href="{path}"></a>' for path in broken[1:-1])
        + f'<img src="{broken[0]}">',
        "site/404.html": '<a href="/nowhere.html">',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    assert broken_links(tmp_path / "site") == [f"sub/b.html: {link}" for link in broken]


EXAMPLES = {
    "A backend": r"\bpaddle\b",
    "An endpoint": r"\bLogSettings\b|\bSET_LOG\b",
    "A field of `config.pbtxt`": r"\bmax_inflight_requests\b",
    "A model parameter": r"\bstay_loaded\b|\bSTAY_LOADED\b",
    "A metric": r"padded_elements",
    "A command": r"\badd_keygen\b|\"keygen\"",
    "A setting": r"(?<!-)\brepository[-_]poll[-_]secs\b",
}
"""Section -> what finds an existing member of its kind in the source."""
SECTIONS = dict(re.findall(r"(?ms)^### (.*?)\n(.*?)(?=^##|\Z)", (ROOT / "CONTRIBUTING.md").read_text()))
SOURCES = [
    path
    for folder in ("clients", "deploy", "repo", "shmserve", "workers")
    for path in sorted((ROOT / folder).glob("**/*"))
    if path.suffix in (".py", ".proto")
] + [ROOT / "setup.cfg"]


def named(section: str) -> list[str]:
    """The files and folders in the first column of a table, and in the text beside them."""
    return re.findall(r"`([a-z_]+(?:/[a-z_.]*)*\.?[a-z]*)`", SECTIONS[section])


def having(pattern: str) -> list[Path]:
    return [path.relative_to(ROOT) for path in SOURCES if re.search(pattern, path.read_text())]


def test_every_table_has_an_example() -> None:
    assert EXAMPLES.keys() == SECTIONS.keys()


@pytest.mark.parametrize("section", EXAMPLES)
def test_a_table_names_all_files_of_a_member_of_its_kind(section: str) -> None:
    files, found = named(section), having(EXAMPLES[section])
    assert len(found) > 1
    folders = tuple(name for name in files if name.endswith("/"))
    assert [path for path in map(str, found) if path not in files and not path.startswith(folders)] == []
