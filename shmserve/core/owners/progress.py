"""What the lifecycle of versions and instances has in progress: loads, changes and grants of memory."""

from __future__ import annotations

from collections import deque

from msgspec import Struct, field

from shmserve.core.policy import InstanceSpec
from shmserve.core.records import Instance, Version


class Loading(Struct, eq=False):
    """Loads that run or wait, and what forbids them."""

    queue: deque[tuple[Version, Instance]] = field(default_factory=deque)
    """Instances queued to load."""
    running: dict[Instance, None] = {}
    """Instances that are loading and count towards `Limits.loading`."""
    unhealthy_devices: dict[int, str] = {}
    """GPU -> why no instance may run on it."""
    turns: dict[str, int] = {}
    """User -> when a version was last woken for the user, the longest ago first."""
    blocked: list[tuple[Version, Instance]] = []
    """Instances that were queued to load, but whose GPU is unhealthy."""

    def forbids(self, spec: InstanceSpec) -> str:
        """Why no instance of this kind may run on its device; "": it may."""
        if not self.unhealthy_devices or not spec.on_gpu:
            return ""
        return self.unhealthy_devices.get(spec.device, "")


class Changes(Struct, eq=False):
    """Work lists of reloads, restarts, unloads and resizes."""

    unloading_versions: dict[Version, None] = {}
    """Versions that accept no new requests, and are removed once their remaining requests are answered."""
    replaced_versions: list[tuple[Version, Version]] = []
    """Versions that restarts have replaced, each with its successor."""
    replaced_instances: list[tuple[Version, Instance]] = []
    """Instances that restarts have replaced, of versions that continue."""
    joined: list[tuple[Version, Instance]] = []
    """Instances added by `scaling.join` that are now READY or could not load (FAILED)."""
    forced_unloads: list[Version] = []
    """Versions to unload by force at the end of the turn."""
    retiring_instances: dict[Instance, Version] = {}
    """Instances that their versions no longer need, kept until their sequences have ended."""
    to_sleep: dict[Version, bool] = {}
    """Versions that go to sleep as soon as nothing runs on them, not even over a lease. True: others need their
    memory."""


class Memory(Struct, eq=False):
    """Grants of memory, and the need to make room."""

    limited: bool
    """There is a memory budget."""
    holders: dict[Instance, Version] = {}
    """Instances that have been granted memory: granted before they load, freed when their process has ended."""
    yielding: dict[Version, int] = {}
    """Version -> since when it yields: it finishes what runs and then sleeps, because others wait for its memory."""
    changed: bool = False
    """Re-evaluate memory grants at the end of the turn: instances wait to load, were measured or have ended, or a
    version waits for others to make room."""
    room_at: int = 0
    """When the timer ROOM is due, if that is in the future."""
    evictions: int = 0
    """Versions put to sleep for others since `uses_since` was last advanced."""
    uses_since: int = 0
    """Since when `SleepState.uses` have been counted."""
    short_since: int = 0
    """Since when instances have exceeded the memory budget; 0: they do not."""

    def free(self, instance: Instance) -> None:
        """The instance has no process, and does not wait for one. Others may get its memory."""
        self.holders.pop(instance, None)
        self.changed = True
