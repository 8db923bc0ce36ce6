"""Arguments of `shmserve bench`."""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path
from typing import Any

from shmserve.clients.cli.arguments.common import (
    add_color,
    add_json,
    add_model,
    add_server_command,
    at_least_0,
    at_least_1,
    duration,
    integer,
    parsed,
)
from shmserve.clients.cli.commands import completion
from shmserve.clients.cli.help import CommandParser, rare

MAX_LOADS = 1000
MAX_TOKENS = 10_000_000
OBJECTIVES = {"ttft": "ttft", "itl": "itl", "tpot": "itl", "e2e": "e2e", "e2el": "e2e"}
"""Names of objectives, also those of other load generators -> those of `Objectives`."""
MAX_CALLERS = 65_536
MAX_PER_S = 10_000_000
MAX_PROCESSES = 256
MAX_WAITING = 1_000_000
"""Maximum number of requests or sequences in flight in an open loop."""
SYNONYMS = {
    "--duration": "--window",
    "--time": "--window",
    "--measurement-interval": "--window",
    "--connections": "--concurrency",
    "--clients": "--concurrency",
    "--threads": "--concurrency",
    "--users": "--concurrency",
    "--concurrency-range": "--concurrency",
    "--qps": "--rate",
    "--rps": "--rate",
    "--request-rate-range": "--rate",
    "--request-rate": "--rate",
    "--request-distribution": "--arrivals",
    "--request-intervals": "--replay",
    "--latency-threshold": "--until",
    "--input-data": "--data",
    "--batch-size": "--batch",
    "--streaming": "--stream",
    "--stability-percentage": "--tolerance",
    "--goodput": "--slo",
    "--dataset-path": "--prompts",
    "--input-file": "--prompts",
    "--base-url": "--openai",
    "--random-input-len": "--prompt-tokens",
    "--synthetic-input-tokens-mean": "--prompt-tokens",
    "--random-output-len": "--output-tokens",
    "--output-tokens-mean": "--output-tokens",
    "--extra-inputs": "--sampling",
    "--max-concurrency": "--concurrency",
    "--max-trials": "--windows",
    "--out": "--save",
    "--output": "--save",
    "--insecure": "--ca",
    "--cacert": "--ca",
}
"""Options of other load generators -> options of `bench`."""


def add_bench(commands: Any) -> None:
    examples = """  shmserve bench mlp --concurrency 1:64 --html report.html
  shmserve bench mlp --rate 500 --deadline 20ms
  shmserve bench mlp --until p99=20ms
  shmserve bench mlp --url http://127.0.0.1:8000 --input x=@images/
  shmserve bench chat --prompt-tokens 64:512 --concurrency 1:32 --slo ttft=200ms,itl=50ms
  shmserve bench --compare before.json after.json
"""
    about = "put load on a model and measure throughput and latency"
    codes = (
        "measured; with --compare: no metric is worse",
        "no request succeeded; with --until: no load kept the limit; with --compare:\n       a metric is worse",
    )
    urls = "http, https, grpc or grpcs://HOST:PORT of any KServe v2 server, "
    command = add_server_command(commands, "bench", "bench", about, examples, codes, urls=urls, synonyms=SYNONYMS)
    add_model(command, "?")
    _add_endpoint(command)
    _add_load(command)
    _add_requests(command)
    _add_language(command)
    _add_measurement(command)
    _add_results(command)


def _add_endpoint(command: CommandParser) -> None:
    add = command.add_argument
    rare(
        add,
        "--header",
        metavar="NAME: VALUE",
        type=header,
        action="append",
        default=[],
        help="over HTTP and gRPC: send this header with each request; repeatable",
    )
    rare(
        add, "--ca", metavar="FILE", help="with https:// or grpcs://: CA certificates to trust instead of the system's"
    )
    rare(
        add,
        "--client-cert",
        metavar="FILE",
        help="with https:// or grpcs://: the client's certificate; PEM, with its intermediates",
    )
    rare(add, "--client-key", metavar="FILE", help="private key of --client-cert (default: in the same file)")


def _add_load(command: CommandParser) -> None:
    add = command.add_argument
    how = command.add_mutually_exclusive_group().add_argument
    how(
        "-c",
        "--concurrency",
        metavar="N",
        type=callers,
        help="callers, each waits for its response (default: 1); 1,8,32 or 1:64 (doubling) or 1:64:8 (steps)",
    )
    how(
        "-r",
        "--rate",
        metavar="N",
        type=rates,
        help="requests per second, regardless of the server; latency counts from the intended send time, and ranges "
        "are as for --concurrency",
    )
    rare(
        how,
        "--replay",
        metavar="FILE",
        type=Path,
        help='send at recorded times: per line, {"at": SECONDS} as for the simulator, or only the seconds',
    )
    add(
        "--until",
        metavar="P=TIME",
        type=limit,
        help="search for the highest load that keeps e.g. p99=20ms; within --concurrency LOW:HIGH "
        "(default: 1:1024), or --rate LOW:HIGH",
    )
    rare(
        add,
        "--arrivals",
        choices=("poisson", "constant"),
        default="poisson",
        help="with --rate: random or equal gaps between requests (default: %(default)s)",
    )
    rare(
        add,
        "--in-flight",
        metavar="N",
        type=integer(1, MAX_WAITING),
        default=4096,
        help="with --rate or --replay: maximum requests in flight; others wait, which counts as latency "
        "(default: %(default)s)",
    )


