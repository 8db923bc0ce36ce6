"""The gRPC listener, and the state that its connections share. One timer serves the deadlines of all calls."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

from shmserve.gateway.http2.interface import Application, Expiring
from shmserve.gateway.http2.limits import Http2Limits
from shmserve.gateway.limits.body_budget import Budget
from shmserve.gateway.listeners.callers import TURNS, EndpointListener
from shmserve.gateway.upstream.link import GatewayLink
from shmserve.protocol.grpc.codes import Code, RpcError

DEADLINE_S = 0.02
"""Resolution of deadlines."""


class RpcListener(EndpointListener):
    """`connect`: as for `EndpointListener`. `stopped` is called once no new calls are accepted."""

    def __init__(
        self,
        link: GatewayLink,
        connect: Callable[[RpcListener, str], Any],
        application: Application,
        limits: Http2Limits,
        budget: Budget,
        stopped: Callable[[], None],
    ) -> None:
        super().__init__(link, connect, limits, _turn_s(limits), budget)
        self.stream_turns = math.ceil(limits.stream_idle_s / _turn_s(limits))
        self.application = application
        self.limits = limits
        self._stopped = stopped
        self._due: dict[int, set[Expiring]] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_for = 0
        """The bucket that `_alarm` is set for."""

    # ------------------------------------------------------------------------------------ deadlines

    def expire(self, stream: Expiring) -> None:
        assert stream.expires is not None
        bucket = _bucket(stream.expires)
        self._due.setdefault(bucket, set()).add(stream)
        if self._alarm is None or bucket < self._alarm_for:
            self._set_alarm(bucket)

    def keep(self, stream: Expiring) -> None:
        assert stream.expires is not None
        bucket = _bucket(stream.expires)
        streams = self._due.get(bucket)
        if streams is not None:
            streams.discard(stream)
            if not streams:
                del self._due[bucket]

    def _set_alarm(self, bucket: int) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_for = bucket
        self._alarm = self.loop.call_at(max(bucket + 1, _bucket(self.now()) + 1) * DEADLINE_S, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        now = _bucket(self.now())
        for bucket in [bucket for bucket in self._due if bucket < now]:
            for stream in self._due.pop(bucket):
                stream.fail(RpcError(Code.DEADLINE_EXCEEDED, "Deadline Exceeded"))
        if self._due and self._alarm is None:
            self._set_alarm(min(self._due))

    # ------------------------------------------------------------------------------------ shutdown

    async def close(self) -> None:
        self.stopping = True
        self._stopped()
        await super().close()
        if self._alarm is not None:
            self._alarm.cancel()


def _turn_s(limits: Http2Limits) -> float:
    """The period of the slow clock: a fraction of the shortest time that it measures."""
    spans = [limits.read_timeout_s, limits.idle_timeout_s, limits.keepalive_s, limits.keepalive_timeout_s]
    spans += [span for span in (limits.age_s, limits.age_grace_s) if span]
    return max(0.02, min(spans) / TURNS)


def _bucket(at: float) -> int:
    return int(at / DEADLINE_S)
