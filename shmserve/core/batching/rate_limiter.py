"""The rate limiter: an instance runs a batch only while it holds the resources that it needs.

Resources are named counters, either one for each device or one shared by all instances. Of the waiting instances, the
one with the fewest batches x turn goes first: with turn 2 it runs half as often as with turn 1.
"""

from __future__ import annotations

from collections.abc import Iterable

from shmserve.core.policy import InstanceSpec, Resource
from shmserve.core.records import Instance, Version

SHARED = -1
ANY = -2
Place = tuple[str, int]
"""A resource's name and its device; SHARED: one for all devices."""


class Limiter:
    """`given`: configured amounts, by name and device (ANY: each device). The default is the largest amount that one
    instance needs."""

    def __init__(self, given: Iterable[tuple[str, int, int]] = ()) -> None:
        self._given = {(name, device): count for name, device, count in given}
        self._required: dict[Place, int] = {}
        self._used: dict[Place, int] = {}
        self._running: dict[Instance, tuple[Resource, ...]] = {}
        self._executions: dict[Instance, int] = {}
        self._lenders: dict[Instance, None] = {}
        self.waiting: dict[Version, None] = {}
        """Versions with queued requests and an idle instance that lacks resources."""

    def know(self, spec: InstanceSpec) -> None:
        """Registers an instance. Resets all counters, so that the new instance does not get precedence for long."""
        for resource in spec.resources:
            place = _place(spec, resource)
            self._required[place] = max(self._required.get(place, 0), resource.count)
        self._executions.clear()

    def total(self, place: Place) -> int:
        name, device = place
        given = self._given.get(place)
        if given is None and device != SHARED:
            given = self._given.get((name, ANY))
        return self._required.get(place, 0) if given is None else given

    def acquire(self, version: Version, instance: Instance) -> bool:
        """Takes all resources of the instance, or none."""
        spec = instance.spec
        for resource in spec.resources:
            place = _place(spec, resource)
            if self._used.get(place, 0) + resource.count > self.total(place):
                self.waiting[version] = None
                return False
        for resource in spec.resources:
            place = _place(spec, resource)
            self._used[place] = self._used.get(place, 0) + resource.count
        self._running[instance] = spec.resources
        self._executions[instance] = self._executions.get(instance, 0) + 1
        return True

    def release(self, instance: Instance) -> list[Version]:
        """Releases the resources of an idle instance. Returns the versions that may have enough resources now."""
        self._lenders.pop(instance, None)
        for resource in self._running.pop(instance, ()):
            self._used[_place(instance.spec, resource)] -= resource.count
        found = list(self.waiting)
        self.waiting.clear()
        return found

    def take_again(self, instance: Instance) -> None:
        """The instance had lent its resources and now continues, even if others hold them. Until those finish, the
        limit is exceeded and no other instance starts."""
        resources = instance.spec.resources
        for resource in resources:
            place = _place(instance.spec, resource)
            self._used[place] = self._used.get(place, 0) + resource.count
        self._running[instance] = resources
        self._lenders[instance] = None

    def rank(self, instance: Instance) -> tuple[int, int]:
        """The lowest rank goes first; among equals, the smaller turn."""
        turn = instance.spec.turn
        return (self._executions.get(instance, 0) + 1) * turn, turn

    def first(self, versions: Iterable[Version]) -> Version:
        """The version whose instance has the lowest rank."""
        return min(versions, key=lambda version: min(map(self.rank, version.idle), default=(0, 0)))

    def check(self) -> None:
        used: dict[Place, int] = {}
        again: dict[Place, int] = {}
        for instance, resources in self._running.items():
            assert instance.running is not None, instance.story()
            for resource in resources:
                place = _place(instance.spec, resource)
                used[place] = used.get(place, 0) + resource.count
                again[place] = again.get(place, 0) + resource.count * (instance in self._lenders)
        assert used == {place: count for place, count in self._used.items() if count}
        for place, count in used.items():
            assert count - again[place] <= self.total(place), f"{count} of {place} in use"


def _place(spec: InstanceSpec, resource: Resource) -> Place:
    return resource.name, SHARED if resource.shared else spec.device


def lacking(specs: Iterable[InstanceSpec], given: Iterable[tuple[str, int, int]]) -> str:
    """Why instances like these could never run; "" if they can."""
    limiter = Limiter(given)
    found = list(specs)
    for spec in found:
        limiter.know(spec)
    for spec in found:
        for resource in spec.resources:
            total = limiter.total(_place(spec, resource))
            if total < resource.count:
                return (
                    f"instance '{spec.name}' needs {resource.count} of resource '{resource.name}', but there are only "
                    f"{total} (--rate-limit-resource)"
                )
    return ""
