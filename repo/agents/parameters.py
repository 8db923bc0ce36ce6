"""Parameters of agents that name files of the server's administrator."""

from __future__ import annotations

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
    if path.resolve().is_relative_to(model.folder.resolve()):
        raise Refused(f"parameter '{key}': '{given}' is in the model's own directory")
    return path
