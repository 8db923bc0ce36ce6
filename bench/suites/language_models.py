"""A language model through the server, in the bare engine, and through the engine's own server: `python -m
bench.suites.language_models [MODEL]`, where the model is a GGUF file, by default that of the sample `chat`, or a
directory for vLLM.

For each number of streams that start at once, measures in turn the bare engine (llama.cpp in a separate process), the
engine's own server (llama-server or `vllm serve`), the lane, `generate_stream` and `/v1/completions`, or those of
`--ways`. Prints the medians over the rounds of the time to the first token, the time between tokens, the tokens per
second, and the processor time per token of all processes, each compared with the first way. The engine has `--threads`
threads, and the same arguments and variables in each way, except that `vllm serve (defaults)` has its own variables.

All of it is repeated `--starts` times with new processes, which start in the opposite order each time: two processes
of the same engine differ by up to 10 % for as long as they live, by where their memory happens to lie.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Collection, Coroutine
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

import numpy as np

from bench.endpoints.servers import free_port
from bench.lib import processes
from bench.lib.child import Answer, Child, Handler
from bench.peers.running import START_S, running
from shmserve.repo import samples
from shmserve.testing import Server
from shmserve.workers.backends.vllm.backend import prepare_environment

Times = list[list[float]]
"""For each stream: when it was sent, and when each of its tokens arrived."""
Results = dict[int, dict[str, list[tuple[float, ...]]]]
"""For each number of streams and each way: what each round measured."""
WORDS = ("the", "of", "and", "to", "a", "in", "is", "it", "you", "that", "he", "was", "for", "on", "are", "with")
SLOTS, CONTEXT = 32, 512
LOOK_S, IDLE_S = 0.3, 0.05
"""How long the servers are observed, and how much processor time they use in it while they are idle."""
VARIABLES = ("--model-environment", "VLLM_*", "--model-environment", "HF_*")
"""So that both servers have those of the engine."""


def prompts(count: int, words: int, seed: int) -> list[str]:
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, words)) for _ in range(count)]


def sampling(tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}


# ---------------------------------------------------------------------------------------------- the ways


def llama_cpp(model: str, threads: int, port: int = 0) -> Any:
    """The engine. The socket of its HTTP server is removed at once, as in the backend, unless there is a `port`."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = model
    parameters.n_parallel, parameters.n_ctx = SLOTS, SLOTS * CONTEXT
    parameters.n_batch = parameters.n_ubatch = 512
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
    parameters.cache_ram_mib = parameters.verbosity = 0
    parameters.cache_prompt = False
    if port:
        parameters.hostnames, parameters.port = ["127.0.0.1"], port
        return xllamacpp.Server(parameters)
    with tempfile.TemporaryDirectory() as folder:
        parameters.hostnames = [f"{folder}/http.sock"]
        return xllamacpp.Server(parameters)


def bare(model: str, threads: int) -> Handler:
    server = llama_cpp(model, threads)

    def run(texts: list[str], tokens: int) -> Answer:
        results: Times = []

        def one(text: str) -> None:
            body = {"prompt": text, "stream": True, "cache_prompt": False, **sampling(tokens)}
            times = [perf_counter()]
            results.append(times)
            server.handle_completions(json.dumps(body).encode(), lambda data: times.append(perf_counter()))
            times.pop()  # the last piece contains no token

        running = [threading.Thread(target=one, args=(text,)) for text in texts]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        return {"times": results}

    return run


def llama_server(model: str, threads: int) -> Handler:
    port = free_port()
    server = llama_cpp(model, threads, port)
    run = http(f"127.0.0.1:{port}", "m")

    def with_server(texts: list[str], tokens: int) -> Answer:
        assert server is not None, "it serves as long as it is referred to"
        return run(texts, tokens)

    return with_server


def lane(url: str) -> Handler:
    import shmserve

    async def one(client: shmserve.AsyncClient, text: str, tokens: int) -> list[float]:
        provided = {
            "text_input": np.array([text], object),
            "stream": np.array([True]),
            "sampling_parameters": np.array([json.dumps(sampling(tokens))], object),
        }
        times = [perf_counter()]
        async for part in client.stream("m", provided):
            if part["text_output"][0]:
                times.append(perf_counter())
        return times

    async def all_of(texts: list[str], tokens: int) -> Times:
        async with shmserve.AsyncClient(url) as client:
            await client.ready("m")
            return list(await asyncio.gather(*(one(client, text, tokens) for text in texts)))

    return handler(all_of)


