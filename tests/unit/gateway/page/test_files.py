"""The page's own files: their maximum size, and content that its policy would block."""

from __future__ import annotations

import re
from pathlib import Path

from shmserve.gateway.page.requests import FOLDER, INDEX, confinement, page_files

FILES = sorted(path for path in FOLDER.rglob("*") if path.is_file())
MODULES = [path for path in FILES if path.suffix == ".js"]


def imported(module: Path) -> list[Path]:
    names = re.findall(r"^import .* from \"(.*)\"$", module.read_text(), re.MULTILINE)
    return [(module.parent / name).resolve() for name in names]


def test_a_browser_loads_less_than_80_kb_to_show_the_page() -> None:
    """The forms to try a model and the endpoints are loaded when they are first shown."""
    loaded, ahead = set(FILES) - set(MODULES), [FOLDER / "app.js"]
    while ahead:
        module = ahead.pop()
        loaded.add(module)
        ahead += set(imported(module)) - loaded
    dynamic = {
        (module.parent / name).resolve()
        for module in MODULES
        for name in re.findall(r"\bimport\(\"(.*?)\"\)", module.read_text())
    }
    assert loaded | dynamic <= set(FILES)
    assert dynamic - loaded
    assert sum(path.stat().st_size for path in loaded) < 80_000


def test_every_file_is_served() -> None:
    files = page_files()
    for path in FILES:
        assert files[path.relative_to(FOLDER).as_posix()].body == path.read_bytes()


def test_the_files_contain_nothing_that_the_policy_blocks() -> None:
    index = (FOLDER / INDEX).read_text()
    assert not re.search(r"<style|\son[a-z]+=|\sstyle=|javascript:", index)
    assert re.findall(r"<script([^>]*)>(.*?)</script>", index, re.DOTALL) == [(' type="module" src="/page/app.js"', "")]
    for path in FILES:
        text = path.read_text()
        links = re.findall(r"(?:src|href)=[\"']([^\"']*)|url\(([^)]*)\)|@import", text)
        assert not [link for pair in links for link in pair if re.match(r"(?:[a-z]+:)?//", link)], path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path
        )


def test_the_page_connects_to_listed_servers_only() -> None:
    def policy(*servers: str) -> list[str]:
        (line,) = [line for line in confinement(servers).decode().split("\r\n") if line.startswith("Content-Sec")]
        return line.partition(": ")[2].split("; ")

    assert "connect-src 'self'" in policy()
    assert "connect-src 'self' http://gpu1:8000 https://gpu2.example" in policy(
        "http://gpu1:8000", "https://gpu2.example"
    )
    assert len(policy("http://gpu1:8000")) == len(policy())
