"""Detects protocol abuse: floods of cheap frames, and frames for closed streams.

The counters are reset on each turn of the slow clock. Each has a limit that no gRPC client reaches (limits.py); above
it, the connection ends with ENHANCE_YOUR_CALM.
"""

from __future__ import annotations

from collections import deque

from shmserve.gateway.http2 import limits
from shmserve.http2.frames import ErrorCode, Http2Error

_REMEMBERED = 256
"""Number of closed streams remembered, to tell a late frame from a stream id that was skipped."""
_CLOSED_EARLY = 2048
"""Number of remembered streams that the gateway closed before the client ended them. Frames in transit for them are
ignored."""


class AbuseCounters:
    """The counters of one connection."""

    def __init__(self) -> None:
        self.resets = 0
        self.mistakes = 0
        self.idle_frames = 0
        self.unsent_replies = 0

    def next_turn(self) -> None:
        self.resets = self.mistakes = self.idle_frames = 0

    def reset(self) -> None:
        """Counts a call that the client cancelled, or made the gateway reset: the work for it was wasted."""
        self.resets += 1
        if self.resets > limits.RESETS:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "too many reset calls")

    def mistake(self) -> None:
        """Counts a call refused by its headers alone: unknown method, not gRPC, or access denied."""
        self.mistakes += 1
        if self.mistakes > limits.MISTAKES:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "too many refused calls")

    def idle(self, weight: int = 1) -> None:
        """Counts a frame without effect."""
        self.idle_frames += weight
        if self.idle_frames > limits.IDLE_FRAMES:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "too many frames without effect")

    def unsent_reply(self) -> None:
        """Counts an acknowledgement for a client that does not read."""
        self.unsent_replies += 1
        if self.unsent_replies > limits.UNSENT_REPLIES:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "the client sends requests but does not read responses")


class ClosedStreams:
    """The closed streams of one connection. Both collections are bounded. Forgetting a stream only changes the error
    code that the client gets."""

    def __init__(self) -> None:
        self._closed: deque[int] = deque(maxlen=_REMEMBERED)
        self._early: dict[int, None] = {}

    def add(self, number: int, ended: bool) -> None:
        """`ended`: the client had ended the stream, so none of its frames are in transit."""
        if ended:
            self._closed.append(number)
            return
        self._early[number] = None
        if len(self._early) > _CLOSED_EARLY:
            del self._early[next(iter(self._early))]

    def ignores(self, number: int, ended: bool) -> bool:
        """Whether a frame for the stream may have been in transit when the gateway closed the stream. `ended`: the
        frame is the last one."""
        if number not in self._early:
            return False
        if ended:
            del self._early[number]
            self._closed.append(number)
        return True

    def __contains__(self, number: int) -> bool:
        return number in self._closed
