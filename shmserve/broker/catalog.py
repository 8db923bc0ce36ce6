"""The models that there are: what was read from the repositories, what of it is deployed, and what workers completed
it to.

The rule of the file: reading (`read`, `read_all`) touches nothing but disk, and runs in a thread; everything else
belongs to the loop.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from shmserve.broker.overrides import Given
from shmserve.broker.terms import NOTHING, Terms, terms_of
from shmserve.core.effects import Spawn
from shmserve.core.events import Deploy, Event, Refuse, Target
from shmserve.core.limiter import lacking
from shmserve.core.policy import InstanceSpec, ModelPolicy
from shmserve.core.versions import Version
from shmserve.errors import InvalidRequest, NotFound, ServeError
from shmserve.messages import Load
from shmserve.repo.backends import DIRECTORY, installed
from shmserve.repo.compile import Cores, compile_instances, compile_policy, unknown_policies
from shmserve.repo.complete import is_ensemble
from shmserve.repo.completed import surprises, verify
from shmserve.repo.ensembles import Member, check_graph
from shmserve.repo.origins import as_text, origins
from shmserve.repo.schema import ModelConfig, decode_config, encode_config
from shmserve.repo.snapshot import Snapshot, take
from shmserve.repo.store import Found, find_model, model_names, scan_model

SNAPSHOT = "snapshot"
"""The setting that tells a worker which files it should have found."""


class Reading(NamedTuple):
    """A model as it was on disk. `snapshot` None: it could not be looked at, or is in two repositories."""

    found: Found
    snapshot: Snapshot | None = None
    override: Given | None = None


class Source(Struct, eq=False):
    """What one version is made of. `completed` is what its worker made of the configuration; `mark` tells whether
    something else would be made of what is there now."""

    number: int
    model: str
    version: int
    folder: Path
    given: ModelConfig
    config: ModelConfig
    kind: str
    digest: str
    mark: object = None
    override: Path | None = None
    completed: ModelConfig | None = None


class Catalog:
    def __init__(
        self,
        repositories: Sequence[Path],
        settings: dict[str, str],
        cores: Cores,
        config_name: str = "",
        verified: bool = False,
        resources: Sequence[tuple[str, int, int]] | None = None,
        terms: Terms = NOTHING,
        gpus: Collection[int] = (),
    ) -> None:
        """`settings` go to the workers; `cores` are divided among them. `verified`: workers see to it that the files
        do not change while they load them. `resources`: what the rate limiter was given; None: there is none. `terms`:
        of the processes of models that say nothing else. `gpus`: the numbers of those that models may use."""
        self._cores = cores
        self._gpus = gpus
        self._terms = terms
        self._resources = resources
        self._repositories = repositories
        self._settings = settings
        self._config_name = config_name
        self._verified = verified
        self._backends = installed(settings.get(DIRECTORY, ""))
        self._numbers = count(1)
        self._sources: dict[int, Source] = {}
        self._latest: dict[tuple[str, int], int] = {}
        """Model and version -> the source that it was last to be made of."""
        self.names: Collection[str] = ()
        """The models in the repositories, when they were last looked at."""

    # ------------------------------------------------------------------------------------ reading, in a thread

    def names_on_disk(self) -> dict[str, list[Path]]:
        return model_names(self._repositories)

    def names_now(self) -> Collection[str]:
        """The names on disk; those of the last look, while a repository cannot be read."""
        try:
            return self.names_on_disk()
        except (ServeError, OSError):
            return self.names

    def read(self, name: str, given: Given | None = None) -> Reading:
        """The model of that name, or what was given in its place. Errors are those of `find_model`."""
        folder = (
            given.folder if given is not None and given.folder is not None else find_model(self._repositories, name)
        )
        try:
            return self.read_folder(folder, given)
        except BaseException:
            if given is not None and given.folder is not None:
                remove([given.folder])
            raise

    def read_folder(self, folder: Path, given: Given | None = None) -> Reading:
        """What is read twice with nothing changed between is consistent; what changes all the time is seen as it is."""
        override = given.config if given is not None else None
        before = _look(folder)
        for _ in range(3):
            found = scan_model(
                folder, backends=self._backends, gpus=self._gpus, config_name=self._config_name, override=override
            )
            after = _look(folder)
            if after == before:
                break
            before = after
        return Reading(found, before, given)

    def read_all(self) -> list[Reading]:
        readings = []
        for name, folders in self.names_on_disk().items():
            readings.append(self.read_folder(folders[0]) if len(folders) == 1 else self.read_doubled(name, folders))
        return readings

    def read_doubled(self, name: str, folders: Sequence[Path]) -> Reading:
        text = f"model appears in two or more repositories: '{name}' is in {len(folders)} of them; keep one"
        return Reading(Found(name, folders[0], None, (), (text,), ()))

    # ------------------------------------------------------------------------------------ deploying

    def adopt(self, reading: Reading, operation: int = 0) -> list[Event]:
        """What the core is to be told. Of a model that cannot be served: why, for who asks for it."""
        found = reading.found
        reason = why_not(found)
        if found.config is None or reason:
            return [(0, Refuse(found.name, version, reason)) for version in found.versions or (0,)]
        instances = compile_instances(found.config, self._cores)
        lack = lacking(instances, self._resources) if self._resources is not None else ""
        if lack:
            return [(0, Refuse(found.name, version, lack)) for version in found.versions or (0,)]
        targets = tuple(self._target(reading, found.config, number, instances) for number in found.versions)
        for key in [key for key in self._latest if key[0] == found.name and key[1] not in found.versions]:
            del self._latest[key]
        events: list[Event] = [(0, Deploy(found.name, targets, operation))]
        events += [(0, Refuse(found.name, number, text)) for number, text in found.missing.items()]
        return events

    def _target(
        self, reading: Reading, config: ModelConfig, number: int, instances: tuple[InstanceSpec, ...]
    ) -> Target:
        source = self._source(reading, number)
        if not is_ensemble(config):
            return Target(number, source, instances)
        self._sources[source].completed = config
        return Target(number, source, (), compile_policy(config, number))

    def compose(self, number: int, versions: Iterable[Version]) -> str:
        """Why an ensemble cannot be run with the models that are served now; "" if it can."""
        source = self._sources.get(number)
        if source is None:
            return "it has been replaced meanwhile"
        members: dict[str, Member] = {}
        for version in sorted(versions, key=lambda version: version.number):  # the latest counts
            made = self._sources.get(version.source)
            if made is not None and made.completed is not None:
                others = members[version.model].versions if version.model in members else ()
                members[version.model] = Member(made.completed, (*others, version.number))
        problems = check_graph(source.config, members)
        return "; ".join(f"{problem.path}: {problem.text}" for problem in problems)

    def warnings(self, found: Found) -> list[str]:
        """What its owner should know, though it can be served."""
        if found.config is None:
            return list(found.warnings)
        groups = found.config.instance_group
        passive = bool(groups) and all(group.passive for group in groups)
        return [
            *found.warnings,
            *(["all its instances are passive: no request of it will be answered"] if passive else []),
            *(
                f"host policy '{name}' is not known (--host-policy): its instances use all cores"
                for name in unknown_policies(found.config, self._cores)
            ),
        ]

    def _source(self, reading: Reading, version: int) -> int:
        """The number of what the version is made of: the same as before, if that has not changed."""
        found, given = reading.found, reading.override
        assert found.config is not None
        assert found.given is not None
        content = replace(found.config, instance_group=(), version_policy=None)
        digest = reading.snapshot.of_version(version) if reading.snapshot is not None else ""
        mark = (encode_config(content), digest, str(found.path), given is not None)
        source = self._known(found.name, version, mark)
        if source is not None:
            self._latest[found.name, version] = source.number
            source.config, source.given = found.config, found.given
            source.completed = source.completed and _regrouped(source.completed, found.config)
            return source.number
        number = next(self._numbers)
        kind = "override" if given is not None else "file" if found.file else ""
        override = given.folder if given is not None else None
        self._sources[number] = Source(
            number, found.name, version, found.path, found.given, found.config, kind, digest, mark, override
        )
        self._latest[found.name, version] = number
        return number

    def _known(self, model: str, version: int, mark: object) -> Source | None:
        """The source that is made of this already: the last one, or one that goes on because the last one failed."""
        same = [
            source
            for source in self._sources.values()
            if source.mark == mark and source.version == version and source.model == model
        ]
        return same[-1] if same else None

    def prune(self, live: Collection[int]) -> list[Path]:
        """Forgets sources that nothing is made of any more. Returns the directories that were made for them."""
        wanted = {*self._latest.values(), *live}
        dropped = [source for number, source in self._sources.items() if number not in wanted]
        for source in dropped:
            del self._sources[source.number]
        kept = {source.override for source in self._sources.values()}
        return [
            folder for folder in {source.override for source in dropped} if folder is not None and folder not in kept
        ]

    def is_override(self, number: int) -> bool:
        """A load call brought it, or its configuration."""
        source = self._sources.get(number)
        return source is not None and source.kind == "override"

    def forget(self, model: str) -> None:
        """It is not served any more: when it is loaded again, it is read anew."""
        for key in [key for key in self._latest if key[0] == model]:
            del self._latest[key]
        for source in self._sources.values():
            if source.model == model:
                source.mark = None

    # ------------------------------------------------------------------------------------ workers

    def load_order(self, spawn: Spawn) -> tuple[Load, int]:
        """The Load for a new worker, and the descriptor that goes with it, which the caller closes."""
        source = self._sources[spawn.source]
        settings = self._settings
        if self._verified and source.override is None:
            settings = settings | {SNAPSHOT: source.digest}
        load = Load(spawn.peer, spawn.model, spawn.version, spawn.instance.name, str(source.folder), settings)
        return load, config_descriptor(source.config)

    def terms(self, spawn: Spawn) -> Terms:
        source = self._sources[spawn.source]
        return terms_of(source.config, source.folder, self._terms)

    def complete(self, number: int, data: bytes) -> tuple[ModelPolicy, list[str]]:
        """Takes what a worker has completed the configuration to. Also what its owner may not have expected."""
        source = self._sources[number]
        config = verify(decode_config(data), backends=self._backends, gpus=self._gpus)
        if config.name != source.model:
            raise InvalidRequest(f"the model has changed its own name to '{config.name}', which it may not")
        policy = compile_policy(config, source.version)
        said = source.completed is not None
        source.completed = config
        return policy, [] if said else surprises(source.given, config)

    # ------------------------------------------------------------------------------------ questions

    def config(self, number: int) -> ModelConfig:
        source = self._sources.get(number)
        if source is None or source.completed is None:
            raise NotFound("the configuration of a model is known when it has loaded")
        return source.completed

    def origins(self, number: int) -> tuple[dict[str, str], str]:
        """Where each value of the configuration comes from, and all of it as text that says so."""
        final = self.config(number)
        source = self._sources[number]
        found = origins(source.given, final, source.config, source.kind or "file")
        return found, as_text(final, found)


def why_not(found: Found) -> str:
    """Why the model cannot be served; "" if it can."""
    if found.problems:
        return "; ".join(found.problems)
    return "" if found.config is not None else "it has no configuration"


def _regrouped(completed: ModelConfig, config: ModelConfig) -> ModelConfig:
    """What a worker completed, with the parts that change in place as they are now."""
    return replace(completed, instance_group=config.instance_group, version_policy=config.version_policy)


def _look(folder: Path) -> Snapshot | None:
    try:
        return take(folder)
    except (OSError, InvalidRequest):  # the scan says what is wrong with it
        return None


def config_descriptor(config: ModelConfig) -> int:
    """A memfd with the configuration: it may be larger than any message."""
    descriptor = os.memfd_create("shmserve-config", os.MFD_CLOEXEC)
    os.pwrite(descriptor, encode_config(config), 0)
    return descriptor


def read_descriptor(descriptor: int, limit: int = 4 << 20) -> bytes:
    """All of a memfd that a worker has sent, and closes it."""
    try:
        return os.pread(descriptor, limit, 0)
    finally:
        os.close(descriptor)


def remove(folders: Sequence[Path]) -> None:
    """Directories that were made for overrides. In a thread."""
    for folder in folders:
        shutil.rmtree(folder.parent, ignore_errors=True)
