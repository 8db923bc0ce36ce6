"""A generator process: `python -m shmserve.tools.load.generation.process FD`.

It executes orders from a socket, the first of which is Prepare, and ends when the socket is closed.
"""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from itertools import count
from typing import Any

import uvloop

from shmserve.errors import ServeError, Unsupported
from shmserve.terminal.errors import Misuse
from shmserve.tools.load.generation.messages import (
    Begin,
    Broken,
    End,
    Ended,
    Order,
    Prepare,
    Prepared,
    Report,
    read_order,
    write,
)
from shmserve.tools.load.generation.prompts import make_prompts
from shmserve.tools.load.generation.request_data import mean_rows, request_inputs
from shmserve.tools.load.generation.schedule import send_times, share
from shmserve.tools.load.generation.sending import Answers, LoadSender, MonotonicTimer, ResponseRecorder
from shmserve.tools.load.plan import CHAT, ClosedLoop, LoadPlan
from shmserve.tools.load.targets.base import LoadTarget, ModelFacts, PromptRequest, PromptTarget, TargetOptions
from shmserve.tools.load.targets.native import open_target

FLUSH_S = 0.1
Tell = Callable[[Report], None]


class Generator:
    """Sends the loads of a plan. `tell` takes reports for the measuring process."""

    def __init__(self, plan: LoadPlan, sender: LoadSender, tell: Tell) -> None:
        self._plan = plan
        self._sender = sender
        self._tell = tell

    async def follow(self, reader: asyncio.StreamReader) -> None:
        """Executes orders until the connection ends."""
        while (order := await _next_order(reader)) is not None:
            if isinstance(order, Begin):
                await self._begin(order)
            elif isinstance(order, End):
                unanswered = await self._sender.stop(order.patience_s)
                self._flush()
                self._tell(Ended(unanswered))

    async def report(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            self._flush()

    async def _begin(self, order: Begin) -> None:
        sender, plan = self._sender, self._plan
        load = share(order.load, order.index, order.processes)
        if isinstance(load, ClosedLoop):
            await sender.start_closed(load.concurrency, order.start_ns)
            return
        limit = plan.sequences.count if plan.sequences is not None else plan.in_flight
        times = send_times(load, order.index, order.processes)
        sender.start_open(times, order.start_ns, max(1, limit // order.processes))

    def _flush(self) -> None:
        if self._sender.failure is not None:
            raise self._sender.failure
        self._tell(self._sender.recorder.take(time.monotonic_ns(), time.process_time_ns()))


async def _next_order(reader: asyncio.StreamReader) -> Order | None:
    """None at the end of the connection."""
    try:
        return await read_order(reader)
    except (asyncio.IncompleteReadError, ConnectionError):  # reset: the last samples were not read
        return None


async def _bodies(plan: LoadPlan, target: LoadTarget) -> tuple[list[Any], float]:
    """The requests of a plan, and their mean number of rows."""
    facts = await target.facts(plan.model, plan.version)
    prompts = plan.prompts
    options = TargetOptions(
        model=plan.model,
        version=plan.version,
        outputs=plan.inputs.outputs,
        deadline_ns=plan.deadline_ns,
        stream=plan.stream,
        sampling=json.loads(prompts.sampling) if prompts is not None else {},
        chat=prompts is not None and prompts.api == CHAT,
    )
    if prompts is None:
        feeds = request_inputs(plan.inputs, plan.model, facts)
        return [target.prepare(feed, facts, options) for feed in feeds], mean_rows(feeds, facts.max_batch)
    if not isinstance(target, PromptTarget):
        raise Unsupported("prompts are sent natively or to an OpenAI API: use --openai URL, or no --url")
    written = await make_prompts(prompts, partial(_count_tokens, target, facts, options))
    return [target.prepare_prompt(prompt, facts, options) for prompt in written], 1.0


async def _count_tokens(target: PromptTarget, facts: ModelFacts, options: TargetOptions, prompt: PromptRequest) -> int:
    """The number of tokens of a prompt, from a request for one token."""
    answers = Answers(ResponseRecorder(), 0, lambda: 0)
    await (await target.slot()).stream(target.prepare_prompt(prompt, facts, options), None, answers)
    return answers.prompt


async def _work(order: Prepare, reader: asyncio.StreamReader, tell: Tell) -> None:
    """Prepares the requests, then sends them as ordered until the connection ends."""
    async with AsyncExitStack() as stack:
        timer = MonotonicTimer()
        stack.callback(timer.close)
        target = open_target(order.plan.endpoint)
        stack.push_async_callback(target.close)
        bodies, rows = await _bodies(order.plan, target)
        sender = LoadSender(
            bodies,
            target.slot,
            time.monotonic_ns,
            timer.until,
            stream=order.plan.stream,
            sequences=order.plan.sequences,
            ids=count(secrets.randbits(31) << 24 | 1),
            first_body=order.index * 7,
        )
        stack.push_async_callback(sender.stop, 0)
        tell(Prepared(rows))
        gc.collect()
        gc.freeze()  # the requests live until the end; the collector must not scan them during the load
        generator = Generator(order.plan, sender, tell)
        tasks = [asyncio.ensure_future(generator.follow(reader)), asyncio.ensure_future(generator.report())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def serve(fd: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd))

    def tell(report: Report) -> None:
        if not writer.is_closing():  # else the measuring process has ended, and so do the orders
            write(writer, report)

    try:
        first = await _next_order(reader)
        if isinstance(first, Prepare):
            await _work(first, reader, tell)
    except Misuse as error:
        tell(Broken("", str(error)))
    except ServeError as error:
        tell(Broken(error.code, str(error)))
    finally:
        writer.close()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that closes the socket
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # over HTTP and gRPC each caller has its own connection
    uvloop.run(serve(int(sys.argv[1])))


if __name__ == "__main__":
    main()
