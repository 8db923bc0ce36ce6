"""`python -m deploy.release.check VERSION`: reports what prevents a release of HEAD as this version."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from pathlib import Path

from deploy.release.build import ROOT

NAMED = {
    "deploy/container/Dockerfile": ("ARG VERSION={}",),
    "deploy/container/compose.yaml": ("    image: shmserve:{}",),
    "deploy/helm/shmserve/Chart.yaml": ("version: {}", "appVersion: {}"),
    "deploy/kserve/clusterservingruntime.yaml": ("      image: shmserve:{}",),
    "deploy/kubernetes/base/kustomization.yaml": ("    newTag: {}",),
    "deploy/kubernetes/components/gpu/kustomization.yaml": ("    newTag: {}-gpu",),
    "docs/release-notes.md": ("# shmserve {}",),
}
"""File -> lines that have the version."""
_VERSION = re.compile(r"\d+\.\d+\.\d+(rc\d+)?")


def problems(root: Path, version: str) -> list[str]:
    if not _VERSION.fullmatch(version):
        return [f"'{version}' is not a version such as 1.2.3 or 1.2.3rc1"]
    return [
        *_of_metadata((root / "setup.cfg").read_text(), version),
        *_of_lines(root, version),
        *_of_changes((root / "CHANGELOG.md").read_text(), version),
        *_of_git(root, version),
    ]


def _of_metadata(text: str, version: str) -> list[str]:
    setup = configparser.ConfigParser(interpolation=None)
    setup.read_string(text)
    metadata, faults = setup["metadata"], []
    if metadata["version"] != version:
        faults.append(f"setup.cfg: version is {metadata['version']}, not {version}")
    faults += [
        f"setup.cfg: [metadata] has no {key}, which PyPI shows: the public repository"
        for key in ("url", "project_urls")
        if not metadata.get(key)
    ]
    return faults


def _of_lines(root: Path, version: str) -> list[str]:
    faults = []
    for name, lines in NAMED.items():
        text = (root / name).read_text().splitlines()
        expected = [line.format(version) for line in lines]
        faults += [f"{name}: no line '{line.strip()}'" for line in expected if line not in text]
    return faults


def _of_changes(text: str, version: str) -> list[str]:
    """Checks that the version's section is dated and has entries, and that *Unreleased* is empty."""
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    dated = re.compile(rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d")
    title = next(filter(dated.fullmatch, sections), None)
    if title is None:
        return [f"CHANGELOG.md: no section '## {version} - YYYY-MM-DD'"]
    faults = [] if re.search("^- ", sections[title], re.MULTILINE) else [f"CHANGELOG.md: {title} has no entries"]
    if re.search("^- ", sections.get("Unreleased", ""), re.MULTILINE):
        faults.append("CHANGELOG.md: there are entries under Unreleased")
    return faults


def _of_git(root: Path, version: str) -> list[str]:
    faults = []
    if _git(root, "status", "--porcelain"):
        faults.append("git: the checkout has changes that are not committed")
    is_tagged = bool(_git(root, "tag", "--list", f"v{version}"))
    tagged = _git(root, "rev-list", "--max-count=1", f"v{version}", "--") if is_tagged else ""
    if is_tagged and tagged != _git(root, "rev-parse", "HEAD"):
        faults.append(f"git: the tag v{version} is at another commit, {tagged[:8]}")
    return faults


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: make release-check VERSION=X.Y.Z", file=sys.stderr)
        return 2
    faults = problems(ROOT, arguments[0])
    print("\n".join(faults) if faults else f"{arguments[0]} can be released")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
