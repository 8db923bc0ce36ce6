"""A model: its versions, and the operation that changes them."""

from __future__ import annotations

from msgspec import Struct, field

from shmserve.core.events import Target
from shmserve.core.records import Instance, Version
from shmserve.core.states import VersionState
from shmserve.core.stats.statistics import Loads


class Operation(Struct, eq=False):
    """A Deploy or Restart under way: what it still waits for, and what goes when nothing of that is left."""

    numbers: list[int]
    """Who is to be told; more than one if the same was asked again meanwhile."""
    targets: tuple[Target, ...]
    beside: bool
    """Something is served meanwhile."""
    restart: bool = False
    """What is served is replaced by itself, which takes its requests."""
    loading: dict[Version, None] = {}
    starting: dict[Instance, Version] = {}
    """Those added to versions that are served."""
    added: list[tuple[Version, Instance]] = []
    surplus: list[tuple[Version, Instance]] = []
    dropped: list[int] = []
    """Versions that are not to be served any more."""
    failures: list[str] = []
    traceback: str = ""
    """Of the model, for the log."""


class FailedChange(Struct, frozen=True):
    """A load or restart that has failed, or a state of the files that cannot be served, and when that was found."""

    reason: str
    at: int


class Unloading(Struct, eq=False):
    """An Unload under way."""

    number: int
    versions: list[Version]


class Departure(Struct, eq=False):
    """Instances that a change has taken from versions that go on: it is over when their processes have ended. Those
    that stay for sequences or streams are not waited for."""

    numbers: list[int]
    """The operations that are told then."""
    instances: list[Instance]


class Model(Struct, eq=False):
    """All versions of one name that are or were known."""

    name: str
    versions: dict[int, Version] = {}
    """What each number stands for now."""
    coming: dict[int, Version] = {}
    """Generations that will take over from those in `versions`."""
    leaving: list[Version] = []
    """Generations that were replaced and still have something to finish, or a process that has not ended."""
    reason: str = ""
    failed: FailedChange | None = None
    """The last change, if it has failed."""
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
        """What loads now is loaded beside versions that are served."""
        return self.operation is not None and self.operation.beside

    def generations(self) -> list[Version]:
        return [*self.versions.values(), *self.coming.values(), *self.leaving]
