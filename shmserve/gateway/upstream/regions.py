"""Shared memory that clients have registered, for inputs and outputs. Invariant: the gateway never maps a region. Its
name is announced to the workers, which read and write it in place. If that is not possible, the gateway copies with
pread and pwrite. CUDA regions are in `device_regions`."""

from __future__ import annotations

import os
import re
import stat
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import posix_ipc
from msgspec import Struct

from shmserve.errors import AlreadyExists, Internal, InvalidRequest, NotFound, Unavailable, Unsupported
from shmserve.gateway.kserve.answers import Buffer
from shmserve.gateway.kserve.plans import RegionSlice, check_text
from shmserve.gateway.limits.caller_shares import Creditor
from shmserve.gateway.upstream.device_regions import DeviceOrder, DeviceRegion
from shmserve.protocol.messages import INLINE_BYTES
from shmserve.session.foreign_memory import ForeignMemory, ForeignRegion, RegionPart
from shmserve.shm.extents.posix import PREFIX

_KEY = re.compile(r"/?[A-Za-z0-9_.-]{1,250}")
_NAME = re.compile(r"/?[A-Za-z0-9_-][A-Za-z0-9_.-]{0,100}")
"""Keys that can be announced in a message."""
_TRITON_PREFIX = "triton_python_backend_shm_region_"
_MAX_REGIONS = 1024
_MAX_ANNOUNCED = 512
"""Maximum number of announced regions: the broker limits the segments of a client, and the gateway is one client."""


Caller = tuple[str, str]
"""Who registers or unregisters a region: the token's name and the address (`Payer.caller`)."""


class Registration(Struct):
    """A client's registration of a region."""

    key: str
    byte_size: int
    offset: int = 0


class Region:
    """A registered region. Its descriptor is closed when nothing refers to the region any more, including requests in
    flight."""

    def __init__(
        self, name: str, order: Registration, descriptor: int, foreign: Callable[[], ForeignMemory] | None = None
    ) -> None:
        """`foreign`: the foreign memory of the link, which announces the region's name; None: the region is copied."""
        self.name = name
        self.order = order
        self._descriptor = descriptor
        self._foreign = foreign
        self._passed: ForeignRegion | None = None
        self.users = 0
        """Number of uses by requests in flight."""
        self.unwanted = False
        """The region is unregistered, and will be removed when no request uses it."""
        weakref.finalize(self, os.close, descriptor).atexit = False

    def part(self, place: RegionSlice) -> RegionPart | None:
        """The region slice in the form that workers can open. None: copy its bytes."""
        if self._foreign is None or place.size <= INLINE_BYTES or not self._foreign().takes_names:
            return None
        if self._passed is None:
            self._passed = self._foreign().announce(
                self.order.offset + self.order.byte_size, "/" + self.order.key.lstrip("/")
            )
        return None if self._passed.lost else RegionPart(self._passed, self.order.offset + place.offset, place.size)

    def close(self) -> None:
        if self._foreign is not None and self._passed is not None:
            self._foreign().withdraw(self._passed)

    def status(self) -> dict[str, Any]:
        order = self.order
        return {"name": self.name, "key": order.key, "offset": order.offset, "byte_size": order.byte_size}

    def check(self, place: RegionSlice) -> None:
        place.check(self.name, self.order.byte_size)

    def read_into(self, place: RegionSlice, target: Any) -> None:
        at, remaining = self.order.offset + place.offset, memoryview(target)
        while len(remaining):
            count = os.preadv(self._descriptor, [remaining], at)
            if not count:
                raise self._shorter()
            at, remaining = at + count, remaining[count:]

    def write(self, place: RegionSlice, parts: Sequence[Buffer]) -> None:
        at = self.order.offset + place.offset
        end = at + sum([len(part) for part in parts])
        if os.fstat(self._descriptor).st_size < end:  # writing past the end would extend the file
            raise self._shorter()
        for part in parts:
            remaining = memoryview(part)
            while len(remaining):
                count = os.pwrite(self._descriptor, remaining, at)
                at, remaining = at + count, remaining[count:]

    def _shorter(self) -> InvalidRequest:
        return InvalidRequest(f"region '{self.name}' is smaller than when it was registered")


class Use:
    """The regions that a request uses, and the account charged for it. Both are released when the request is over."""

    __slots__ = ("_payer", "_regions", "_used")

    def __init__(self, regions: Regions, used: list[Region | DeviceRegion], payer: Creditor) -> None:
        self._regions = regions
        self._used = used
        self._payer = payer

    def give(self, input_bytes: int) -> None:
        self._payer.give(input_bytes)
        self._regions.release(self._used)


