"""The catalog of deployed models: their sources and the configurations that workers completed.

Invariant: everything here runs on the loop, except that a thread reads `repositories`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import chain, count
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from shmserve.broker.models.backend_files import BackendFiles
from shmserve.broker.models.differences import LoadedVersion
from shmserve.broker.models.repositories import KeptConfig, ModelReading, Repositories
from shmserve.broker.processes.workers import DEFAULTS, WorkerResources, resources_of
from shmserve.core.effects import Spawn
from shmserve.core.events import Deploy, Refuse, Target
from shmserve.core.owners.rate_limiter import lacking
from shmserve.core.policy import ModelPolicy
from shmserve.core.records import Version
from shmserve.errors import InvalidRequest, NotFound
from shmserve.protocol.namespaces import namespace_of, plain
from shmserve.protocol.worker_messages import Load
from shmserve.repo.agents.chains import PreparedModel
from shmserve.repo.backends import BACKEND_PINS, DIRECTORY, PINS, SOURCE_FILE
from shmserve.repo.compile import (
    CoreSet,
    compile_instances,
    compile_policy,
    compile_scaling,
    compile_traffic,
    memory_estimate,
)
from shmserve.repo.config.complete import is_ensemble
from shmserve.repo.config.origins import as_text, origins
from shmserve.repo.config.schema import ModelConfig, as_triton_json, decode_config, encode_config
from shmserve.repo.parameters import IN_PLACE
from shmserve.repo.rules.ensembles import StepModel, check_graph
from shmserve.repo.rules.fields import completion_warnings, unknown_policies, verify_completed
from shmserve.repo.storage.generation import Generation
from shmserve.repo.storage.store import ScannedModel

CONFIG_BYTES = 4 << 20
"""Maximum size of a configuration that a worker has completed."""


class VersionSource(Struct, eq=False):
    """The files and configuration of one version. `generation` contains its files; None: it has none, or they are read
    in place. `written`, `config` and `completed`: the configuration as its owner wrote it, with the server's defaults,
    and as completed by its worker. `mark`: see `_mark`."""

    number: int
    model: str
    version: int
    origin: Path
    generation: Generation | None
    written: ModelConfig
    config: ModelConfig
    kind: str
    digest: str
    mark: object = None
    backend: BackendFiles | None = None
    completed: ModelConfig | None = None
    as_json: tuple[ModelConfig, msgspec.Raw] | None = None
    """A completed configuration, and its JSON."""
    config_digest: str | None = None
    """Digest of the configuration files; None if the configuration does not come from them."""
    target: Target | None = None
    """The last deployment."""
    kept: KeptConfig | None = None
    """The configuration that a later load without one reuses."""
    prepared: PreparedModel | None = None
    """The results of the model's repository agents, kept as long as this version may be loaded again."""
    tree: str = ""
    """See ModelReading."""
    warnings: tuple[str, ...] = ()
    """About its configuration."""


