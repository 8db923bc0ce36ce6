"""Repository agents: plug-ins that check a model's directory before it is loaded, or put another in its place.

A plug-in is a class with the methods of `Agent`. It comes from a package (entry point group
`shmserve.repository_agents`) or from `NAME/agent.py` in the directory of --repoagent-directory, where the class is
called `RepositoryAgent`.
"""

from __future__ import annotations

from shmserve.repo.agents.model import Agent, AgentModel, Refused

__all__ = ["Agent", "AgentModel", "Refused"]