class Regions:
    """`allowed`: whether regions can be registered. `foreign`: the foreign memory of the link to the broker. `changed`
    is called when the broker must be notified of a removal."""

    def __init__(
        self,
        allowed: bool,
        foreign: Callable[[], ForeignMemory] | None = None,
        changed: Callable[[], object] = lambda: None,
    ) -> None:
        self.allowed = allowed
        self._changed = changed
        self._foreign = foreign
        self._regions: dict[str, Region | DeviceRegion] = {}
        self._registrants: dict[str, Caller] = {}
        """Who registered each region."""

    def register(self, name: str, order: Registration | DeviceOrder, caller: Caller) -> None:
        self._check_allowed()
        if not name:
            raise InvalidRequest(f"{_invalid(name)}: a region needs a name")
        check_text("region name", name)
        if name in self._regions:
            raise AlreadyExists(f"shared memory region '{name}' already in manager")
        if len(self._regions) >= _MAX_REGIONS:
            raise Unavailable(f"{_MAX_REGIONS} shared memory regions are registered, the limit; unregister some")
        if isinstance(order, DeviceOrder):
            if self._foreign is None:
                raise Unsupported("CUDA shared memory is not supported")
            self._regions[name] = DeviceRegion(name, order, self._foreign)
        else:
            by_name = len(self._regions) < _MAX_ANNOUNCED and _NAME.fullmatch(order.key)
            self._regions[name] = Region(name, order, _opened(name, order), self._foreign if by_name else None)
        self._registrants[name] = caller

    def _check_allowed(self) -> None:
        if not self.allowed:
            raise Unsupported("Client shared memory is disabled; --allow-client-shm of the gateway enables it")

    def unregister(self, kind: str, name: str, caller: Caller) -> None:
        """Without a name, unregisters all regions of the caller. A missing region is not an error. A region in use is
        removed when its requests are over."""
        self._check_allowed()
        for region in self._of(kind):
            if region.name == name or (not name and self._registrants[region.name] == caller):
                region.unwanted = True
                self._remove(region)
        self._changed()

    def _remove(self, region: Region | DeviceRegion) -> bool:
        if region.users or not region.unwanted:
            return False
        del self._regions[region.name], self._registrants[region.name]
        region.close()
        return True

    def use(self, payer: Creditor, names: Iterable[str]) -> Use:
        used = [self._regions[name] for name in names if name in self._regions]
        for region in used:
            region.users += 1
        return Use(self, used, payer)

    def release(self, used: list[Region | DeviceRegion]) -> None:
        for region in used:
            region.users -= 1
        gone = [region for region in dict.fromkeys(used) if self._remove(region)]
        if gone:
            self._changed()

    def _of(self, kind: str) -> list[Region | DeviceRegion]:
        return [region for region in self._regions.values() if isinstance(region, DeviceRegion) == (kind == "cuda")]

    def status(self, kind: str, name: str) -> list[dict[str, Any]]:
        regions = self._of(kind)
        if name:
            regions = [region for region in regions if region.name == name]
            if not regions:
                raise NotFound(f"Unable to find {kind} shared memory region: '{name}'")
        return [region.status() for region in regions]

    def find(self, place: RegionSlice) -> Region | DeviceRegion:
        """The region of `place`. Raises the errors that the client receives, including for a place that is not entirely
        inside the region."""
        region = self._regions.get(place.region)
        if region is None:
            raise NotFound(f"Unable to find shared memory region: '{place.region}'")
        region.check(place)
        return region


def _opened(name: str, order: Registration) -> int:
    key, bare_key = order.key, order.key.lstrip("/")
    for prefix in (PREFIX.lstrip("/"), _TRITON_PREFIX):
        if bare_key.startswith(prefix):
            raise InvalidRequest(
                f"cannot register shared memory region '{name}' with key '{key[:80]}' as the key contains the reserved "
                f"prefix '{prefix}'"
            )
    if not _KEY.fullmatch(key) or bare_key in (".", ".."):
        raise InvalidRequest(
            f"cannot register shared memory region '{name}' - invalid shm key '{key[:80]}': a key is up to 250 of A-Z, "
            "a-z, 0-9, '_', '.' and '-', optionally after a '/'"
        )
    try:
        descriptor: int = posix_ipc.SharedMemory(f"/{bare_key}").fd
    except (posix_ipc.Error, OSError, ValueError):
        raise Internal(f"Unable to open shared memory region: '{key}'") from None
    state = os.fstat(descriptor)
    fits = order.offset >= 0 and 0 < order.byte_size <= state.st_size - order.offset
    if not fits or not stat.S_ISREG(state.st_mode):
        os.close(descriptor)
        raise _invalid(name)
    return descriptor


def _invalid(name: str) -> InvalidRequest:
    return InvalidRequest(f"failed to register shared memory region '{name}': invalid args")
