"""Copies the pages of the site to a separate folder, with links that work there.

On the site docs/ is the root. A file outside docs/ that a page links to is in source/, with its own links rewritten if
it is a page; a link to a folder becomes plain text.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

DOCS = "docs"
TOP = {"README.md": "overview.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}
"""Pages of the top level and their names on the site. `README.md` would be the same page as `index.md` there."""
SOURCE = "source"
_FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<path>[^)#\s]*)(?P<anchor>#[^)\s]*)?\)")


def page_names(root: Path) -> list[str]:
    """The pages, by their names on the site."""
    return [_name(root, page) for page in _pages(root)]


def stage(root: Path, target: Path) -> None:
    """Replaces `target` with the pages and the files that they link to."""
    shutil.rmtree(target, ignore_errors=True)
    waiting, done = _pages(root), set()
    while waiting:
        path = waiting.pop()
        if path in done or not path.is_file():
            continue
        done.add(path)
        place = target / _name(root, path)
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            text, linked = _rewritten(root, path)
            place.write_text(text)
            waiting += linked
        else:
            shutil.copyfile(path, place)


def _pages(root: Path) -> list[Path]:
    return [*(root / name for name in TOP), *sorted((root / DOCS).glob("**/*.md"))]


def _name(root: Path, path: Path) -> str:
    """The name on the site of a file of the tree."""
    name = path.relative_to(root).as_posix()
    return TOP.get(name) or (name.removeprefix(f"{DOCS}/") if name.startswith(f"{DOCS}/") else f"{SOURCE}/{name}")


def _rewritten(root: Path, page: Path) -> tuple[str, list[Path]]:
    """The text of a page with links for the site, and the files that it links to."""
    here = Path(_name(root, page)).parent
    linked: list[Path] = []

    def link(found: re.Match[str]) -> str:
        if not found["path"] or ":" in found["path"]:
            return found[0]
        path = Path(os.path.normpath(page.parent / found["path"]))
        if path.is_dir():
            return found["text"]
        linked.append(path)
        return f"{found['image']}[{found['text']}]({os.path.relpath(_name(root, path), here)}{found['anchor'] or ''})"

    parts, end, text = [], 0, page.read_text()
    for fence in _FENCE.finditer(text):
        parts += [_LINK.sub(link, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(link, text[end:])]), linked
