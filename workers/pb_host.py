"""What requests and senders of `pb_utils` ask of whoever runs the model. The rule: it may be asked in any thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from shmserve.workers.pb_utils import InferenceRequest, InferenceResponse, InferenceResponseSender
    from shmserve.workers.streams import Stream


class Host(Protocol):
    def sender(self, request: InferenceRequest) -> InferenceResponseSender:
        """The sender of a request that has none yet."""

    def send(self, stream: Stream, response: InferenceResponse | None, flags: int) -> Awaitable[None]:
        """Sends a response, the last one, or says that there are no more."""

    def is_cancelled(self, request: int, stream: Stream | None) -> bool:
        """Whether nobody waits for the request any more."""

    def forget(self, stream: Stream) -> None:
        """Nobody has its sender any more. Called within the collector."""
