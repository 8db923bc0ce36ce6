"""The available repository agents, by name. Only the process that runs an agent imports it."""

from __future__ import annotations

import importlib
import os
from importlib.metadata import entry_points
from pathlib import Path

from shmserve.errors import Unsupported
from shmserve.extras import install_command, outdated
from shmserve.repo.agents import Agent
from shmserve.repo.files.python_file import import_file
from shmserve.repo.files.safe_paths import MODEL_NAME

GROUP = "shmserve.repository_agents"
"""The entry point group by which packages provide agents."""
FILE = "agent.py"
CLASS = "RepositoryAgent"
BUILT_IN = {
    "checksum": "shmserve.repo.agents.built_in:Checksum",
    "convert": "shmserve.repo.agents.convert:Convert",
    "decrypt": "shmserve.repo.agents.decrypt:Decrypt",
    "signature": "shmserve.repo.agents.signature:Signature",
}

READ_ONCE = frozenset({"decrypt"})
"""Agents that read each file once and check nothing: what they return is served, so they need no copy of the model."""


def in_directory(directory: str | Path) -> frozenset[str]:
    """The agents in a directory. Empty for ""."""
    if not directory:
        return frozenset()
    return frozenset(
        entry
        for entry in os.listdir(directory)
        if MODEL_NAME.fullmatch(entry) and (Path(directory) / entry / FILE).is_file()
    )


def installed(directory: str | Path = "") -> frozenset[str]:
    """The names of all agents. Raises OSError for a directory that cannot be read."""
    return frozenset(BUILT_IN) | {entry.name for entry in entry_points(group=GROUP)} | in_directory(directory)


def directory_problem(directory: Path) -> str:
    """The problem of a directory of agents; "" if there is none."""
    if not directory.is_dir():
        return f"{directory} is not a directory"
    try:
        conflicts = sorted(in_directory(directory) & set(BUILT_IN))
    except OSError as error:
        return f"{directory} cannot be read: {error.strerror}"
    return f"{directory} has an agent '{conflicts[0]}', the name of a built-in agent; rename it" if conflicts else ""


def unknown(name: str, names: frozenset[str]) -> str:
    return f"repository agent '{name}' is not installed; there are {', '.join(sorted(names))} (--repoagent-directory)"


def create(name: str, directory: str = "") -> Agent:
    """Imports an agent. Raises Unsupported if it does not exist or lacks a package."""
    if name in BUILT_IN:
        if old := outdated("agents"):
            raise Unsupported(f"repository agent '{name}' cannot be used: {old}")
        module, _, attribute = BUILT_IN[name].partition(":")
        try:
            agent: Agent = getattr(importlib.import_module(module), attribute)()
        except ModuleNotFoundError as error:
            text = f"repository agent '{name}' needs a package that is not installed ({error})"
            raise Unsupported(f"{text}: {install_command('agents')}") from None
        return agent
    if name in in_directory(directory):
        return _of_file(name, Path(directory) / name / FILE)
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            loaded: Agent = entry.load()()
            return loaded
    raise Unsupported(unknown(name, installed(directory)))


def _of_file(name: str, path: Path) -> Agent:
    module = import_file(path, f"shmserve_agent_{name}", [path.parent], f"{FILE} of repository agent '{name}'")
    agent_class = getattr(module, CLASS, None)
    if agent_class is None:
        raise Unsupported(f"repository agent '{name}': {path.name} has no class {CLASS}")
    agent: Agent = agent_class()
    return agent
