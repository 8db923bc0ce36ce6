"""Repository agents: plug-ins that check a model's directory before it is loaded, or put another in its place.

A plug-in is a class with the methods of `Agent`. It comes from a package (entry point group
`shmserve.repository_agents`) or from `NAME/agent.py` in the directory of --repoagent-directory, where the class is
called `RepositoryAgent`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = ["Agent", "AgentModel", "Refused"]


class AgentModel(NamedTuple):
    """A model that is being loaded or unloaded.

    `folder`: its directory, as the agent before this one left it; must not be changed. The first agent gets a copy that
    the server has made, so that nobody can change the files between the check and the load. `work`: an empty directory
    that belongs to this agent and this load. It is removed after `unload`. `parameters`: those of the configuration.
    `origin`: the model's directory in the repository, to which others may write.
    """

    name: str
    folder: Path
    work: Path
    parameters: Mapping[str, str]
    origin: Path


class Refused(Exception):
    """The model must not be loaded. The text is shown to whoever loads the model."""


class Agent:
    """Base class of agents. Each call has its own instance and runs in a process of its own."""

    def load(self, model: AgentModel) -> Path | None:
        """Called before the model is read. Returns the directory to continue with, None: `model.folder`."""
        return None

    def unload(self, model: AgentModel) -> None:
        """Called once for each successful `load`: when the model is unloaded or replaced, when a later step of the load
        failed, when the server stops, or, after a crash, when it starts again. May find `work` half-filled or empty;
        after a crash, `folder` may be gone.
        """