def http(address: str, openai: str) -> Handler:
    """`openai`: the name of the model at OpenAI's endpoint; "": generate_stream is used."""
    host, _, port = address.rpartition(":")
    path = "/v1/completions" if openai else "/v2/models/m/generate_stream"

    async def one(text: str, tokens: int) -> list[float]:
        document: dict[str, Any] = {"text_input": text, "stream": True, "parameters": sampling(tokens)}
        if openai:
            document = {"model": openai, "prompt": text, "stream": True, **sampling(tokens)}
        body = json.dumps(document).encode()
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {path} HTTP/1.1\r\nHost: {address}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        times = [perf_counter()]
        writer.write(head.encode() + body)
        status = await reader.readline()
        if not status.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(f"{address}{path} answered {status!r}: {await reader.read(2000)!r}")
        while (line := await reader.readline()) != b"0\r\n":
            if not line:
                raise RuntimeError("the server closed the connection")
            if line.startswith(b"data: {") and b'"text_output":""' not in line and b'"text":""' not in line:
                times.append(perf_counter())
        writer.close()
        return times

    async def all_of(texts: list[str], tokens: int) -> Times:
        return list(await asyncio.gather(*(one(text, tokens) for text in texts)))

    return handler(all_of)


def handler(all_of: Callable[[list[str], int], Coroutine[Any, Any, Times]]) -> Handler:
    return lambda texts, tokens: {"times": asyncio.run(all_of(texts, tokens))}


# ---------------------------------------------------------------------------------------------- the measurement


class Way:
    """A process that runs streams in one of the ways. `pid`: that of the server that it uses; 0: none."""

    def __init__(self, pid: int, make: Callable[..., Handler], **arguments: Any) -> None:
        self._pid = pid
        self.child = Child(f"{__spec__.name}:{make.__name__}", **arguments)

    def run(self, texts: list[str], tokens: int) -> Times:
        times: Times = self.child.ask(texts=texts, tokens=tokens)["times"]
        return times

    def busy_seconds(self) -> float:
        return sum(processes.busy_seconds(pid) for pid in (self.child.pid, self._pid) if pid)


def summary(times: Times, tokens: int) -> tuple[float, float]:
    """Means over the streams, in ms: time to the first token, time between tokens. A response may have several tokens.

    Not medians: prompts that start at once are computed in a few long steps, and the median stream falls into one of
    two steps by chance."""
    assert all(len(one) > 2 for one in times), "a stream has no tokens"
    return (
        mean(one[1] - one[0] for one in times) * 1e3,
        mean(one[-1] - one[1] for one in times) / (tokens - 1) * 1e3,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", default=samples.chat_model_file())
    parser.add_argument("--ways", nargs="+", help="default: all; the first one is what the others are compared with")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--words", type=int, default=32, help="length of the prompts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--starts", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.model is None:
        parser.error("give a model, or install the sample `chat` with `make samples`")
    results: Results = {}
    for number in range(arguments.starts):
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            measure(start(stack, arguments, Path(folder), reverse=number % 2 == 1), arguments, results)
    show(results)


def start(stack: ExitStack, arguments: argparse.Namespace, folder: Path, reverse: bool) -> dict[str, Way]:
    @cache
    def server() -> Server:
        version = folder / "models" / "m" / "1"
        version.mkdir(parents=True)
        write_model(version, arguments.model.resolve(), arguments.threads)
        models = version.parent.parent
        return stack.enter_context(Server(models, *VARIABLES, gateway=True, start_timeout=START_S))

    makers: dict[str, Callable[[], Way]] = {
        "bare": lambda: Way(0, bare, model=str(arguments.model), threads=arguments.threads),
        "llama-server": lambda: Way(0, llama_server, model=str(arguments.model), threads=arguments.threads),
    }
    if arguments.model.is_dir():
        makers = {
            "vllm serve": lambda: vllm_serve(stack, arguments.model, folder, arguments.threads),
            "vllm serve (defaults)": lambda: vllm_serve(stack, arguments.model, folder, 0),
        }
    makers |= {
        "lane": lambda: Way(server().pid, lane, url=server().url),
        "HTTP": lambda: Way(server().pid, http, address=server().endpoints["http"], openai=""),
        "OpenAI": lambda: Way(server().pid, http, address=server().endpoints["http"], openai="m"),
    }
    names = arguments.ways or list(makers)
    ways = {name: makers[name]() for name in (names[::-1] if reverse else names)}
    for way in ways.values():
        stack.enter_context(way.child)
    return {name: ways[name] for name in names}


def vllm_serve(stack: ExitStack, model: Path, work: Path, threads: int) -> Way:
    """`threads`: as in our backend, with the same variables and without statistics; 0: with its own defaults."""
    port, environment = free_port(), dict(os.environ)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]
    for name, value in vllm_arguments(model).items():
        command += [f"--{name.replace('_', '-')}", str(value)] if name != "model" else []
    if threads:
        prepare_environment(threads, environment)
        command.append("--disable-log-stats")
    peer = stack.enter_context(running(f"vllm-{threads}", command, environment, work))
    peer.await_success(urllib.request.Request(f"http://127.0.0.1:{port}/health"))
    return Way(peer.pid, http, address=f"127.0.0.1:{port}", openai="m")