def _add_requests(command: CommandParser) -> None:
    add = command.add_argument
    add(
        "-i",
        "--input",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="an input: numbers, JSON, @FILE (.npy, .json, image, .bin) or @DIR, whose files are sent in turn "
        "(default: random); repeatable",
    )
    rare(
        add,
        "--data",
        metavar="PATH",
        help="JSON file with all inputs, as for infer, or a directory of such files, sent in turn",
    )
    add("-b", "--batch", metavar="N", type=at_least_1, help="rows of random inputs (default: 1)")
    rare(add, "--shape", metavar="NAME=D1,D2,...", action="append", default=[], help="full shape of a random input")
    rare(
        add,
        "--seed",
        metavar="N",
        type=at_least_0,
        help="seed of random inputs and arrivals, to repeat a run (default: another one each time)",
    )
    rare(add, "--outputs", metavar="NAME,...", help="outputs to request (default: all)")
    add(
        "--stream",
        action="store_true",
        help="for decoupled models; also measures the time to the first response and between responses",
    )
    rare(add, "--sequence-length", metavar="N", type=at_least_1, help="send sequences of N requests")
    rare(
        add,
        "--sequences",
        metavar="N",
        type=integer(1, MAX_WAITING),
        default=64,
        help="with --sequence-length, in an open loop: sequences at a time (default: %(default)s)",
    )
    add(
        "--deadline",
        metavar="TIME",
        type=duration,
        help="timeout of each request, e.g. 20ms; reports the rate of responses in time",
    )
    text = "model version (default: latest)"
    completion.completes(rare(add, "--version", metavar="N", type=at_least_1, help=text), completion.versions)


def _add_language(command: CommandParser) -> None:
    """Arguments for language models. Any of --openai and those of prompts makes `bench` send prompts, not tensors."""
    add = command.add_argument
    rare(
        add,
        "--openai",
        metavar="URL",
        help="measure a language model behind an OpenAI API, of any server: http://HOST:PORT/v1",
    )
    add_prompts(command)
    rare(
        add,
        "--slo",
        metavar="NAME=TIME,...",
        type=objectives,
        help="report the requests per second that meet e.g. ttft=200ms,itl=50ms,e2e=5s: time to the first token, "
        "mean time between tokens, time to the end",
    )


def add_prompts(command: argparse.ArgumentParser) -> None:
    """What a language model is asked."""
    add = command.add_argument
    rare(
        add,
        "--prompts",
        metavar="FILE",
        help='prompts for a language model: per line, {"prompt": TEXT} or {"messages": [...]}, or a file of ShareGPT',
    )
    rare(
        add,
        "--prompt-tokens",
        metavar="N",
        type=lengths,
        help="length of random prompts: 128, equally distributed 64:512, or normally 256+-64 (default: 128)",
    )
    rare(
        add,
        "--output-tokens",
        metavar="N",
        type=lengths,
        help="max_tokens of the requests, as for --prompt-tokens (default: from --prompts, else 128)",
    )
    rare(
        add,
        "--api",
        choices=("chat", "completions"),
        default="chat",
        help="how prompts that are texts are sent to a language model (default: %(default)s)",
    )
    rare(
        add,
        "--sampling",
        metavar="JSON",
        type=json_object,
        default="{}",
        help="other parameters of these requests, for example '{\"ignore_eos\": true}' for exact lengths",
    )


def _add_measurement(command: CommandParser) -> None:
    add = command.add_argument
    rare(
        add,
        "--warmup",
        metavar="TIME",
        type=duration,
        default=10**9,
        help="unmeasured start of each load (default: 1s)",
    )
    rare(add, "--window", metavar="TIME", type=duration, default=10**9, help="length of a window (default: 1s)")
    rare(
        add,
        "--windows",
        metavar="MIN:MAX",
        type=windows,
        default=(3, 10),
        help="number of windows per load (default: 3:10)",
    )
    rare(
        add,
        "--tolerance",
        metavar="PERCENT",
        type=percent,
        default=0.05,
        help="end a load when throughput and latency are known to +- this (default: 5)",
    )
    rare(
        add,
        "--confidence",
        metavar="PERCENT",
        type=percent,
        default=0.95,
        help="confidence level of all intervals (default: 95)",
    )
    rare(
        add,
        "--percentile",
        metavar="P",
        type=percentile,
        default=50.0,
        help="latency that must be stable: p50, p90, p95, p99, p99.9 or p99.99 (default: p50)",
    )
    rare(
        add,
        "--processes",
        metavar="N",
        type=integer(1, MAX_PROCESSES),
        default=0,
        help="generator processes (default: 1, and more if they are too slow: up to half of the cores, or "
        "all for a remote server)",
    )
    rare(add, "--memory", choices=("posix", "frames"), help="with ipc://: how large tensors are passed")
    rare(
        add,
        "--no-echo",
        action="store_false",
        dest="echo",
        help="do not measure the generator against an echo server first, which takes 2 s",
    )


