"""What the built-in agents share."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from shmserve.repo.agents.model import AgentModel, Refused


def server_file(model: AgentModel, key: str) -> Path:
    """The path that a parameter names. Not in the model's directory: who writes that must not choose the key, too."""
    given = model.parameters.get(key, "")
    if not given:
        raise Refused(f"parameter '{key}' is missing: the absolute path of a file (--repoagent-config)")
    path = Path(given)
    if not path.is_absolute():
        raise Refused(f"parameter '{key}': found '{given}', expected an absolute path")
    if any(path.resolve().is_relative_to(folder.resolve()) for folder in (model.folder, model.origin)):
        raise Refused(f"parameter '{key}': '{given}' is in the model's own directory")
    return path


def linked(model: AgentModel, names: Iterable[str], without: Collection[str]) -> Path:
    """Makes a directory in `work` with links to the files of the model, except those in `without`. `names`: files and,
    before what is in them, directories, which end with /.
    """
    target = model.work / model.name
    target.mkdir(mode=0o700)
    for name in names:
        if name.endswith("/"):
            (target / name).mkdir(mode=0o700)
        elif name not in without:
            (target / name).symlink_to((model.folder / name).resolve())
    return target
