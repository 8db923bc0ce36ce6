"""The core's events that are not protocol messages. `Core.handle` takes (peer, message) or (peer, one of these); peer 0
is the broker."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from shmserve.core.policy import InstanceSpec, MemoryEstimate, ModelPolicy, ScalingPolicy
from shmserve.core.traffic import Traffic
from shmserve.protocol.messages import Handle, Infer, Map
from shmserve.protocol.worker_messages import LeasedBatch


class Opened(Struct):
    """A client has connected. `audience`: who may map the outputs that it receives; `plane`: its kind of link; `roles`:
    bits of shmserve.protocol.roles."""

    peer: int
    audience: str
    plane: str  # "lane" or "zmq"
    roles: int


class Closed(Struct):
    """A client has disconnected or died."""

    peer: int


class Framed(Struct):
    """An Infer whose large inputs arrived as frames, which the shell has copied into the broker's arena (`blocks`)."""

    infer: Infer
    blocks: tuple[Handle, ...]


class Garbled(Struct):
    """A message of this peer, or (request 0) a packet, could not be decoded."""

    request: int
    text: str
    code: str = "PROTOCOL"


class Answered(Struct):
    """The last message of the response to a query of this peer has been sent."""

    peer: int
    request: int


class Behind(Struct):
    """Backpressure: a client has too much unread output, so its queries are held back (`behind`), or it has caught
    up."""

    peer: int
    behind: bool


class OwnSegment(Struct):
    """The broker's own arena has added a segment."""

    announcement: Map


class OwnSegmentGone(Struct):
    """The broker's own arena has released an empty segment."""

    segment: int


class Target(Struct, frozen=True):
    """A version to deploy. `source` identifies its files and configuration: a version that is already served from this
    source is kept, except for its instances. `policy`: set for ensembles, whose policy needs no worker to load.
    `memory`: estimate for each instance, used until it has been measured."""

    number: int
    source: int
    instances: tuple[InstanceSpec, ...]
    policy: ModelPolicy | None = None
    memory: MemoryEstimate = MemoryEstimate()
    scaling: ScalingPolicy | None = None


class Deploy(Struct):
    """Serve these versions of the model and no others. Their policies are known once their workers have loaded.

    Versions that are already served continue until all replacements are READY, and keep serving if a replacement fails.
    Settled reports the outcome of `operation` (0: no report). `fresh`: also reload versions that are already served
    from the same source. `present`: the versions in the repository, None if unknown; of the others, only the latest
    stay listed once unloaded. `traffic`: the configured traffic, which applies until an operator sets another; None: no
    change.
    """

    model: str
    targets: tuple[Target, ...]
    operation: int = 0
    fresh: bool = False
    present: tuple[int, ...] | None = None
    traffic: Traffic | None = None


class Refuse(Struct):
    """This model or version (0: all) cannot be served, with the reason. Versions that are already served continue."""

    model: str
    version: int
    reason: str


class Unload(Struct):
    """Stop serving this model. Its requests are finished, or fail with `force`; the operation completes when its
    processes have ended."""

    model: str
    operation: int = 0
    force: bool = False


class SetTraffic(Struct):
    """Change how the requests of this model are divided: see `Traffic.changed`. No effect if the model is unknown."""

    model: str
    shares: dict[int, int] | None = None
    aliases: dict[str, int | None] = {}
    shadow: dict[int, int] | None = None


class SetService(Struct):
    """Take the server out of service, or put it back. Out of service it is not ready, but still accepts and answers
    requests."""

    out_of_service: bool


class Restart(Struct):
    """Replace the worker process of this instance ("": of all instances of the version, or of the model with version
    0). The new process takes over when it is ready."""

    model: str
    version: int
    instance: str
    operation: int = 0


class Composed(Struct):
    """The response to Compose. `problem` "": the models of the ensemble's steps are compatible."""

    source: int
    number: int
    problem: str = ""


class Compiled(Struct):
    """A worker has loaded its model; the policy is compiled from the configuration that the worker completed."""

    policy: ModelPolicy


class LeaseRead(Struct):
    """New entries in the log of a lease. `running`: the first of the requests that the worker is running since `since`,
    0 for none; `last`: the last of them. They may already be in `batches`; the client may then not have the responses
    yet."""

    lease: int
    batches: list[LeasedBatch]
    running: int = 0
    last: int = 0
    since: int = 0
    final: bool = False
    """The worker has ended the lease."""


class Measured(Struct):
    """The memory of a worker's process, in bytes: on the host including the shared memory it owns, the peak of that,
    and on its GPU. Sent only if there are memory budgets."""

    peer: int
    host: int
    peak: int
    gpu: int = 0


class DeviceHealth(Struct):
    """No instance may run on this GPU, for this reason; "": it may be used again. The reason names the GPU and what an
    operator should do."""

    device: int
    reason: str = ""


class Exited(Struct):
    """A worker's process has ended. `reason` names the signal or exit code; `detail` is shown to operators only."""

    peer: int
    reason: str
    loading_error: str = ""
    detail: str = ""


class Drain(Struct):
    """Stop: reject new requests, finish those in flight for at most `limit_ns`, then stop the workers."""

    limit_ns: int


Event = tuple[int, Any]
