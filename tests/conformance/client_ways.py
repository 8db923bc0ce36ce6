"""Both clients over every kind of link to a broker that echoes."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from shmserve.dtypes import ITEM_BYTES
from shmserve.protocol.messages import Handle, Tensor
from tests.support.broker.fake_broker import FakeBroker
from tests.support.clients.client_faces import FACES

LINKS: dict[str, tuple[Callable[[FakeBroker], str], dict[str, Any]]] = {
    "lane": (lambda broker: broker.lane, {}),
    "ipc": (lambda broker: broker.ipc, {}),
    "frames": (lambda broker: broker.ipc, {"memory": "frames"}),
    "tcp": (lambda broker: broker.tcp, {}),
}
CANCELLED = (asyncio.CancelledError, concurrent.futures.CancelledError)


WAYS = [
    *("sync lane", "sync ipc", "sync frames", "sync tcp"),
    *("asyncio lane", "asyncio ipc"),
    *("uvloop lane", "uvloop frames", "uvloop tcp"),
]


def ways(*links: str) -> pytest.MarkDecorator:
    """Runs a test over these links."""
    return pytest.mark.parametrize("way", [way for way in WAYS if way.split()[1] in links], indirect=True)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def link(way: str) -> str:
    return way.split()[1]


@pytest.fixture
def connect(broker: FakeBroker, way: str) -> Callable[..., Any]:
    face, link = way.split()
    url, options = LINKS[link]
    keys = broker.keys if link == "tcp" else {}
    return lambda **more: FACES[face](url(broker), **options, **keys, **more)


@pytest.fixture
def client(connect: Callable[..., Any]) -> Iterator[Any]:
    with connect() as client:
        yield client


shared_only = ways("lane", "ipc")

LARGE = (7, 600)  # in the smallest type, 4,200 bytes: over INLINE_BYTES


def data(name: str, shape: tuple[int, ...]) -> Any:
    generator = np.random.default_rng(len(name))
    if name == "BOOL":
        return generator.random(shape) < 0.5
    if name == "BF16":
        return generator.standard_normal(shape).astype(ml_dtypes.bfloat16)
    if name.startswith("FP"):
        return generator.standard_normal(shape).astype(f"float{name[2:]}")
    dtype = np.dtype(name.lower())
    info = np.iinfo(dtype)
    return generator.integers(info.min, info.max, shape, dtype, endpoint=True)


NUMBERS = [name for name in ITEM_BYTES if name != "BYTES"]


def place_of(tensor: Tensor) -> Handle:
    """The single handle of a tensor in shared memory."""
    assert isinstance(tensor.data, tuple)
    (handle,) = tensor.data
    return handle
