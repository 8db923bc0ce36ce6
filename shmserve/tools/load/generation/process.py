"""A generator process: `python -m shmserve.tools.load.generation.process FD`.

It executes orders from a socket and ends when the socket is closed.
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
from functools import partial
from itertools import count

import uvloop

from shmserve.errors import ServeError, Unsupported
from shmserve.terminal.errors import Misuse
from shmserve.tools.load.generation.messages import (
    Begin,
    Broken,
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


class Generator:
    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._target: LoadTarget | None = None
        self._timer = MonotonicTimer()
        self._sender: LoadSender | None = None
        self._plan: LoadPlan | None = None

    def tell(self, report: Report) -> None:
        if not self._writer.is_closing():  # else the measuring process has ended, which also ends `_follow`
            write(self._writer, report)

    async def follow(self, order: Order) -> None:
        if isinstance(order, Prepare):
            await self._prepare(order.plan, order.index)
        elif isinstance(order, Begin):
            await self._begin(order)
        else:
            unanswered = await self._the_sender.stop(order.patience_s)
            self.flush()
            self.tell(Ended(unanswered))

    @property
    def _the_sender(self) -> LoadSender:
        if self._sender is None:
            raise RuntimeError("not prepared")
        return self._sender

    async def _prepare(self, plan: LoadPlan, index: int) -> None:
        self._plan = plan
        self._target = target = open_target(plan.endpoint)
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
        rows = 1.0
        if prompts is not None:
            if not isinstance(target, PromptTarget):
                raise Unsupported("prompts are sent natively or to an OpenAI API: use --openai URL, or no --url")
            written = await make_prompts(prompts, partial(_count_tokens, target, facts, options))
            bodies = [target.prepare_prompt(prompt, facts, options) for prompt in written]
        else:
            feeds = request_inputs(plan.inputs, plan.model, facts)
            bodies = [target.prepare(feed, facts, options) for feed in feeds]
            rows = mean_rows(feeds, facts.max_batch)
        self._sender = LoadSender(
            bodies,
            target.slot,
            time.monotonic_ns,
            self._timer.until,
            stream=plan.stream,
            sequences=plan.sequences,
            ids=count(secrets.randbits(31) << 24 | 1),
            first_body=index * 7,
        )
        self.tell(Prepared(rows))
        gc.collect()
        gc.freeze()  # the requests live until the end; the collector must not scan them during the load

    async def _begin(self, order: Begin) -> None:
        sender, plan = self._the_sender, self._plan
        assert plan is not None
        load = share(order.load, order.index, order.processes)
        if isinstance(load, ClosedLoop):
            await sender.start_closed(load.concurrency, order.start_ns)
            return
        limit = plan.sequences.count if plan.sequences is not None else plan.in_flight
        times = send_times(load, order.index, order.processes)
        sender.start_open(times, order.start_ns, max(1, limit // order.processes))

    def flush(self) -> None:
        if self._sender is not None:
            if self._sender.failure is not None:
                raise self._sender.failure
            self.tell(self._sender.recorder.take(time.monotonic_ns(), time.process_time_ns()))

    async def close(self) -> None:
        if self._sender is not None:
            await self._sender.stop(0)
        if self._target is not None:
            await self._target.close()
        self._timer.close()


async def _count_tokens(target: PromptTarget, facts: ModelFacts, options: TargetOptions, prompt: PromptRequest) -> int:
    """The number of tokens of a prompt, from a request for one token."""
    answers = Answers(ResponseRecorder(), 0, lambda: 0)
    await (await target.slot()).stream(target.prepare_prompt(prompt, facts, options), None, answers)
    return answers.prompt


async def _report(generator: Generator) -> None:
    while True:
        await asyncio.sleep(FLUSH_S)
        generator.flush()


async def _follow(reader: asyncio.StreamReader, generator: Generator) -> None:
    while True:
        try:
            order = await read_order(reader)
        except (asyncio.IncompleteReadError, ConnectionError):  # reset: the last samples were not read
            return
        await generator.follow(order)


async def serve(fd: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd))
    generator = Generator(writer)
    work = [asyncio.ensure_future(_follow(reader, generator)), asyncio.ensure_future(_report(generator))]
    try:
        done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    except Misuse as error:
        generator.tell(Broken("", str(error)))
    except ServeError as error:
        generator.tell(Broken(error.code, str(error)))
    finally:
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        await generator.close()
        writer.close()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that closes the socket
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # over HTTP and gRPC each caller has its own connection
    uvloop.run(serve(int(sys.argv[1])))


if __name__ == "__main__":
    main()
