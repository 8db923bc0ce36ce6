"""Whether a caller keeps to the protocol: floods of cheap frames, and frames for streams that are closed.

The counters run per turn of the slow clock; each has a limit that no client of gRPC reaches (limits.py), over which the
connection ends with ENHANCE_YOUR_CALM.
"""

from __future__ import annotations

from collections import deque

from shmserve.gateway.http2 import limits as most
from shmserve.gateway.http2.frames import Broken, Reason

_REMEMBERED = 256
"""Closed streams, to tell a late frame from a stream number that was skipped."""
_EARLY = 2048
"""Streams that ended here before the caller had ended them: what is on its way for them is ignored."""


class Conduct:
    """Of one connection."""

    def __init__(self) -> None:
        self.resets = 0
        self.mistakes = 0
        self.idle_frames = 0
        self.unsent_replies = 0

    def next_turn(self) -> None:
        self.resets = self.mistakes = self.idle_frames = 0

    def reset(self) -> None:
        """A call that the caller took back, or made us reset: either way it was opened for nothing."""
        self.resets += 1
        if self.resets > most.RESETS:
            raise Broken(Reason.ENHANCE_YOUR_CALM, "too many reset calls")

    def mistake(self) -> None:
        """A call that was refused from its headers alone: no such method, not gRPC, no role."""
        self.mistakes += 1
        if self.mistakes > most.MISTAKES:
            raise Broken(Reason.ENHANCE_YOUR_CALM, "too many refused calls")

    def idle(self, weight: int = 1) -> None:
        """A frame that moves nothing."""
        self.idle_frames += weight
        if self.idle_frames > most.IDLE_FRAMES:
            raise Broken(Reason.ENHANCE_YOUR_CALM, "too many frames without effect")

    def unsent_reply(self) -> None:
        """An acknowledgement for a caller who does not read."""
        self.unsent_replies += 1
        if self.unsent_replies > most.UNSENT_REPLIES:
            raise Broken(Reason.ENHANCE_YOUR_CALM, "the client sends requests but does not read responses")


class ClosedStreams:
    """Of one connection. Both memories are bounded; what is forgotten only costs the caller another error code."""

    def __init__(self) -> None:
        self._closed: deque[int] = deque(maxlen=_REMEMBERED)
        self._early: dict[int, None] = {}

    def add(self, number: int, ended: bool) -> None:
        """`ended`: by the caller, who so has nothing on its way."""
        if ended:
            self._closed.append(number)
            return
        self._early[number] = None
        if len(self._early) > _EARLY:
            del self._early[next(iter(self._early))]

    def ignores(self, number: int, ended: bool) -> bool:
        """Whether a frame for it was on its way when it was closed here. `ended`: it is the last one."""
        if number not in self._early:
            return False
        if ended:
            del self._early[number]
            self._closed.append(number)
        return True

    def __contains__(self, number: int) -> bool:
        return number in self._closed