class Catalog:
    def __init__(
        self,
        repositories: Repositories,
        settings: dict[str, str],
        cores: CoreSet,
        resources: Sequence[tuple[str, int, int]] | None = None,
        worker_defaults: WorkerResources = DEFAULTS,
    ) -> None:
        """`settings` are passed to workers; `cores` are divided among them. `resources`: those of the rate limiter;
        None: the limiter is off. `worker_defaults` apply to models that do not override them."""
        self.repositories = repositories
        self._cores = cores
        self._worker_defaults = worker_defaults
        self._resources = resources
        self._settings = settings
        self._numbers = count(1)
        self._sources: dict[int, VersionSource] = {}
        self._latest: dict[tuple[str, int], int] = {}
        """(model, version) -> its last deployed source."""
        self._previous: dict[str, tuple[int, ...]] = {}
        """Model -> the sources that were served before the last load."""
        self._rejected: dict[str, frozenset[int]] = {}
        """Model -> the sources that a rollback replaced."""

    # ------------------------------------------------------------------------------------ deployment

    def adopt(self, reading: ModelReading, operation: int = 0) -> list[Deploy | Refuse]:
        """Events for the core: a Deploy, or Refuse with the reason if the model cannot be served."""
        scanned = reading.scanned
        reason = self._refusal_reason(scanned)
        if scanned.config is None or reason:
            return [Refuse(scanned.name, version, reason) for version in scanned.versions or (0,)]
        targets = tuple(self._target(reading, scanned.config, number) for number in scanned.versions)
        self._rejected.pop(scanned.name, None)
        self._set_latest(scanned.name, targets)
        traffic = compile_traffic(scanned.config)
        deploy = Deploy(scanned.name, targets, operation, present=scanned.present, traffic=traffic)
        return [deploy, *[Refuse(scanned.name, number, text) for number, text in scanned.missing.items()]]

    def _refusal_reason(self, scanned: ScannedModel) -> str:
        """Why the model cannot be served, including lacking resources of the rate limiter; "" if it can."""
        if scanned.problems:
            return "; ".join(scanned.problem_texts)
        if scanned.config is None:
            return "it has no configuration"
        if self._resources is None:
            return ""
        others = [
            target.instances
            for (model, _), number in self._latest.items()
            if model != scanned.name and (target := self._sources[number].target) is not None
        ]
        return lacking(compile_instances(scanned.config, self._cores), self._resources, chain.from_iterable(others))

    def failed_load(self, scanned: ScannedModel) -> str:
        """The error text for a load of this model; "" if it can be served. Uses Triton's wording, which distinguishes a
        bad configuration from versions that cannot be loaded."""
        reason = self._refusal_reason(scanned)
        if not reason:
            return ""
        if scanned.missing and len(scanned.problems) == len(scanned.missing):
            whys = (f"version {number} is at UNAVAILABLE state: {why}" for number, why in scanned.missing.items())
            return f"load failed for model '{scanned.name}': {'; '.join(whys)}"
        return f"failed to load '{scanned.name}': {reason}"

    def _target(self, reading: ModelReading, config: ModelConfig, number: int) -> Target:
        source = self._sources[self._source(reading, number)]
        if is_ensemble(config):
            source.completed = config
            policy = compile_policy(config, number, _folder_of(source))
            source.target = Target(number, source.number, (), policy)
        else:
            files = reading.snapshot.bytes_of_version(number) if reading.snapshot is not None else 0
            instances, scaling = compile_instances(config, self._cores), compile_scaling(config, self._cores)
            memory = memory_estimate(config, files)
            source.target = Target(number, source.number, instances, memory=memory, scaling=scaling)
        return source.target

    def _set_latest(self, model: str, targets: Iterable[Target]) -> None:
        for key in [key for key in self._latest if key[0] == model]:
            del self._latest[key]
        self._latest.update({(model, target.number): target.source for target in targets})

    def loaded(self) -> list[LoadedVersion]:
        """Versions made of files in the repository."""
        return [
            LoadedVersion(
                source.number,
                source.origin,
                source.version,
                source.digest,
                source.config_digest,
                source.backend.origin if source.backend is not None else None,
                source.backend.snapshot.digest() if source.backend is not None else "",
            )
            for source in self._sources.values()
            if source.digest and (source.generation is None or source.generation.folder != source.origin)
        ]

    # ------------------------------------------------------------------------------------ rollback

    def replaced(self, model: str, sources: Iterable[int]) -> None:
        """Keeps the sources that were served before a successful load, until the next load."""
        self._previous[model] = tuple(source for source in sources if source in self._sources)

    def previous(self, model: str, operation: int, served: Iterable[int]) -> Deploy:
        """A Deploy of the versions that were served before the last load. `served`: the sources that it replaces."""
        sources = self._previous.get(model)
        if not sources:
            raise NotFound(f"failed to load '{model}': it has no previous generation")
        self._rejected[model] = frozenset(served)
        targets = [target for source in sources if (target := self._sources[source].target) is not None]
        self._set_latest(model, targets)
        newest = max(sources, key=lambda source: self._sources[source].version)
        traffic = compile_traffic(self._sources[newest].config)
        return Deploy(model, tuple(targets), operation, traffic=traffic)

    def is_rejected(self, reading: ModelReading) -> bool:
        """Whether a rollback replaced the versions that were read."""
        rejected, scanned = self._rejected.get(reading.scanned.name), reading.scanned
        if not rejected or scanned.config is None:
            return False
        known = [self._find_source(scanned.name, number, _mark(reading, number)) for number in scanned.versions]
        return {source.number if source is not None else 0 for source in known} == rejected

    # ------------------------------------------------------------------------------------ findings

    def compose(self, number: int, versions: Iterable[Version]) -> str:
        """Why an ensemble cannot run with the models that are served now; "" if it can."""
        source = self._sources.get(number)
        if source is None:
            return "it has been replaced meanwhile"
        members: dict[str, StepModel] = {}
        own = namespace_of(source.model)
        numbers: dict[str, tuple[int, ...]] = {}
        for version in sorted(versions, key=lambda one: (namespace_of(one.model) == own, one.model, one.number)):
            member = self._sources.get(version.source)
            if member is not None and member.completed is not None:  # the latest version of its own namespace counts
                numbers[version.model] = (*numbers.get(version.model, ()), version.number)
                members[plain(version.model)] = StepModel(member.completed, numbers[version.model])
        problems = check_graph(source.config, members)
        return "; ".join(f"{problem.path}: {problem.text}" for problem in problems)

    def warnings(self, reading: ModelReading) -> list[tuple[str, str]]:
        """Findings for the model's owner, each with a hint; "" if the finding includes it."""
        findings = [(finding.relative, finding.hint) for finding in reading.findings]
        config = reading.scanned.config
        policies = unknown_policies(config, self._cores.policies) if config is not None else ()
        text = "unknown host policy '{}' (--host-policy): its instances use all cores"
        return findings + [(text.format(name), "") for name in policies]

    # ------------------------------------------------------------------------------------ sources of versions

    def _source(self, reading: ModelReading, version: int) -> int:
        """The number of the version's source: an existing one if nothing has changed, otherwise a new one."""
        scanned, override = reading.scanned, reading.override
        assert scanned.config is not None
        assert scanned.written is not None
        snapshot = reading.snapshot
        digest = snapshot.of_version(version) if snapshot is not None else ""
        config_digest = snapshot.of_configuration() if snapshot is not None and override is None else None
        mark = _mark(reading, version)
        kind = "override" if override is not None else "file" if scanned.file else ""
        kept = None
        if override is not None and override.folder is None and snapshot is not None:
            kept = KeptConfig(override, snapshot.digest())
        source = self._find_source(scanned.name, version, mark)
        if source is None:
            number, generation = next(self._numbers), reading.generations.get(version)
            source = self._sources[number] = VersionSource(
                number,
                scanned.name,
                version,
                scanned.path,
                generation,
                scanned.written,
                scanned.config,
                kind,
                digest,
                mark,
                reading.backend,
            )
        source.config_digest, source.kind, source.kept = config_digest, kind, kept
        source.prepared, source.tree = reading.prepared, reading.tree
        source.warnings = tuple(text for text, _ in self.warnings(reading))
        source.config, source.written = scanned.config, scanned.written
        source.completed = source.completed and _regrouped(source.completed, scanned.config)
        return source.number

    def _find_source(self, model: str, version: int, mark: object) -> VersionSource | None:
        """The latest source with this mark: the last deployed one, or one that is still served after a failed load."""
        same = [
            source
            for source in self._sources.values()
            if source.mark == mark and source.version == version and source.model == model
        ]
        return same[-1] if same else None

    def prune(self, live: Iterable[int]) -> None:
        """Drops unused sources, and thereby their files. `live` is read only if others than the latest and the previous
        sources exist."""
        unused = self._sources.keys() - {*self._latest.values(), *chain.from_iterable(self._previous.values())}
        for number in unused and unused.difference(live):
            del self._sources[number]

    def trees(self) -> set[str]:
        """The trees in the cache that versions from remote repositories use."""
        return {source.tree for source in self._sources.values()}

    def is_override(self, number: int) -> bool:
        """Whether the source's files or configuration came with a load call."""
        source = self._sources.get(number)
        return source is not None and source.kind == "override"

    def configs(self, sources: Iterable[int]) -> dict[int, ModelConfig]:
        """The configurations before workers completed them, of those of the sources that still exist."""
        return {number: self._sources[number].config for number in sources if number in self._sources}

    def kept_config(self, sources: Iterable[int]) -> KeptConfig | None:
        """The configuration that a load without one reuses. `sources`: those of the model's versions."""
        kept = [source.kept if (source := self._sources.get(number)) is not None else None for number in sources]
        return kept[0] if kept and kept.count(kept[0]) == len(kept) else None

    def forget(self, model: str) -> None:
        """Handles the removal of a model, so that a later load reads it again."""
        self._set_latest(model, ())
        self._previous.pop(model, None)
        self._rejected.pop(model, None)
        for source in self._sources.values():
            if source.model == model:
                source.mark = None

    # ------------------------------------------------------------------------------------ workers

    def load_order(self, spawn: Spawn) -> tuple[Load, int]:
        """The Load for a new worker, and its descriptor, which the caller closes."""
        source = self._sources[spawn.source]
        settings = self._settings
        if source.generation is not None and source.generation.pins:
            settings = settings | {PINS: source.generation.pins}
        if source.backend is not None and source.backend.generation is not None:
            settings = settings | {DIRECTORY: str(source.backend.folder.parent)}
            if source.backend.generation.pins:
                settings = settings | {BACKEND_PINS: source.backend.generation.pins}
        if (file := self.repositories.file_of(source.origin)) is not None:
            settings = settings | {SOURCE_FILE: str(file)}
        folder = str(_folder_of(source))
        load = Load(spawn.peer, spawn.model, spawn.version, spawn.instance.name, folder, settings)
        return load, config_descriptor(source.config)

    def worker_resources(self, spawn: Spawn) -> WorkerResources:
        source = self._sources[spawn.source]
        backend_folder = source.backend.folder if source.backend is not None else None
        return resources_of(source.config, _folder_of(source), self._worker_defaults, backend_folder)

    def copied_folders(self, spawn: Spawn) -> dict[Path, Path]:
        """The directories of the worker with files of the model and its backend -> those that their owners know."""
        source = self._sources[spawn.source]
        folders = {_folder_of(source): source.origin}
        if source.backend is not None:
            folders[source.backend.folder] = source.backend.origin
        return {copy: origin for copy, origin in folders.items() if copy != origin}

    def complete(self, number: int, data: bytes) -> tuple[ModelPolicy, list[str]]:
        """Stores the configuration as completed by a worker. Also returns warnings about changes that the owner may not
        expect."""
        source = self._sources[number]
        known = {*self.repositories.backends, source.config.backend}  # its own library may be its backend
        config = verify_completed(decode_config(data), backends=known, gpus=self.repositories.gpus)
        if config.name != plain(source.model):
            raise InvalidRequest(f"the model changed its own name to '{config.name}', which is not allowed")
        policy = compile_policy(config, source.version)
        is_complete = source.completed is not None
        source.completed = config
        warnings = [] if is_complete else completion_warnings(source.written, config)
        source.warnings += tuple(warnings)
        return policy, warnings

    # ------------------------------------------------------------------------------------ queries

    def warnings_about(self, number: int) -> tuple[str, ...]:
        """What was found in the configuration of a source when it was loaded."""
        source = self._sources.get(number)
        return source.warnings if source is not None else ()

    def config(self, number: int) -> ModelConfig:
        source = self._sources.get(number)
        if source is None or source.completed is None:
            name = f"model '{source.model}'" if source is not None else "a model"
            raise NotFound(
                f"the configuration of {name} is available only after it has loaded; `shmserve models` shows its state"
            )
        return source.completed

    def config_json(self, number: int) -> msgspec.Raw:
        """The configuration as JSON. Encoded once, as each generate and OpenAI-compatible request needs it."""
        config = self.config(number)
        source = self._sources[number]
        if source.as_json is None or source.as_json[0] is not config:
            source.as_json = config, msgspec.Raw(msgspec.json.encode(as_triton_json(config)))
        return source.as_json[1]

    def origins(self, number: int) -> tuple[dict[str, str], str]:
        """The origin of each value of the configuration, and the configuration as annotated text."""
        final = self.config(number)
        source = self._sources[number]
        by_field = origins(source.written, final, source.config, source.kind or "file")
        return by_field, as_text(final, by_field)


