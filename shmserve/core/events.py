"""What can happen to the core besides messages. An event is (peer, message) or (0, one of these)."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from shmserve.core.policy import InstanceSpec, ModelPolicy
from shmserve.messages import Handle, Infer, Map


class Opened(Struct):
    """A client has connected. `audience` names who may map what it is answered with; `plane` is its kind of link."""

    peer: int
    audience: str
    plane: str  # "lane" or "zmq"


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


class OwnSegment(Struct):
    """The broker's own arena has grown."""

    announcement: Map


class OwnSegmentGone(Struct):
    """The broker's own arena has given back a segment in which nothing was."""

    segment: int


class Deploy(Struct):
    """Serve this version of this model. What it looks like is known when its first worker has loaded it."""

    model: str
    version: int
    instances: tuple[InstanceSpec, ...]


class Refuse(Struct):
    """This model, or version (0: all), cannot be served, and why."""

    model: str
    version: int
    reason: str


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
