"""The process that runs the agents of one model: `python -m shmserve.repo.agents.host HOME load|unload PARENT`.

Agents are other people's code: here they can neither block nor crash the server, which logs what they print.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path

import msgspec

from shmserve.errors import ServeError
from shmserve.repo.agents import Agent, AgentModel, Refused
from shmserve.repo.agents.record import DONE, RESULT, AgentResult, Chain, folders_done, read_chain, write
from shmserve.repo.agents.registry import create
from shmserve.system.process import PDEATHSIG, prctl


def main(home: Path, action: str, parent: int) -> int:
    prctl(PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1  # the server died before PDEATHSIG was set
    os.dup2(2, 1)
    chain = read_chain(home)
    if action == "load":
        write(home / RESULT, load(home, chain))
    else:
        unload(home, chain)
    return 0


def load(home: Path, chain: Chain) -> AgentResult:
    """Runs the agents in order. If one fails, those before it are told in reverse order."""
    folder, origin = Path(chain.folder), Path(chain.origin)
    unloads = False
    for index, spec in enumerate(chain.agents):
        work = home / str(index)
        work.mkdir(mode=0o700)
        try:
            agent = create(spec.name, chain.directory)
            before, folder = folder, _loaded(agent, AgentModel(chain.model, folder, work, spec.parameters, origin))
        except Exception as error:
            failed = _failure(spec.name, error)
            unload(home, chain)
            return failed
        unloads = unloads or type(agent).unload is not Agent.unload
        with (home / DONE).open("ab") as done:
            done.write(msgspec.json.encode(str(before)) + b"\n")
    return AgentResult(str(folder), unloads=unloads)


def _loaded(agent: Agent, model: AgentModel) -> Path:
    returned = agent.load(model)
    if returned is None:
        return model.folder
    folder = model.folder / returned
    if not folder.is_dir():
        raise Refused(f"load() returned {str(returned)!r}, which is not a directory")
    return folder


def _failure(name: str, error: Exception) -> AgentResult:
    if isinstance(error, ServeError):
        return AgentResult(code=error.code, error=error.message)
    text = f"repository agent '{name}' "
    if isinstance(error, Refused):
        return AgentResult(error=f"{text}refused the model: {error}")
    traceback.print_exc()
    return AgentResult(error=f"{text}failed: {type(error).__name__}: {error}")


def unload(home: Path, chain: Chain) -> None:
    """Tells the agents whose `load` has returned, in reverse order. A failure of one does not concern the others."""
    folders = folders_done(home)
    for index in reversed(range(len(folders))):
        spec = chain.agents[index]
        work = home / str(index)
        try:
            work.mkdir(mode=0o700, exist_ok=True)
            agent = create(spec.name, chain.directory)
            agent.unload(AgentModel(chain.model, Path(folders[index]), work, spec.parameters, Path(chain.origin)))
        except Exception:
            print(f"repository agent '{spec.name}' failed to unload model '{chain.model}':", file=sys.stderr)
            traceback.print_exc()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
