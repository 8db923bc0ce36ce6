"""The rate limiter: an instance runs a batch only while it holds the resources that it needs.

Resources are named counters, either one for each device or one shared by all instances. Of the waiting instances, the
one with the fewest batches x turn goes first: with turn 2 it runs half as often as with turn 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shmserve.core.policy import InstanceSpec, Resource
from shmserve.core.records import Instance, Version

SHARED = -1
ANY = -2
ResourceKey = tuple[str, int]
"""A resource's name and its device; SHARED: one for all devices."""


class Limiter:
    """`configured`: amounts by name and device (ANY: each device). As in Triton, a shared resource gets the largest
    amount configured for its name, whatever the device. A name without a configured amount has as much as the instance
    that needs most of it."""

    def __init__(self, configured: Iterable[tuple[str, int, int]]) -> None:
        self._configured: dict[str, list[tuple[int, int]]] = {}
        for name, device, count in configured:
            self._configured.setdefault(name, []).append((device, count))
        self._required: dict[ResourceKey, int] = {}
        self._used: dict[ResourceKey, int] = {}
        self._running: dict[Instance, tuple[Resource, ...]] = {}
        self._executions: dict[Instance, int] = {}
        self._lenders: dict[Instance, None] = {}
        self.waiting: dict[Version, None] = {}
        """Versions with queued requests and an idle instance that lacks resources."""

    def register(self, spec: InstanceSpec) -> None:
        """Registers an instance. Resets all counters, so that the new instance does not get precedence for long."""
        for resource in spec.resources:
            key = _key_of(spec, resource)
            self._required[key] = max(self._required.get(key, 0), resource.count)
        self._executions.clear()

    def total(self, key: ResourceKey) -> int:
        name, device = key
        amounts = self._configured.get(name)
        if amounts is None:
            return self._required.get(key, 0)
        return max((count for place, count in amounts if device == SHARED or place in (device, ANY)), default=0)

    def acquire(self, version: Version, instance: Instance) -> bool:
        """Takes all resources of the instance, or none."""
        spec = instance.spec
        for resource in spec.resources:
            key = _key_of(spec, resource)
            if self._used.get(key, 0) + resource.count > self.total(key):
                self.waiting[version] = None
                return False
        for resource in spec.resources:
            key = _key_of(spec, resource)
            self._used[key] = self._used.get(key, 0) + resource.count
        self._running[instance] = spec.resources
        self._executions[instance] = self._executions.get(instance, 0) + 1
        return True

    def release(self, instance: Instance) -> list[Version]:
        """Releases the resources of an idle instance. Returns the versions that may have enough resources now."""
        self._lenders.pop(instance, None)
        for resource in self._running.pop(instance, ()):
            self._used[_key_of(instance.spec, resource)] -= resource.count
        waiting, self.waiting = list(self.waiting), {}
        return waiting

    def take_again(self, instance: Instance) -> None:
        """The instance had lent its resources and now continues, even if others hold them. Until those finish, the
        limit is exceeded and no other instance starts."""
        resources = instance.spec.resources
        for resource in resources:
            key = _key_of(instance.spec, resource)
            self._used[key] = self._used.get(key, 0) + resource.count
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
        used: dict[ResourceKey, int] = {}
        again: dict[ResourceKey, int] = {}
        for instance, resources in self._running.items():
            assert instance.running is not None, instance.details()
            for resource in resources:
                key = _key_of(instance.spec, resource)
                used[key] = used.get(key, 0) + resource.count
                again[key] = again.get(key, 0) + resource.count * (instance in self._lenders)
        assert used == {key: count for key, count in self._used.items() if count}
        for key, count in used.items():
            assert count - again[key] <= self.total(key), f"{count} of {key} in use"


def _key_of(spec: InstanceSpec, resource: Resource) -> ResourceKey:
    return resource.name, SHARED if resource.shared else spec.device


def lacking(
    specs: Sequence[InstanceSpec], configured: Iterable[tuple[str, int, int]], others: Iterable[InstanceSpec] = ()
) -> str:
    """Why instances like these could never run, in Triton's words; "" if they can. `others`: the instances of other
    models."""
    limiter = Limiter(configured)
    shared: dict[str, tuple[bool, str]] = {}
    for spec in (*others, *specs):
        limiter.register(spec)
        for resource in spec.resources:
            is_global, user = shared.setdefault(resource.name, (resource.shared, spec.name))
            if is_global is not resource.shared:
                return (
                    f'Resource "{resource.name}" is present as both global and device-specific resource in the model '
                    f"configuration. It is global for instance '{user if is_global else spec.name}' and "
                    f"device-specific for instance '{spec.name if is_global else user}'"
                )
    for spec in specs:
        for resource in spec.resources:
            total = limiter.total(_key_of(spec, resource))
            if total < resource.count:
                return (
                    f'Resource count for "{resource.name}" is limited to {total} which will prevent scheduling of one '
                    f"or more model instances, the minimum required count is {resource.count} "
                    f"(--rate-limit-resource, instance '{spec.name}')"
                )
    return ""
