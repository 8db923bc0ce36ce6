"""Rules for the source tree that no linter checks.

Invariant: only files that git would commit are examined.
"""

from __future__ import annotations

import ast
import configparser
import io
import os
import re
import subprocess
import tokenize
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from tests import ROOT

FILE_BYTES = 1024 * 1024
CODE = ("shmserve", "workers", "repo", "clients", "tests", "bench", "deploy")
PACKAGES = ("shmserve", "workers", "repo", "clients")
LINKS = {"shmserve/workers": "../workers", "shmserve/repo": "../repo", "shmserve/clients": "../clients"}

BANNED_CODE = {
    "waiting for time to pass is not waiting for an event": r"\btime\.sleep\b|\bfrom time import\b.*\bsleep\b",
    "unpickling runs what the sender likes": r"\b(c?[Pp]ickle|dill|cloudpickle|marshal|shelve)\b",
    "a shell parses what it is given": r"\bshell\s*=\s*True\b|\bos\.(system|popen)\b",
    "runs text": r"(?<![.\w])(?<!def )(eval|exec)\s*\(",  # methods of that name are allowed
    "builds any object": r"\byaml\.(load|unsafe_load|full_load)\b",
}
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")
MACHINE = re.compile(r"(?<![\w.])/(home|root|work)/")


