"""What all connections of HTTP/2 share, as one of them sees it. The rule of the file: types only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from shmserve.clients.gateway.http2.limits import Limits
from shmserve.clients.gateway.http2.seam import Application

if TYPE_CHECKING:
    from shmserve.clients.gateway.http2.stream import Stream


class Host(Protocol):
    """What all connections share."""

    @property
    def limits(self) -> Limits: ...

    @property
    def application(self) -> Application: ...

    @property
    def turn(self) -> int:
        """Of the slow clock."""

    def now(self) -> float: ...

    def hold(self, size: int) -> None:
        """Counts bytes that a caller makes us hold. Unavailable: it would be too many."""

    def answered(self, code: int) -> None: ...

    def expire(self, stream: Stream) -> None:
        """`stream.fail` is called when its time is over, unless `keep` comes first."""

    def keep(self, stream: Stream) -> None: ...
