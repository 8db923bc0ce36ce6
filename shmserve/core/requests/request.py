"""A request, from its arrival to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct

from shmserve.core.states import REQUEST_MOVES, IllegalMove, RequestState
from shmserve.protocol.messages import OWNER_SHIFT, Fail, Handle, LabelFile, Options, Reply, Tensor, WantedOutputs

if TYPE_CHECKING:
    from shmserve.core.ensembles.run import Run, Spot
    from shmserve.core.models.instance import Batch, Instance
    from shmserve.core.models.version import Version
    from shmserve.core.requests.client import Client
    from shmserve.core.sequences.sequence import Sequence


class Miss(Struct, gc=False):
    """A request that the response cache could not answer."""

    key: tuple[Any, ...]
    """The answer is to be kept under this."""
    lookup_ns: int


class Request(Struct, eq=False, gc=False):
    """`number` is the broker's, `client_number` the client's. `cost` is max(1, rows): what it takes of a batch."""

    number: int
    client: Client
    client_number: int
    version: Version
    inputs: tuple[Tensor, ...]
    outputs: WantedOutputs | None
    options: Options | None
    rows: int
    cost: int
    inline: int
    signature: object
    segments: tuple[int, ...]
    pins: tuple[Handle, ...]
    blocks: tuple[Handle, ...]
    arrived: int
    level: int = 0
    tag: int = 0
    deadline: int = 0
    queue_expires: int = 0
    delayed: bool = False
    suspect: Instance | None = None
    """The instance whose worker died while it ran this one. It is run once more, alone."""
    special: bool = False
    """Its answer is not just sent: it has used memory, is a step's, or comes in parts."""
    parts: int = 0
    """Answers that it has had."""
    state: RequestState = RequestState.QUEUED
    instance: Instance | None = None
    batch: Batch | None = None
    reply: Reply | Fail | None = None
    audience: str = ""
    """Who may be given what it is answered with."""
    run: Run | None = None
    """It is a step of an ensemble, and answered to that."""
    spot: Spot | None = None
    """Which one there."""
    outside: bool = False
    """All its outputs are to be in shared memory."""
    near: tuple[str, ...] = ()
    """Outputs that may stay on the GPU of the instance: who reads them is there, too."""
    aliases: bool = False
    """Only other steps read what it is answered with: that may be what it was asked with."""
    labels: tuple[LabelFile, ...] = ()
    """Of outputs that are wanted as classes, where ensembles that it is a step of have their own."""
    miss: Miss | None = None
    """The response cache had no answer to it, and is to keep the one that is computed."""
    sequence: Sequence | None = None
    slot: int = -1
    """Where in the batch it must stand; -1: anywhere."""
    chain: Run | None = None
    """It is to an ensemble: how far that is."""
    length: int = 0
    """Of its padded inputs."""
    passed: int = 0
    """Rows of requests behind it that the batcher has taken before it, to pad less."""
    held: bool = False
    """Its client is an instance that does nothing else before it is answered."""

    @property
    def on_loan(self) -> bool:
        """Does it use memory that its client may not touch meanwhile? What came in frames is the broker's own."""
        return any(segment >> OWNER_SHIFT for segment in self.segments)

    def move(self, finish: RequestState) -> None:
        if finish not in REQUEST_MOVES[self.state]:
            raise IllegalMove(f"request {self.number}", self.state, finish, self.story())
        self.state = finish

    def story(self) -> str:
        at = f" at {self.instance.spec.name}" if self.instance else ""
        return (
            f"request {self.number} ({self.client_number} of client {self.client.number}) for {self.version.label}, "
            f"{self.rows} rows, arrived {self.arrived}, deadline {self.deadline}, {self.state.name.lower()}{at}"
        )