@cache
def committed() -> list[Path]:
    """Files that are tracked, or untracked and not ignored."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    return sorted(ROOT / name for name in set(names) if name and os.path.lexists(ROOT / name))


@cache
def code() -> list[tuple[str, str]]:
    names = {path.relative_to(ROOT).as_posix(): path for path in committed() if path.suffix == ".py"}
    return [
        (name, path.read_text())
        for name, path in names.items()
        if name.partition("/")[0] in CODE and not name.endswith("_pb2.py")
    ]


def texts() -> Iterator[tuple[str, str]]:
    for path in committed():
        if path.is_file() and not path.is_symlink():
            data = path.read_bytes()
            if b"\0" not in data:
                yield path.relative_to(ROOT).as_posix(), data.decode()


def without_strings(source: str) -> str:
    """The source without comments, and with empty strings."""
    lines: dict[int, list[str]] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            continue
        text = '""' if token.type == tokenize.STRING else token.string
        if not token.string.isspace():
            lines.setdefault(token.start[0], []).append(text)
    return "\n".join(" ".join(parts).replace(" . ", ".") for _, parts in sorted(lines.items()))


def setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


@pytest.mark.parametrize("reason", BANNED_CODE)
def test_banned_code_is_not_used(reason: str) -> None:
    pattern = re.compile(BANNED_CODE[reason])
    found = []
    for name, text in code():
        if not pattern.search(text):
            continue  # also excluded from the text checks
        found += [f"{name}: {line}" for line in without_strings(text).split("\n") if pattern.search(line)]
    assert not found, reason


def test_banned_code_patterns_match_their_targets() -> None:
    """The patterns match what they are meant to match, and strings and comments do not count."""
    seen = {
        "import time\ntime.sleep(1)": True,
        "from time import monotonic, sleep": True,
        "import pickle": True,
        "run(x, shell=True)": True,
        "os.system(x)": True,
        "eval(x)": True,
        "yaml.load(x)": True,
        "ast.literal_eval(x)": False,
        "model.eval()": False,
        "x = 'no pickle, no time.sleep'  # no eval(": False,
        "yaml.safe_load(x)": False,
    }
    for source, banned in seen.items():
        hit = any(re.search(pattern, without_strings(source + "\n")) for pattern in BANNED_CODE.values())
        assert hit is banned, source


def test_no_unfinished_work_is_marked() -> None:
    found = [name for name, text in texts() if name != "LICENSE" and UNFINISHED.search(text)]
    assert not found


def test_no_machine_specific_paths() -> None:
    found = [f"{name}: {match[0]}" for name, text in texts() if (match := MACHINE.search(text))]
    assert not [line for line in found if not line.startswith("tests/test_tidy.py")]


def test_no_large_files() -> None:
    assert not [str(path) for path in committed() if path.is_file() and path.stat().st_size > FILE_BYTES]


def test_symbolic_links_have_their_targets() -> None:
    for link, target in LINKS.items():
        assert (ROOT / link).is_symlink()
        assert os.readlink(ROOT / link) == target
    assert {path.relative_to(ROOT).as_posix() for path in committed() if path.is_symlink()} == set(LINKS)


def test_packages_in_setup_cfg_match_the_folders() -> None:
    listed = set(setup()["options"]["packages"].split())
    names = set()
    for path in committed():
        parts = path.relative_to(ROOT).parts
        if parts[-1] == "__init__.py" and parts[0] in PACKAGES:
            names.add(".".join((*(() if parts[0] == "shmserve" else ("shmserve",)), *parts[:-1])))
    assert listed == names


def test_every_data_file_is_packaged() -> None:
    patterns = {}
    for package, value in setup()["options.package_data"].items():
        folder = ROOT / package.replace(".", "/")
        patterns[folder.resolve()] = value.split()
    missing = []
    for path in committed():
        top = path.relative_to(ROOT).parts[0]
        module = path.suffix == ".py" and (path.parent / "__init__.py").exists()
        if top not in PACKAGES or path.is_symlink() or module:
            continue
        name = path.relative_to(ROOT / top).as_posix()
        if not any(fnmatch(name, pattern) for pattern in patterns.get(ROOT / top, ())):
            missing.append(path.relative_to(ROOT).as_posix())
    assert set(missing) <= {"repo/examples/make_models.py", "repo/examples/make_picture.py"}


def test_the_change_log_has_an_unreleased_section() -> None:
    assert re.search(r"^## \[?Unreleased\]?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_hypothesis_tests_use_the_shared_profile() -> None:
    """Otherwise `make test` could fail randomly."""
    found = []
    for name, text in code():
        if (
            not re.search(r"^from hypothesis import .*\bsettings\b", text, re.MULTILINE)
            or name == "tests/support/hypothesis_profiles.py"
        ):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "settings":
                given = {keyword.arg: keyword.value for keyword in node.keywords}
                fixed = isinstance(given.get("max_examples"), ast.Constant)
                if fixed or given.keys() - {"max_examples", "stateful_step_count", "suppress_health_check"}:
                    found.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert not found, "write max_examples=examples(60), and nothing that tests/support/hypothesis_profiles.py sets"


def family(kind: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """The class and its bases; empty if another project defines one of them, with attributes of its own."""
    found = [kind]
    for base in (ast.unparse(base).partition("[")[0] for base in kind.bases):
        known = classes.get(base.rpartition(".")[2], kind)
        inherited = family(known, classes) if known is not kind else []
        if not inherited and base not in ("ABC", "Generic", "Protocol"):
            return []
        found += inherited
    return found


@cache
def own_attributes(method: ast.AST) -> tuple[set[str], set[str]]:
    """The attributes of its object that a method assigns, and those that it reads, such as methods that it calls."""
    own = [
        node
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    ]
    assigned = {node.attr for node in own if isinstance(node.ctx, ast.Store)}
    return assigned, {node.attr for node in own} - assigned


def late_attributes(kind: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Attributes that no constructor creates, no method that it calls, and no declaration in the class. The constructor
    of a Python model is `initialize`."""
    members = [member for each in family(kind, classes) for member in each.body]
    methods = [each for each in members if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
    known = {each.name for each in methods if each.decorator_list}
    known |= {ast.unparse(each.target) for each in members if isinstance(each, ast.AnnAssign)}
    known |= {ast.unparse(target) for each in members if isinstance(each, ast.Assign) for target in each.targets}
    called, more = set[str](), {"__init__", "__new__", "initialize"}
    while more:
        called |= more
        used = [own_attributes(each) for each in methods if each.name in more]
        known.update(*(assigned for assigned, _ in used))
        more = set[str]().union(*(read for _, read in used)) - called
    return set[str]().union(*(own_attributes(each)[0] for each in methods)) - known


def test_objects_are_complete_when_they_are_constructed() -> None:
    parsed = [(name, ast.parse(text)) for name, text in code() if name.startswith((*PACKAGES, "bench"))]
    nodes = [(name, node) for name, tree in parsed for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    classes = {node.name: node for _, node in reversed(nodes)}
    found = [(name, kind.name, late) for name, kind in nodes if (late := late_attributes(kind, classes))]
    assert not found, "create these attributes in the constructor, or return another object that has them"
