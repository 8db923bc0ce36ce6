"""The model repositories on disk: lists the models and reads them.

Invariant: this may wait for a disk, so it is called only in the reader's thread, or before the loop runs.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from shmserve.broker.models.backend_files import BackendFiles, KnownBackends, read_backend
from shmserve.broker.models.overrides import LoadOverride
from shmserve.broker.models.remote import NotDownloaded
from shmserve.errors import InvalidRequest, ServeError, Unsupported
from shmserve.protocol.namespaces import SEPARATOR, namespace, namespace_of, plain, qualified, resolved
from shmserve.repo.agents.chains import AgentChains, PreparedModel
from shmserve.repo.agents.registry import READ_ONCE
from shmserve.repo.backends import in_directory, installed
from shmserve.repo.check import CheckFinding, load_warnings
from shmserve.repo.compile import environment
from shmserve.repo.config.complete import is_ensemble
from shmserve.repo.config.override import Override
from shmserve.repo.config.problems import Problem
from shmserve.repo.config.schema import ModelRepositoryAgents
from shmserve.repo.remote.cache import is_absent, tree_of
from shmserve.repo.storage.generation import FilesChanged, Generation, Generations
from shmserve.repo.storage.model_files import ModelFiles
from shmserve.repo.storage.snapshot import Snapshot, take
from shmserve.repo.storage.store import ScannedModel, duplicate_text, find_model, model_names, scan_model
from shmserve.terminal.streams import error_text


class ModelReading(NamedTuple):
    """A model as read from disk, with the files of each version in `generations`. `snapshot` None: the folder cannot be
    read, or the model is in two repositories. `findings`: hints for its owner, whether it can be served or not.
    `prepared`: the result of its repository agents, if it has any. `backend`: the files of its backend; None: they are
    not in the backend directory. `tree`: for a model of a remote repository, the name of its tree in the cache."""

    scanned: ScannedModel
    snapshot: Snapshot | None = None
    override: LoadOverride | None = None
    generations: Mapping[int, Generation] = MappingProxyType({})
    findings: tuple[CheckFinding, ...] = ()
    prepared: PreparedModel | None = None
    backend: BackendFiles | None = None
    tree: str = ""


class KeptConfig(NamedTuple):
    """The configuration of a load call, valid until the model's files change; `files_digest` is their digest."""

    override: LoadOverride
    files_digest: str


