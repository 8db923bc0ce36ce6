"""Records of a model: its versions, and the operations that change them."""

from __future__ import annotations

from msgspec import Struct, field

from shmserve.core.events import Target
from shmserve.core.records import Instance, Version
from shmserve.core.states import UNLOADED, VersionState
from shmserve.core.stats.statistics import Loads
from shmserve.core.traffic import UNSET, Traffic
from shmserve.errors import NotFound, Unavailable


class Operation(Struct, eq=False):
    """A Deploy or Restart in progress: what it waits for, and what is removed when it completes."""

    numbers: list[int]
    """Operations to report to; several if the same change was requested again while it was in progress."""
    targets: tuple[Target, ...]
    loads_while_served: bool
    """The model is served during the operation."""
    restart: bool = False
    """The served versions are replaced by new generations of the same source, which take over their requests."""
    loading: dict[Version, None] = {}
    starting: dict[Instance, Version] = {}
    """Instances being added to versions that are served."""
    added: list[tuple[Version, Instance]] = []
    """Instances that end if the operation fails, including those of operations that it has overtaken."""
    surplus: list[tuple[Version, Instance]] = []
    dropped: list[int] = []
    """Versions that are no longer wanted."""
    deleted: frozenset[int] = frozenset()
    """The dropped versions to forget, because they are no longer in the repository."""
    failures: list[str] = []
    traffic: Traffic | None = None
    """The traffic of the configuration; None: no change."""
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
    """The operations to report to when done."""
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
    traffic: Traffic = UNSET
    comparisons: dict[tuple[int, int], dict[str, int]] = {}
    """(version that answered, shadow) -> result of the comparison of their answers -> requests."""
    traffic_set: bool = False
    """An operator has set the traffic, so loading a model does not change it."""

    @property
    def is_wanted(self) -> bool:
        """True if the model is loaded, or should be, so that a name without a namespace may mean it."""
        versions = (*self.versions.values(), *self.coming.values())
        unwanted = (version.reason == UNLOADED or version.state is VersionState.UNLOADING for version in versions)
        return self.operation is not None or bool(self.reason) or not all(unwanted)

    def default(self) -> Version | None:
        """The version that gets most of the requests that name none: the highest READY version, unless shares are
        set."""
        weights = self.weights()
        return self.versions[weights[0][0]] if weights else None

    def weights(self, traffic: Traffic | None = None) -> list[tuple[int, int]]:
        """The versions among which requests that name none are divided, or would be divided with other traffic."""
        return (traffic or self.traffic).weights([number for number in self.versions if self.is_ready(number)])

    def shares_now(self, traffic: Traffic | None = None) -> dict[int, float]:
        """The percentage of these requests that each version gets, the largest first."""
        weights = self.weights(traffic)
        total = sum(weight for _, weight in weights)
        return {number: round(100 * weight / total, 1) for number, weight in weights}

    def is_ready(self, number: int) -> bool:
        version = self.versions.get(number)
        return version is not None and version.state is VersionState.READY

    def default_version(self) -> Version:
        """The version that serves requests that name none. Raises if there is none."""
        default = self.default()
        if default is not None:
            return default
        versions = self.versions.values()
        why = next((version.reason for version in versions if version.reason), self.reason)
        loading = any(version.state is VersionState.LOADING for version in versions)
        back = any(version.will_recover for version in versions)
        if self.traffic.shares and any(version.state is VersionState.READY for version in versions):
            why = "its READY versions have a share of 0 % (shmserve traffic)"
        note = "; it is loading" if loading else f": {why}" if why else ""
        raise (Unavailable if loading or back else NotFound)(
            f"Request for unknown model: '{self.name}' has no available versions{note}"
        )

    def version(self, number: int) -> Version:
        """The version with this number. Raises if it does not serve requests."""
        version = self.versions.get(number)
        if version is None:
            raise NotFound(f"Request for unknown model: '{self.name}' version {number} is not found")
        if version.state is not VersionState.READY:
            why = f": {version.reason}" if version.reason else f", it is {version.state.value}"
            raise Unavailable(f"Request for unknown model: '{self.name}' version {number} is not at ready state{why}")
        return version

    def loading_version(self, number: int) -> Version | None:
        """The version with this number, or for 0 the future default version, if it is loading."""
        loading = {n: version for n, version in self.versions.items() if version.state is VersionState.LOADING}
        if not number:
            weights = self.traffic.weights(list(loading))
            number = weights[0][0] if weights else 0
        return loading.get(number)

    @property
    def loads_while_served(self) -> bool:
        """True if the model has served versions while others are loading."""
        return self.operation is not None and self.operation.loads_while_served

    def generations(self) -> list[Version]:
        return [*self.versions.values(), *self.coming.values(), *self.leaving]