def _mark(reading: ModelReading, version: int) -> object:
    """A value that is equal for readings that result in the same version."""
    assert reading.scanned.config is not None
    config = reading.scanned.config
    parameters = {key: value for key, value in config.parameters.items() if key not in IN_PLACE}
    content = replace(config, instance_group=(), version_policy=None, parameters=parameters)
    digest = reading.snapshot.of_version(version) if reading.snapshot is not None else ""
    backend_digest = reading.backend.snapshot.digest() if reading.backend is not None else ""
    return encode_config(content), digest, str(reading.scanned.path), backend_digest


def _folder_of(source: VersionSource) -> Path:
    """The model's directory as its workers see it."""
    return source.generation.folder if source.generation is not None else source.origin


def _regrouped(completed: ModelConfig, config: ModelConfig) -> ModelConfig:
    """The completed configuration with the current values of settings that change without a reload."""
    parameters = {key: value for key, value in completed.parameters.items() if key not in IN_PLACE}
    parameters |= {key: value for key, value in config.parameters.items() if key in IN_PLACE}
    return replace(
        completed, instance_group=config.instance_group, version_policy=config.version_policy, parameters=parameters
    )


def config_descriptor(config: ModelConfig) -> int:
    """A memfd with the configuration, which may exceed the maximum message size."""
    data = encode_config(config)
    descriptor = os.memfd_create("shmserve-config", os.MFD_CLOEXEC)
    os.pwrite(descriptor, data, 0)
    return descriptor


def read_descriptor(descriptor: int) -> bytes:
    """Reads and closes a memfd that a worker has sent. Raises InvalidRequest."""
    try:
        return os.pread(descriptor, CONFIG_BYTES, 0)
    except OSError as error:  # for example a pipe
        raise InvalidRequest(f"the descriptor of a configuration must be a memfd: {error.strerror}") from error
    finally:
        os.close(descriptor)