class Repositories:
    def __init__(
        self,
        folders: Sequence[Path],
        backend_directory: str = "",
        config_name: str = "",
        generations: Generations | None = None,
        gpus: Collection[int] = (),
        files: ModelFiles | None = None,
        agents: AgentChains | None = None,
        namespacing: bool = False,
    ) -> None:
        """`generations` keeps the files of versions as they were read; None: workers read the repositories. `gpus`: the
        numbers of the GPUs that models may use. `files`: models that are single files. `agents` runs repository agents;
        None: models that use them cannot be served. `namespacing`: each repository is a namespace."""
        self.gpus = gpus
        self._files = files
        self._folders = [*folders, *([files.folder] if files is not None else [])]
        self._namespaces = {root.resolve(): namespace(root) for root in folders} if namespacing else {}
        self._config_name = config_name
        self._generations = generations
        self._agents = agents
        self._directory = backend_directory
        self._installed = installed()
        self.backends = self._installed | in_directory(self._directory)
        """The backends that models can use."""
        self.names: Collection[str] = ()
        """The models found by the last listing."""

    def file_of(self, folder: Path) -> Path | None:
        """The single file from which this folder was made; None if the folder itself is the model."""
        return self._files.source(folder) if self._files is not None else None

    def unread_files(self) -> list[str]:
        """The reasons why single files without a known model cannot be read."""
        return self._files.unread() if self._files is not None else []

    # ------------------------------------------------------------------------------------ names

    def names_on_disk(self) -> dict[str, list[Path]]:
        self._refresh()
        if not self._namespaces:
            return model_names(self._folders)
        return {
            qualified(space, name): paths
            for root, space in self._namespaces.items()
            for name, paths in model_names([root]).items()
        }

    def names_now(self) -> Collection[str]:
        """The models on disk, or those of the last listing if a repository cannot be read."""
        try:
            return self.names_on_disk()
        except (ServeError, OSError):
            return self.names

    def namesakes(self, name: str) -> list[str]:
        """The models on disk that have this name, with their namespaces; the name itself if there are none."""
        if SEPARATOR in name:
            return [name]
        names = [qualified(space, name) for root, space in self._namespaces.items() if os.path.isdir(root / name)]
        return names or [name]

    def resolve(self, name: str, near: str) -> str:
        """The full name of the model that a step of the ensemble `near` runs."""
        return resolved(name, near, self.namesakes(name))

    # ------------------------------------------------------------------------------------ models

    def read(
        self,
        name: str,
        override: LoadOverride | None = None,
        kept: KeptConfig | None = None,
        versions: Collection[int] = (),
    ) -> ModelReading:
        """Reads the model of that name, or the one that a load call provides. `versions`: see `scan_model`. Raises the
        errors of `find_model`."""
        if override is not None and override.folder is not None:
            return self.read_folder(override.folder, override, versions)
        self._refresh()
        roots = [root for root, space in self._namespaces.items() if space == namespace_of(name)]
        folder = find_model(roots or self._folders, plain(name) if roots else name)
        if is_absent(folder):
            raise NotDownloaded(name)
        if override is None and kept is not None:
            current = _snapshot(folder)
            override = kept.override if current is not None and current.digest() == kept.files_digest else None
        return self.read_folder(folder, override, versions)

    def read_folder(
        self,
        folder: Path,
        override: LoadOverride | None = None,
        versions: Collection[int] = (),
        known: KnownBackends | None = None,
    ) -> ModelReading:
        """Repeats the reading until the folder does not change during it, at most three times. `known`: the backends
        read so far in this pass; adds the model's backend."""
        if self._files is not None and (problem := self._files.problem(folder)):
            return ModelReading(ScannedModel.failed(folder.name, folder, problem), _snapshot(folder))
        config = override.config if override is not None else None
        generation: Generation | None = None
        if override is not None and override.folder is not None and self._generations is not None:
            generation = self._generations.adopt(override.folder)
        tree, before = tree_of(folder), _snapshot(folder)
        for remaining in (2, 1, 0):
            scanned = self._scan(folder, config, versions)
            kept: Mapping[int, Generation] = {}
            prepared: PreparedModel | None = None
            try:
                prepared = self._prepare(scanned, before, generation, config)
                if prepared is not None:
                    scanned = self._scan(prepared.folder, config, versions, prepared=True)
                    if prepared.base is not None and prepared.folder == prepared.base.folder:
                        kept = dict.fromkeys(scanned.versions, prepared.base)
                    else:
                        kept = self._keep(scanned, take(prepared.folder), strict=True)
                elif generation is not None:
                    kept = dict.fromkeys(scanned.versions, generation)
                elif before is not None:
                    kept = self._keep(scanned, before, strict=remaining > 0)
            except ServeError as error:
                scanned = _refused(scanned, error.message)
            except FilesChanged:
                if not remaining:
                    scanned = _refused(scanned, "its files changed while they were read")
            except OSError as error:
                where = f" {self._generations.place}" if self._generations is not None else ""
                scanned = _refused(
                    scanned, f"cannot copy its files to the runtime directory{where}: {error_text(error)}"
                )
            tree_after, after = tree_of(folder), _snapshot(folder)
            if (tree_after, after) == (tree, before):
                break
            tree, before = tree_after, after
        backend: BackendFiles | None = None
        try:
            if scanned.config is not None:
                backend = self._backend(scanned.config.backend, {} if known is None else known)
        except InvalidRequest as error:
            scanned = _refused(scanned, error.message)
        findings = load_warnings(scanned, backends=self.backends, gpus=self.gpus, prepared=prepared is not None)
        if prepared is not None and generation is None:
            scanned = scanned._replace(path=folder)
        if folder.parent in self._namespaces:
            scanned = scanned._replace(name=qualified(self._namespaces[folder.parent], scanned.name))
        return ModelReading(scanned, before, override, kept, findings, prepared, backend, tree)

    def _scan(
        self, folder: Path, override: Override | None, versions: Collection[int], prepared: bool = False
    ) -> ScannedModel:
        return scan_model(
            folder,
            backends=self.backends,
            gpus=self.gpus,
            config_name=self._config_name,
            override=override,
            prepared=prepared,
            versions=versions,
        )

    def _backend(self, name: str, known: KnownBackends) -> BackendFiles | None:
        backend = known.get(name) or read_backend(name, self._directory, self._generations)
        if backend is not None:
            known[name] = backend
        return backend

    def _prepare(
        self, scanned: ScannedModel, snapshot: Snapshot | None, base: Generation | None, override: Override | None
    ) -> PreparedModel | None:
        """Runs the model's repository agents; None if it has none. Raises a ServeError if one refuses the model.

        The agents get a copy, from which the workers load, too: others may write to the repository meanwhile, even
        without a change of size or time.
        """
        if scanned.written is None:
            return None
        agents, chains = scanned.written.model_repository_agents, self._agents
        if chains is not None:
            digest = snapshot.digest() if snapshot is not None else ""
            folder = scanned.path
            if base is None and self._generations is not None and agents is not None and _need_copy(agents):
                base = self._generations.copy(scanned.path, digest, lambda: chains.closed)
                folder = base.folder
                copied = self._scan(folder, override, ()).written
                if copied is None or copied.model_repository_agents != agents:
                    raise FilesChanged(scanned.name)
            return chains.prepare(scanned.name, folder, agents, digest, base, scanned.path)
        if agents is not None:
            raise Unsupported("its configuration uses repository agents, which only a server runs")
        return None

    def _refresh(self) -> None:
        if self._files is not None:
            self._files.refresh()
        with suppress(OSError):  # backends found earlier still work if their files were kept
            self.backends = self._installed | in_directory(self._directory)

    def _keep(self, scanned: ScannedModel, snapshot: Snapshot, strict: bool) -> Mapping[int, Generation]:
        if self._generations is None or scanned.config is None or is_ensemble(scanned.config):
            return {}
        interpreter = environment(scanned.config, str(scanned.path))
        return {
            number: self._generations.keep(scanned.path, number, snapshot, interpreter, strict)
            for number in scanned.versions
        }

    def read_all(self) -> list[ModelReading]:
        known: KnownBackends = {}
        return [self._read_any(name, folders, known) for name, folders in self.names_on_disk().items()]

    def read_present(self, name: str) -> ModelReading | None:
        """The model; None if no repository has it."""
        folders = self.names_on_disk().get(name)
        return self._read_any(name, folders, {}) if folders else None

    def _read_any(self, name: str, folders: Sequence[Path], known: KnownBackends) -> ModelReading:
        return self.read_folder(folders[0], known=known) if len(folders) == 1 else read_doubled(name, folders)


def read_doubled(name: str, folders: Sequence[Path]) -> ModelReading:
    """The reading of a model that is in several repositories, and is therefore not served."""
    return ModelReading(ScannedModel.failed(name, folders[0], duplicate_text(name, len(folders))))


def _need_copy(agents: ModelRepositoryAgents) -> bool:
    return not READ_ONCE.issuperset(agent.name for agent in agents.agents)


def _refused(scanned: ScannedModel, problem: str) -> ScannedModel:
    return scanned._replace(config=None, versions=(), problems=(*scanned.problems, Problem("", 0, 0, "", problem)))


def _snapshot(folder: Path) -> Snapshot | None:
    try:
        return take(folder)
    except (OSError, InvalidRequest):  # the scan reports what is wrong
        return None
