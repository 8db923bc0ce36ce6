"""What can happen to the core besides messages. An event is (peer, message) or (0, one of these)."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from shmserve.core.policy import InstanceSpec, ModelPolicy
from shmserve.protocol.messages import Handle, Infer, Map


class Opened(Struct):
    """A client has connected. `audience` names who may map what it is answered with; `plane` is its kind of link;
    `roles` are bits of shmserve.protocol.roles."""

    peer: int
    audience: str
    plane: str  # "lane" or "zmq"
    roles: int


class Closed(Struct):
    """A client's link has ended, or the client has died."""

    peer: int
    reason: str = ""


class Framed(Struct):
    """An Infer whose large inputs came as frames: the shell has put them into the broker's arena (`blocks`)."""

    infer: Infer
    blocks: tuple[Handle, ...]


class Garbled(Struct):
    """A message, or (request 0) a packet of this peer that could not be read."""

    request: int
    text: str
    code: str = "PROTOCOL"


class Answered(Struct):
    """The last message of the answer to a question of this peer has been sent."""

    peer: int
    request: int


class Behind(Struct):
    """A client does not read: so much output waits for it that it gets no more questions answered. Or it has caught up
    (`behind` is False)."""

    peer: int
    behind: bool


class OwnSegment(Struct):
    """The broker's own arena has grown."""

    announcement: Map


class OwnSegmentGone(Struct):
    """The broker's own arena has given back a segment in which nothing was."""

    segment: int


class Target(Struct, frozen=True):
    """A version that is to be served. `source` stands for what it is made of, files and configuration: a version that
    is served from this source already is left as it is, but for its instances. `policy`: known without asking a
    worker, as it is an ensemble."""

    number: int
    source: int
    instances: tuple[InstanceSpec, ...]
    policy: ModelPolicy | None = None


class Deploy(Struct):
    """Serve these versions of the model, and no others. What they look like is known when their workers have loaded.

    Versions that are served go on until all that replaces them is READY; if any of that fails, they simply go on.
    `operation` is told by Settled (0: nobody asks). `fresh`: load also what is served from this source already."""

    model: str
    targets: tuple[Target, ...]
    operation: int = 0
    fresh: bool = False


class Refuse(Struct):
    """This model, or version (0: all), cannot be served, and why. What is served already goes on."""

    model: str
    version: int
    reason: str


class Unload(Struct):
    """Serve this model no more. What it has is finished, or with `force` fails; the operation is over when its
    processes have ended."""

    model: str
    operation: int = 0
    force: bool = False


class Restart(Struct):
    """Replace the worker process of this instance ("": all of this version, or with version 0 of the model) by a new
    one, which takes over when it is ready."""

    model: str
    version: int
    instance: str
    operation: int = 0


class Composed(Struct):
    """The answer to Compose. `problem` "": the models of the ensemble's steps fit together."""

    source: int
    number: int
    problem: str = ""


class Compiled(Struct):
    """A worker has loaded its model; the policy is compiled from the configuration that it completed."""

    policy: ModelPolicy


class Exited(Struct):
    """A worker's process has ended. `reason` names signal or code; `detail` is for operators only."""

    peer: int
    reason: str
    loading_error: str = ""
    detail: str = ""


class Drain(Struct):
    """Stop: take no more requests, finish those in flight, for `limit_ns` at most; then end the workers."""

    limit_ns: int


Event = tuple[int, Any]
