"""Chooses the target of an endpoint. A protocol's packages are imported only if it is used."""

from __future__ import annotations

from shmserve.errors import Unsupported
from shmserve.extras import install_command, outdated
from shmserve.tools.load.plan import GRPC, HTTP, Endpoint
from shmserve.tools.load.targets.base import Target


def open_target(endpoint: Endpoint) -> Target:
    if old := outdated("bench"):
        raise Unsupported(f"load cannot be generated: {old}")
    try:
        if endpoint.kind == HTTP:
            from shmserve.tools.load.targets.http import HttpTarget

            return HttpTarget(endpoint)
        if endpoint.kind == GRPC:
            from shmserve.tools.load.targets.grpc import GrpcTarget

            return GrpcTarget(endpoint)
    except ImportError as error:
        text = f"load over {endpoint.kind}:// needs a package that is missing ({error}): {install_command('bench')}"
        raise Unsupported(text) from error
    from shmserve.tools.load.targets.native import NativeTarget

    return NativeTarget(endpoint)
