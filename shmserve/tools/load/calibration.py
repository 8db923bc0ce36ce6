"""Measures the generator itself: sends the requests of a plan to an echo server of the same protocol."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec.structs import replace

from shmserve.errors import Internal
from shmserve.paths import python
from shmserve.system import interrupts
from shmserve.tools.load import echo
from shmserve.tools.load.measure import measured
from shmserve.tools.load.plan import GRPC, HTTP, SECOND, ClosedLoop, Endpoint, LoadPlan, MeasureSettings
from shmserve.tools.load.record import EchoResult
from shmserve.tools.load.targets.base import ModelFacts
from shmserve.tools.load.targets.native import open_target

IN_FLIGHT = 32
SETTINGS = MeasureSettings(warmup_ns=SECOND // 5, window_ns=SECOND // 4, min_windows=2, max_windows=2, min_responses=1)
END_S = 20.0


def calibrate(plan: LoadPlan) -> EchoResult:
    """The limit of one generator process for the requests of this plan. Connections that the plan encrypts are not
    encrypted here. Raises the same errors as `measure` if the plan's server does not answer.
    """
    return asyncio.run(_calibrate(plan))


async def _calibrate(plan: LoadPlan) -> EchoResult:
    target = open_target(plan.endpoint)
    try:
        facts = await target.facts(plan.model, plan.version)
    finally:
        await target.close()
    kind = _kind(plan.endpoint)
    async with _echo(kind, facts) as url:
        memory = plan.endpoint.memory if kind == echo.IPC else None
        run = await measured(
            replace(
                plan,
                endpoint=Endpoint(url=url, memory=memory),
                loads=(ClosedLoop(IN_FLIGHT),),
                limit=None,
                stream=False,
                settings=SETTINGS,
                processes=1,
            )
        )
    (point,) = run.points
    p50 = point.latency.percentiles.get("p50")
    return EchoResult(
        protocol=f"{kind}, without TLS" if plan.endpoint.is_secure else kind,
        per_s=point.throughput.mean,
        request_ns=point.cost.request_ns,
        p50_ns=p50.mean if p50 is not None else 0.0,
    )


def _kind(endpoint: Endpoint) -> str:
    if endpoint.kind in (HTTP, GRPC):
        return endpoint.kind
    scheme = (endpoint.url or "unix://").partition("://")[0]
    return echo.UNIX if scheme == echo.UNIX else echo.IPC


@asynccontextmanager
async def _echo(kind: str, facts: ModelFacts) -> AsyncIterator[str]:
    """Yields the url of an echo server, which runs in a separate process for the duration of the block."""
    reader, writer = os.pipe()
    documents = {
        "metadata": {"name": "echo", "inputs": list(facts.inputs.values()), "outputs": list(facts.outputs.values())},
        "config": {"max_batch_size": facts.max_batch},
    }
    with tempfile.TemporaryDirectory(prefix="shmserve-echo-") as folder, open(reader) as ready:
        command = [*python(), "-m", "shmserve.tools.load.echo", kind, folder, str(writer)]
        try:
            with interrupts.blocked_in_children():
                process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[writer], text=True)
        finally:
            os.close(writer)
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(documents) + "\n")
            process.stdin.flush()
            url = (await asyncio.to_thread(ready.readline)).strip()
            if not url:
                raise Internal("the echo server did not start")
            yield url
        finally:
            process.stdin.close()
            try:
                await asyncio.to_thread(process.wait, END_S)
            except BaseException:
                process.kill()
                process.wait()
                raise
