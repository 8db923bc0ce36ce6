"""Records of a model: its versions, and the operations that change them."""

from __future__ import annotations

from msgspec import Struct, field

from shmserve.core.events import Target
from shmserve.core.records import Instance, Version
from shmserve.core.states import VersionState
from shmserve.core.stats.statistics import Loads


class Operation(Struct, eq=False):
    """A Deploy or Restart in progress: what it waits for, and what is removed when it completes."""

    numbers: list[int]
    """Operations to report to; several if the same change was requested again meanwhile."""
    targets: tuple[Target, ...]
    beside: bool
    """The model is served meanwhile."""
    restart: bool = False
    """The served versions are replaced by new generations of the same source, which take over their requests."""
    loading: dict[Version, None] = {}
    starting: dict[Instance, Version] = {}
    """Instances being added to versions that are served."""
    added: list[tuple[Version, Instance]] = []
    surplus: list[tuple[Version, Instance]] = []
    dropped: list[int] = []
    """Versions that are no longer wanted."""
    failures: list[str] = []
    traceback: str = ""
    """The model's traceback, for the log."""


class FailedChange(Struct, frozen=True):
    """A failed load or restart, or files that cannot be served, with the time of the failure."""

    reason: str
    at: int


class Unloading(Struct, eq=False):
    """An Unload in progress."""

    number: int
    versions: list[Version]


class Departure(Struct, eq=False):
    """Instances removed from versions that continue: done when their processes have ended. Instances kept for sequences
    or streams are not waited for."""

    numbers: list[int]
    """The operations to report to then."""
    instances: list[Instance]


class Model(Struct, eq=False):
    """All versions of a name that exist or have existed."""

    name: str
    versions: dict[int, Version] = {}
    """Number -> the current generation."""
    coming: dict[int, Version] = {}
    """Generations that will replace those in `versions`."""
    leaving: list[Version] = []
    """Replaced generations that have work to finish, or a process that has not ended."""
    reason: str = ""
    failed: FailedChange | None = None
    """The last change, if it failed."""
    operation: Operation | None = None
    unloading: list[Unloading] = []
    departures: list[Departure] = []
    loads: Loads = field(default_factory=Loads)

    def default(self) -> Version | None:
        """The highest version that is READY."""
        ready = [version for version in self.versions.values() if version.state is VersionState.READY]
        return max(ready, key=lambda version: version.number, default=None)

    @property
    def is_served_meanwhile(self) -> bool:
        """Versions that are loading do so next to versions that are served."""
        return self.operation is not None and self.operation.beside

    def generations(self) -> list[Version]:
        return [*self.versions.values(), *self.coming.values(), *self.leaving]
