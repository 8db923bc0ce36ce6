"""The ledger tracks who owns segments and who holds handles. It stores numbers only and never touches memory.

A handle in a segment of a worker (or of the broker's own arena) is held by clients, and pinned by requests that use it
as an input. Without holds and pins it returns to the owner. Handles into a client's own segments need no entry: the
response tells the client that its request no longer uses them.

A client may pass on a slice of a block that it holds: this is one more hold of the whole block, returned as the slice.

A segment whose owner has died remains as an orphan while any part of it is held: its pages exist as long as they are
mapped, and its handles can still be passed on.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from typing import Protocol

from msgspec import Struct

from shmserve.core.effects import Effect, Forget, Free, Send
from shmserve.errors import HandleLost, InvalidRequest
from shmserve.protocol.messages import DEVICE, OWNER_SHIFT, Handle, Map, Return, Unmap

INTERNAL = "internal"
"""Audience of memory that only workers and the broker may read."""
RELEASED_AT_ONCE = 512
"""Maximum number of holds of a disconnected client that are released in the turn of its disconnect."""
RELEASED_PER_TURN = 2048
RETURNED_HANDLES = 4096
"""Maximum number of handles in one Return."""
Place = tuple[int, int]
"""(segment, offset). Invariant: live blocks never share one."""


class Holder(Protocol):
    """What the ledger keeps at a client."""

    number: int
    holds: set[Place]
    held_bytes: int


class LedgerSegment(Struct, eq=False):
    number: int
    size: int
    owner: int
    audience: str
    announcement: Map
    mapped_by: set[int] = set()
    blocks: list[int] = []
    """Offsets of held or pinned blocks, increasing."""
    uses: int = 0
    """Number of requests in flight that refer to the segment."""
    orphan: bool = False

    @property
    def on_device(self) -> bool:
        return self.announcement.name is not None and self.announcement.name.startswith(DEVICE)

    @property
    def lost(self) -> bool:
        """True if it was device memory, which is freed when its process ends. Host memory is not."""
        return self.orphan and self.on_device


class Hold(Struct, eq=False, gc=False):
    """`clients` counts holds per client: one client may get the same block in two responses (from the cache)."""

    handle: Handle
    clients: dict[int, int]
    pins: int = 0
    slices: dict[tuple[int, Handle], int] = {}
    """The part of these counts that was given as a slice of the block, and will be returned as that slice."""


class Ledger:
    """All segments and holds. Messages are appended to `effects`, which the core sets for each turn."""

    def __init__(self) -> None:
        self.segments: dict[int, LedgerSegment] = {}
        self.holds: dict[Place, Hold] = {}
        self.effects: list[Effect] = []
        self.held_bytes = 0
        """Total of all clients."""
        self.returned: dict[int, list[Handle]] = {}
        self.departed: deque[Holder] = deque()
        """Disconnected clients with holds that `release_departed` has yet to release."""

    # ------------------------------------------------------------------------------------ segments

    def announce(self, owner: int, message: Map, audience: str) -> LedgerSegment:
        number = message.segment
        if number >> OWNER_SHIFT != owner:
            raise InvalidRequest(
                f"segment {number} is not in this connection's range: its upper bits must be {owner}, "
                "the owner number from Welcome"
            )
        if number in self.segments:
            raise InvalidRequest(f"segment {number} has already been announced; numbers are never reused")
        segment = self.segments[number] = LedgerSegment(number, message.size, owner, audience, message)
        return segment

    def withdraw(self, owner: int, number: int) -> None:
        """The owner no longer uses this segment."""
        segment = self.segments.get(number)
        if segment is None or segment.owner != owner:
            raise InvalidRequest(f"segment {number} was not announced by this connection")
        segment.orphan = True
        self._drop_if_over(segment)

    def show(self, number: int, peer: int) -> None:
        """Announces the segment to the peer if this has not been done yet. Call before sending a handle into it."""
        segment = self.segments[number]
        if peer not in segment.mapped_by and peer != segment.owner:
            segment.mapped_by.add(peer)
            self.effects.append(Send(peer, segment.announcement))

    def owners_of_unused(self) -> set[int]:
        """The owners of segments in host memory to which nothing refers."""
        return {
            segment.owner
            for segment in self.segments.values()
            if not (segment.blocks or segment.uses or segment.on_device)
        }

    def use(self, numbers: tuple[int, ...]) -> None:
        """A request refers to these segments: they stay until it has ended, even if their owner withdraws them."""
        for number in numbers:
            self.segments[number].uses += 1

    def use_present(self, numbers: tuple[int, ...]) -> None:
        """Like `use`, but raises if one of them is lost: a client's request must not refer to a lost segment."""
        segments = self.segments
        for number in numbers:
            segment = segments[number]
            if segment.orphan and segment.on_device:
                raise HandleLost("a tensor was on the GPU of an instance whose worker process has ended")
        self.use(numbers)

    def done_with(self, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            segment = self.segments[number]
            segment.uses -= 1
            if segment.orphan:
                self._drop_if_over(segment)

    def _drop_if_over(self, segment: LedgerSegment) -> None:
        """Removes an orphan after its last hold and its last request."""
        if segment.blocks or segment.uses:
            return
        for peer in segment.mapped_by:
            self.effects.append(Send(peer, Unmap(segment.number)))
        self.effects.append(Forget(segment.number))
        del self.segments[segment.number]

    # ------------------------------------------------------------------------------------ handles

    def resolve(self, client: Holder, handle: Handle) -> Place | None:
        """Checks that the client may use these bytes. Returns the place of the hold, or None if the client owns the
        segment."""
        number, offset, size = handle.segment, handle.offset, handle.size
        segment = self.segments.get(number)
        if segment is not None and segment.owner == client.number and not segment.orphan:
            if offset + size > segment.size:
                raise InvalidRequest(
                    f"handle of {size} bytes at offset {offset} is outside its segment, which has {segment.size} bytes"
                )
            return None
        place = self.held(client, handle)
        if segment is None or place is None:
            raise InvalidRequest(
                f"handle ({number}, {offset}, {size}) is neither in a segment of this client nor held by it"
            )
        return place

    def held(self, client: Holder, handle: Handle) -> Place | None:
        """The place of the client's hold that contains these bytes: usually exactly this handle, else a larger
        block."""
        place: Place | None = (handle.segment, handle.offset)
        if place in client.holds and handle.size <= self.holds[place].handle.size:
            return place
        place = self.block_of(handle)
        return place if place in client.holds else None

    def block_of(self, handle: Handle) -> Place | None:
        """The start of the held or pinned block that contains all these bytes, regardless of its holder."""
        number, offset = handle.segment, handle.offset
        segment = self.segments.get(number)
        before = bisect_right(segment.blocks, offset) if segment is not None else 0
        if segment is None or not before:
            return None
        place = number, segment.blocks[before - 1]
        block = self.holds[place].handle
        return place if offset + handle.size <= block.offset + block.size else None

    def is_new(self, handle: Handle, audience: str) -> bool:
        """True if this can be a new block from its owner: in a segment for that audience, and not held."""
        segment = self.segments.get(handle.segment)
        return (
            segment is not None
            and segment.audience == audience
            and handle.offset + handle.size <= segment.size
            and (handle.segment, handle.offset) not in self.holds
        )

    def may_pass_on(self, client: Holder, handle: Handle, audience: str) -> bool:
        """True if the client may pass on this handle (or a part of it), which it holds, to that audience."""
        place = self.held(client, handle) if handle.size else None
        return place is not None and self.segments[handle.segment].audience == audience

    def give(self, client: Holder, handle: Handle) -> None:
        """Adds a hold of the client on the handle."""
        place, hold = self._hold(handle)
        hold.clients[client.number] = hold.clients.get(client.number, 0) + 1
        if hold.handle.size != handle.size:
            part = client.number, handle
            hold.slices[part] = hold.slices.get(part, 0) + 1
        client.holds.add(place)
        client.held_bytes += hold.handle.size
        self.held_bytes += hold.handle.size

    def take_back(self, client: Holder, handle: Handle) -> None:
        """The client returns a handle. Raises unless the client holds it, exactly as it was given."""
        place = (handle.segment, handle.offset)
        hold = self.holds.get(place)
        if hold is None or client.number not in hold.clients or hold.handle.size != handle.size or hold.slices:
            place, hold = self._given(client, handle)
        client.held_bytes -= hold.handle.size
        self.held_bytes -= hold.handle.size
        remaining = hold.clients[client.number] - 1
        if remaining:
            hold.clients[client.number] = remaining
            return
        del hold.clients[client.number]
        client.holds.discard(place)
        self._release(place, hold)

    def _given(self, client: Holder, handle: Handle) -> tuple[Place, Hold]:
        """The hold that a returned handle belongs to, if slices have been given. Raises if the client was not given
        this handle."""
        place = self.block_of(handle)
        if place is not None and client.number in self.holds[place].clients:
            hold, part = self.holds[place], (client.number, handle)
            if hold.handle == handle:
                sliced = sum(count for (number, _), count in hold.slices.items() if number == client.number)
                if hold.clients[client.number] > sliced:
                    return place, hold
            elif part in hold.slices:
                hold.slices[part] -= 1
                if not hold.slices[part]:
                    del hold.slices[part]
                return place, hold
        raise InvalidRequest(
            f"handle ({handle.segment}, {handle.offset}, {handle.size}) was returned by a client that does not hold "
            "it; return each handle once, unchanged"
        )

    def pin(self, place: Place) -> Handle:
        """A request uses the block as an input. Returns the handle for `unpin`."""
        hold = self.holds[place]
        hold.pins += 1
        return hold.handle

    def keep(self, handle: Handle) -> None:
        """Pins a block that no client holds (yet), until `unpin`."""
        self._hold(handle)[1].pins += 1

    def _hold(self, handle: Handle) -> tuple[Place, Hold]:
        """The hold of the block that is or contains the handle; else a new hold."""
        place = (handle.segment, handle.offset)
        hold = self.holds.get(place)
        if hold is None:
            around = self.block_of(handle) if handle.size else None
            if around is not None:
                return around, self.holds[around]
            hold = self.holds[place] = Hold(handle, {})
            insort(self.segments[handle.segment].blocks, handle.offset)
        return place, hold

    def unpin(self, handle: Handle) -> None:
        place: Place | None = (handle.segment, handle.offset)
        if place not in self.holds:
            place = self.block_of(handle)
        assert place is not None, f"{handle} was not kept"
        hold = self.holds[place]
        hold.pins -= 1
        self._release(place, hold)

    def send_back(self, handle: Handle) -> None:
        """Queues a block without holds or pins for return to its owner in `flush`."""
        self.returned.setdefault(handle.segment >> OWNER_SHIFT, []).append(handle)

    def _release(self, place: Place, hold: Hold) -> None:
        if hold.clients or hold.pins:
            return
        del self.holds[place]
        segment = self.segments[place[0]]
        del segment.blocks[bisect_left(segment.blocks, place[1])]
        if not segment.orphan:
            self.send_back(hold.handle)
        else:
            self._drop_if_over(segment)

    def flush(self) -> None:
        """Sends the blocks returned in this turn to their owners."""
        for owner, handles in self.returned.items():
            if not owner:
                self.effects.append(Free(tuple(handles)))
                continue
            for start in range(0, len(handles), RETURNED_HANDLES):
                self.effects.append(Send(owner, Return(tuple(handles[start : start + RETURNED_HANDLES]))))
        self.returned.clear()

    # ------------------------------------------------------------------------------------ disconnects and deaths

    def client_died(self, client: Holder) -> None:
        """Releases everything that the client held or owned; many holds over several turns, so that its end does not
        delay others."""
        self._forget_peer(client.number)  # first: it gets no further messages
        if len(client.holds) <= RELEASED_AT_ONCE:
            self._release_holds(client, RELEASED_AT_ONCE)
        else:
            self.departed.append(client)

    def release_departed(self) -> None:
        """Releases the next holds of disconnected clients. Call in each turn while `departed` has any."""
        client = self.departed[0]
        self._release_holds(client, RELEASED_PER_TURN)
        if not client.holds:
            self.departed.popleft()

    def _release_holds(self, client: Holder, limit: int) -> None:
        for _ in range(min(limit, len(client.holds))):
            place = client.holds.pop()
            hold = self.holds[place]
            freed = hold.clients.pop(client.number) * hold.handle.size
            client.held_bytes -= freed
            self.held_bytes -= freed
            for part in [part for part in hold.slices if part[0] == client.number]:
                del hold.slices[part]
            self._release(place, hold)

    def worker_died(self, peer: int) -> set[int]:
        """Returns the segments that are lost while something still refers to them."""
        self.returned.pop(peer, None)
        self._forget_peer(peer)
        return {number for number, segment in self.segments.items() if segment.owner == peer and segment.lost}

    def _forget_peer(self, peer: int) -> None:
        for segment in list(self.segments.values()):
            segment.mapped_by.discard(peer)
            if segment.owner == peer:
                segment.orphan = True
                self._drop_if_over(segment)

    def check(self, clients: Mapping[int, Holder]) -> None:
        """Checks every invariant between segments, holds and clients."""
        clients = {**clients, **{client.number: client for client in self.departed}}
        counted: dict[int, list[int]] = {}
        for place, hold in self.holds.items():
            assert hold.clients or hold.pins, f"hold {place} has no holders"
            assert hold.pins >= 0
            assert place == (hold.handle.segment, hold.handle.offset)
            counted.setdefault(place[0], []).append(place[1])
            for number, count in hold.clients.items():
                assert count > 0
                assert count >= sum(slices for (one, _), slices in hold.slices.items() if one == number)
                assert place in clients[number].holds, f"client {number} lacks its hold {place}"
        for number, segment in self.segments.items():
            assert segment.blocks == sorted(counted.get(number, [])), f"segment {number} miscounts its holds"
            for offset, following in pairwise(segment.blocks):
                end = offset + self.holds[number, offset].handle.size
                assert end <= following, f"blocks of segment {number} overlap: one ends at {end}, after {following}"
            assert segment.uses >= 0
            assert not segment.orphan or segment.blocks or segment.uses, f"orphan segment {number} outlived its holds"
        for client in clients.values():
            held = sum(
                self.holds[place].handle.size * self.holds[place].clients[client.number] for place in client.holds
            )
            assert held == client.held_bytes, f"client {client.number} miscounts held bytes"
        assert self.held_bytes == sum(client.held_bytes for client in clients.values()), "held bytes do not add up"
