"""The record of one chain of agents, on disk: what to run, what has run, and with what result.

    <place>/chain-xxxx/
        chain.json     the agents and the model, written before anything runs
        done           a line for each agent whose `load` has returned: the directory that it was given
        result.json    the end of a load: the directory to serve, or an error
        0/, 1/, ...    the work directories of the agents

After a crash, `chain.json` and `done` say which agents to tell that the model is no longer loaded, unless `result.json`
says that none wants to know, or that they have been told.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from shmserve.system.files import new_file

CHAIN = "chain.json"
DONE = "done"
RESULT = "result.json"


class AgentSpec(Struct, frozen=True):
    name: str
    parameters: dict[str, str] = {}


class Chain(Struct, frozen=True):
    model: str
    folder: str
    origin: str
    """The directory in the repository, of which `folder` may be a copy."""
    agents: tuple[AgentSpec, ...]
    directory: str = ""
    """That of --repoagent-directory."""


class AgentResult(Struct, frozen=True):
    folder: str = ""
    code: str = ""
    error: str = ""
    unloads: bool = False
    """Whether an agent wants to know when the model is unloaded. False with an error: they have been told."""


def write(path: Path, content: Chain | AgentResult) -> None:
    """Writes the file in one step: a reader finds it whole or not at all."""
    with new_file(path) as part:
        part.write_bytes(msgspec.json.encode(content))


def read_chain(home: Path) -> Chain:
    return msgspec.json.decode((home / CHAIN).read_bytes(), type=Chain)


def read_result(home: Path) -> AgentResult | None:
    """Returns the result; None if the process ended before it had one."""
    try:
        return msgspec.json.decode((home / RESULT).read_bytes(), type=AgentResult)
    except FileNotFoundError:
        return None


def folders_done(home: Path) -> list[str]:
    """The directories that were given to the agents whose `load` has returned, in order."""
    try:
        lines = (home / DONE).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    return [msgspec.json.decode(line, type=str) for line in lines[:-1]]  # the last one is empty, or half-written
