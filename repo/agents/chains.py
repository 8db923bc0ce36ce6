"""Runs the agents of models and keeps what they made for as long as it is used.

Invariant: everything here runs in the thread that reads models, but `PreparedModel` may be dropped in any thread.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from shmserve.errors import InvalidRequest, Unavailable, from_wire
from shmserve.repo.agents import registry
from shmserve.repo.agents.process import AgentProcess
from shmserve.repo.agents.record import CHAIN, AgentSpec, Chain, folders_done, read_chain, read_result, write
from shmserve.repo.config.schema import ModelRepositoryAgents
from shmserve.repo.storage.generation import Generation

PREFIX = "chain-"
STOP_S = 10.0
"""Maximum time for telling all agents that the server ends."""


class AgentSettings(NamedTuple):
    """`directory` has further agents. `config`: 'agent,key' -> value, which takes precedence over that of a model. A
    model that does not use the agents `required` is refused. `limit_s`: maximum time for the agents of a model.
    """

    directory: str = ""
    config: Mapping[str, str] = {}
    required: Collection[str] = ()
    limit_s: float = 300.0


class PreparedModel:
    """A model's directory, checked or made by its agents. When the last reference is dropped, they are told that the
    model is unloaded, and what they made is removed. `base`: the files that they were given, which exist for as long.
    """

    def __init__(self, folder: Path, base: Generation | None) -> None:
        self.folder = folder
        self.base = base


class AgentChains:
    """`log` is called with a line that an agent has printed, and the model's name. `discard` runs work in the thread
    that reads models; it is called in any thread."""

    def __init__(
        self,
        place: Path,
        settings: AgentSettings,
        log: Callable[[str, str], None],
        discard: Callable[[Callable[[], None]], None],
    ) -> None:
        self._discard = discard
        self._place = place
        self._settings = settings
        self._log = log
        self._known: weakref.WeakValueDictionary[tuple[object, ...], PreparedModel] = weakref.WeakValueDictionary()
        self._live: dict[Path, bool] = {}
        """Directory of a chain -> whether an agent wants to know when the model is unloaded."""
        self._running: AgentProcess | None = None
        self.closed = False

    def prepare(
        self,
        name: str,
        folder: Path,
        agents: ModelRepositoryAgents | None,
        digest: str,
        base: Generation | None = None,
        origin: Path | None = None,
    ) -> PreparedModel | None:
        """Runs the agents of a model, unless they have for the same files, identified by `digest`. `base`: the
        generation that `folder` is in. `origin`: the directory in the repository of which `folder` is a copy. Returns
        None if the model has no agents. Raises a ServeError if the model must not be loaded.
        """
        specs = self._specs(agents)
        if not specs:
            return None
        key = (folder, digest, repr(specs))
        prepared = self._known.get(key) if digest else None
        if prepared is None:
            prepared = self._known[key] = self._prepare(name, folder, specs, base, origin or folder)
        return prepared

    def _specs(self, agents: ModelRepositoryAgents | None) -> tuple[AgentSpec, ...]:
        specs = agents.agents if agents is not None else ()
        for name in self._settings.required:
            if name not in {agent.name for agent in specs}:
                text = f"its configuration does not use the repository agent '{name}', which the server requires"
                raise InvalidRequest(f"{text} (--require-repoagent)")
        return tuple(AgentSpec(agent.name, agent.parameters | self._config_of(agent.name)) for agent in specs)

    def _config_of(self, agent: str) -> dict[str, str]:
        return {
            key: value
            for setting, value in self._settings.config.items()
            for name, _, key in [setting.partition(",")]
            if name in ("", agent)
        }

    def _prepare(
        self, name: str, folder: Path, specs: Sequence[AgentSpec], base: Generation | None, origin: Path
    ) -> PreparedModel:
        directory = self._settings.directory
        names = registry.installed(directory)
        for spec in specs:
            if spec.name not in names:
                raise InvalidRequest(registry.unknown(spec.name, names))
        home = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._place))
        self._live[home] = True
        try:
            write(home / CHAIN, Chain(name, str(folder), str(origin), tuple(specs), directory))
            problem = self._run(home, "load", name)
            result = read_result(home)
            if result is None:
                raise Unavailable(problem or "its repository agents ended without a result; see the server's log")
            if result.error:
                self._live[home] = False  # those that were loaded know
                raise from_wire(result.code or InvalidRequest.code, result.error)
            self._live[home] = result.unloads
            prepared_folder = Path(result.folder)
            if prepared_folder.name != name:
                prepared_folder = _named(home, prepared_folder, name)
        except BaseException:
            self._release(home, name)
            raise
        prepared = PreparedModel(prepared_folder, base)
        weakref.finalize(prepared, self._drop, home, name, base).atexit = False
        return prepared

    # ------------------------------------------------------------------------------------ the end

    def _drop(self, home: Path, name: str, base: Generation | None) -> None:
        self._discard(partial(self._unload, home, name, base))

    def _unload(self, home: Path, name: str, _base: Generation | None) -> None:
        """`_base` exists until the agents have been told."""
        self._release(home, name)

    def _release(self, home: Path, name: str, remaining_s: float | None = None) -> None:
        unloads = self._live.pop(home, None)
        if unloads is None:
            return  # close() has released it, or left it for recover()
        if unloads:
            self._run(home, "unload", name, remaining_s)
        shutil.rmtree(home, ignore_errors=True)

    def recover(self) -> None:
        """Tells the agents of models that were loaded when the server was killed, and removes what they made."""
        for home in sorted(self._place.glob(f"{PREFIX}*")):
            result = read_result(home)
            unloads = result.unloads if result is not None else bool(folders_done(home))
            if unloads:
                with suppress(FileNotFoundError):
                    self._run(home, "unload", read_chain(home).model)
            shutil.rmtree(home, ignore_errors=True)

    def close(self) -> None:
        """Tells the agents of all loaded models, for up to STOP_S. The thread that reads models must have ended.

        Agents that were not told in this time are told by the next `recover`.
        """
        deadline = time.monotonic() + STOP_S
        for home, unloads in list(self._live.items()):
            remaining_s = deadline - time.monotonic()
            if unloads and remaining_s <= 0:
                del self._live[home]
                continue
            with suppress(FileNotFoundError):
                self._release(home, read_chain(home).model, remaining_s)

    def interrupt(self) -> None:
        """Kills the agents that are running, so that the thread that reads models ends. May be called in any thread."""
        self.closed = True
        running = self._running
        if running is not None:
            running.kill()

    # ------------------------------------------------------------------------------------ processes

    def _run(self, home: Path, action: str, model: str, remaining_s: float | None = None) -> str:
        """Runs the process of a chain. Returns what was wrong with it; "" if it ended normally."""
        command = [sys.executable, "-m", "shmserve.repo.agents.host", str(home), action, str(os.getpid())]
        self._running = process = AgentProcess(command, lambda line: self._log(line, model))
        if self.closed and action == "load":
            process.kill()
        code = process.run(self._limit_s(action, remaining_s))
        self._running = None
        if code is None:
            text = f"its repository agents were killed: they took longer than {self._settings.limit_s:g} s"
            return f"{text} (--load-limit-secs)"
        if code < 0:
            return f"its repository agents were killed by {signal.Signals(-code).name}"
        return f"its repository agents ended with exit code {code}" if code else ""

    def _limit_s(self, action: str, remaining_s: float | None) -> float | None:
        if remaining_s is None and self.closed and action == "unload":
            remaining_s = STOP_S
        return min((limit for limit in (self._settings.limit_s, remaining_s) if limit), default=None)


def _named(home: Path, folder: Path, name: str) -> Path:
    """A path of the directory that ends with the model's name."""
    link = home / "named"
    link.mkdir(mode=0o700)
    (link / name).symlink_to(folder)
    return link / name