def vllm_arguments(model: Path) -> dict[str, Any]:
    return {"model": str(model), "max_num_seqs": SLOTS, "max_model_len": CONTEXT}


def write_model(version: Path, model: Path, threads: int) -> None:
    backend, settings = "vllm", {"threads": str(threads)}
    if model.is_dir():
        (version / "model.json").write_text(json.dumps(vllm_arguments(model)))
    else:
        os.symlink(model, version / "model.gguf")
        backend = "llamacpp"
        settings |= {"slots": str(SLOTS), "context_length": str(CONTEXT), "prompt_cache": "false"}
    rows = [f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}' for key, value in settings.items()]
    (version.parent / "config.pbtxt").write_text("\n".join([f'backend: "{backend}"', *rows]))


def await_idle(ways: Collection[Way]) -> None:
    """Two processes of vLLM spin for a second after their last step: they would take the cores of the next server."""
    before = -IDLE_S
    while (busy := sum(way.busy_seconds() for way in ways)) - before >= IDLE_S:
        before = busy
        threading.Event().wait(LOOK_S)


def measure(ways: dict[str, Way], arguments: argparse.Namespace, results: Results) -> None:
    for way in ways.values():
        way.run(prompts(1, arguments.words, 0), 4)
    for streams in arguments.streams:
        of = results.setdefault(streams, {name: [] for name in ways})
        for number in range(arguments.rounds):
            names = list(ways) if number % 2 else list(ways)[::-1]
            for name in names:
                await_idle(ways.values())
                texts = prompts(streams, arguments.words, number)
                began, busy = perf_counter(), ways[name].busy_seconds()
                times = ways[name].run(texts, arguments.tokens)
                count = streams * arguments.tokens
                rate = count / (perf_counter() - began)
                used = (ways[name].busy_seconds() - busy) / count * 1e3
                of[name].append((*summary(times, arguments.tokens), rate, used))
        print(f"measured {streams} streams", file=sys.stderr)


def show(results: Results) -> None:
    print("| streams | | first token, ms | between tokens, ms | tokens/s | processor ms/token |")
    print("| ---: | --- | ---: | ---: | ---: | ---: |")
    for streams, of in results.items():
        first = next(iter(of.values()))
        for name, rounds in of.items():
            cells = [f"{median(values):.2f}" for values in zip(*rounds, strict=True)]
            if rounds is not first:
                pairs = list(zip(rounds, first, strict=True))
                ratios = [median(one[index] / max(base[index], 1e-3) for one, base in pairs) - 1 for index in range(4)]
                cells = [f"{cell} ({ratio:+.0%})" for cell, ratio in zip(cells, ratios, strict=True)]
            print(f"| {streams} | {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
