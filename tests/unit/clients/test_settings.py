"""Invalid arguments of the clients are refused when the client is created, with the argument's name and value."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shmserve
from shmserve.errors import InvalidRequest
from tests.support.clients.client_faces import FACES

NAN = math.nan
INVALID_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"timeout": -1}, "timeout=-1 must be a number of seconds above 0"),
    ({"timeout": 0}, "timeout=0 must be a number of seconds above 0"),
    ({"timeout": "5"}, "timeout='5' must be a number of seconds above 0"),
    ({"reconnect_timeout": -0.5}, "reconnect_timeout=-0.5 must be a number of seconds, at least 0"),
    ({"reconnect_timeout": None}, "reconnect_timeout=None must be a number of seconds, at least 0"),
    ({"memory_bytes": -1}, "memory_bytes=-1 must be a whole number of bytes above 0"),
    ({"memory_bytes": 1e9}, "memory_bytes=1000000000.0 must be a whole number of bytes above 0"),
    ({"name": "n" * 129}, f"client name '{'n' * 40}...' has 129 characters; the limit is 128"),
]
VALID_SETTINGS = [
    {"timeout": 0.001}, {"timeout": math.inf}, {"timeout": None}, {"reconnect_timeout": 0},
    {"reconnect_timeout": math.inf}, {"memory_bytes": 1}, {"name": "n" * 128},
]  # fmt: skip


@pytest.mark.parametrize("make", [shmserve.Client, shmserve.AsyncClient])
@pytest.mark.parametrize(("settings", "problem"), INVALID_SETTINGS, ids=lambda value: str(value)[:40])
def test_an_invalid_setting_is_refused(
    make: Callable[..., object], settings: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match=f"^{re.escape(problem)}$"):
        make(runtime_dir=tmp_path, **settings)


@pytest.mark.parametrize("settings", VALID_SETTINGS, ids=lambda value: str(value)[:40])
def test_a_setting_at_its_bound_is_accepted(settings: dict[str, Any], tmp_path: Path) -> None:
    shmserve.Client(runtime_dir=tmp_path, **settings).close()
    asyncio.run(shmserve.AsyncClient(runtime_dir=tmp_path, **settings).close())


@pytest.mark.parametrize("timeout", [-1, NAN, "5"])
def test_calls_refuse_an_invalid_timeout_before_they_connect(timeout: Any, tmp_path: Path) -> None:
    problem = re.escape(f"timeout={timeout!r} must be a number of seconds, at least 0")
    for face in FACES.values():
        with face(f"unix://{tmp_path}/lane.sock") as client:
            for call, arguments in ((client.wait_ready, ()), (client.unload, ("m",))):
                with pytest.raises(InvalidRequest, match=problem):
                    call(*arguments, timeout=timeout)