def _add_results(command: CommandParser) -> None:
    add = command.add_argument
    add("--save", metavar="FILE", type=Path, help="write the run as JSON, for --compare")
    add("--html", metavar="FILE", type=Path, help="write a report with charts")
    rare(add, "--csv", metavar="FILE", type=Path, help="write the columns of `perf_analyzer -f`")
    add("--compare", metavar=("OLD", "NEW"), nargs=2, type=Path, help="compare two saved runs")
    add_json(command, "print the run or the comparison as JSON")
    add_color(command)


# ---------------------------------------------------------------------------------------- types


def header(text: str) -> tuple[str, str]:
    match = re.fullmatch(r"([\w-]+):\s*([^\r\n]+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"'{text}' is not a header such as 'Authorization: Bearer TOKEN'")
    return match[1], match[2]


def percentile(text: str) -> float:
    match = re.fullmatch(r"p?(\d+(?:\.\d+)?)", text)
    result = float(match[1]) if match else 0.0
    if not 0 < result < 100:
        raise argparse.ArgumentTypeError(f"'{text}' is not a percentile such as p99 or p99.9")
    return result


def limit(text: str) -> tuple[float, int]:
    """p99=20ms -> the percentile and ns."""
    name, separator, time = text.replace("<=", "=").replace(" ", "").partition("=")
    if not separator or not name.startswith("p"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a limit such as p99=20ms")
    return percentile(name), duration(time)


def lengths(text: str) -> tuple[int, int, float]:
    """N, LOW:HIGH or MEAN+-DEVIATION -> the lowest, the highest, and the deviation (0: equally distributed)."""
    match = re.fullmatch(r"(\d+)(?:(:|\+-)(\d+))?", text)
    if match is not None:
        first, second = int(match[1]), int(match[3] or match[1])
        result = (first, second, 0.0) if match[2] != "+-" else (1, 2 * first - 1, float(second))
        if 0 < result[0] <= result[1] <= MAX_TOKENS:
            return result
    raise argparse.ArgumentTypeError(f"'{text}' is not a length such as 128, 64:512 or 256+-64, up to {MAX_TOKENS:,}")


def json_object(text: str) -> str:
    try:
        if isinstance(json.loads(text), dict):
            return text
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"'{text}' is not a JSON object")


def objectives(text: str) -> dict[str, int]:
    """ttft=200ms,itl=50ms -> ns by name."""
    result = {}
    for part in text.split(","):
        name, separator, time = part.strip().partition("=")
        if not separator or name not in OBJECTIVES:
            raise argparse.ArgumentTypeError(
                f"'{part}' is not an objective such as ttft=200ms: {', '.join(OBJECTIVES)}"
            )
        result[OBJECTIVES[name]] = duration(time)
    return result


def percent(text: str) -> float:
    result = parsed(text.removesuffix("%")) / 100
    if not 0 < result < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a percentage between 0 and 100")
    return result


def windows(text: str) -> tuple[int, int]:
    minimum, _, maximum = text.partition(":")
    result = (at_least_1(minimum), at_least_1(maximum or minimum))
    if not 2 <= result[0] <= result[1] <= 10_000:
        raise argparse.ArgumentTypeError(f"'{text}' is not a range MIN:MAX of at least 2 windows")
    return result


def number_range(text: str) -> tuple[float, ...]:
    """A list (1,8,32), LOW:HIGH (doubling), or LOW:HIGH:STEP."""
    try:
        if ":" not in text:
            result = tuple(map(float, text.split(",")))
        else:
            low, high, *step = map(float, text.split(":"))
            result = _steps(low, high, *step) if 0 < low <= high and all(size > 0 for size in step) else ()
    except (ValueError, TypeError):
        result = ()
    if not result or not all(0 < value < math.inf for value in result):
        text = f"'{text}' is not a number above 0, a list (1,8,32) or a range (1:64 doubles, 1:64:8 has steps of 8)"
        raise argparse.ArgumentTypeError(text)
    return result


def _steps(low: float, high: float, step: float = 0.0) -> tuple[float, ...]:
    """The last value is always `high`."""
    results = [low]
    while len(results) < MAX_LOADS and results[-1] < high:
        results.append(min(high, results[-1] + step if step > 0 else results[-1] * 2))
    return tuple(results) if results[-1] == high else ()


def rates(text: str) -> tuple[float, ...]:
    return _at_most(MAX_PER_S, "requests per second", number_range(text))


def callers(text: str) -> tuple[float, ...]:
    result = number_range(text)
    if any(value != int(value) for value in result):
        raise argparse.ArgumentTypeError(f"'{text}' has a number that is not an integer")
    return _at_most(MAX_CALLERS, "callers", result)


def _at_most(maximum: int, what: str, result: tuple[float, ...]) -> tuple[float, ...]:
    if max(result) > maximum:
        raise argparse.ArgumentTypeError(f"{max(result):,.0f} {what}: the maximum is {maximum:,}")
    return result
