"""Arguments of `shmserve plan`."""

from __future__ import annotations

import argparse
import re
from typing import Any

from shmserve.clients.cli.arguments.common import (
    add_command,
    add_output,
    at_least_0,
    at_least_1,
    duration,
    integer,
    parsed,
    positive,
    span,
)
from shmserve.clients.cli.help import CommandParser, rare

_RATE = re.compile(r"(\d+(?:\.\d+)?)([kKM]?)")
_FACTORS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6}
POLICIES = ("random", "round-robin", "two-choices", "least", "hash", "bounded-hash")
"""The policies of the simulator, which is imported only to run it."""
MAX_SERVERS = 100_000
MAX_KEYS = 10_000_000
MAX_REQUESTS = 1_000_000_000


def add_plan(commands: Any) -> None:
    examples = """  shmserve plan --servers 100 --rate 50k --policy all
  shmserve plan --servers 10 --rate 5k --kill-zone 5s+20s --deadline 100ms
  shmserve plan --from http://gpu1:8000 --model mlp --servers 20,40,80
  shmserve plan --servers 10 --rate 5k --surge 2@20s+60s --autoscale 10-40 --start 30s
"""
    note = """
Simulates servers behind load balancers: no server is needed, unless --from asks one for its service times. Several
values, separated by commas, are simulated one after the other. The same arguments give the same result. A server is a
queue that behaves like the product's scheduler; --exact runs the scheduler itself, which takes about six times longer.
"""
    about = "simulate a fleet of servers: latency, failures, cost"
    codes = ("simulated", "no request was completed in time, or --from cannot be read")
    command = add_command(commands, "plan", "plan", about, examples, codes, note)
    add = command.add_argument
    add("--servers", metavar="N", type=several(integer(1, MAX_SERVERS)), help="number of servers (default: 100)")
    add("--instances", metavar="N", type=at_least_1, help="model instances of each, e.g. one per GPU (default: 8)")
    add("--rate", metavar="N", type=several(rate), help="requests per second: 500, 50k, 1.2M (default: 70%% load)")
    add("--service-ms", metavar="MS", type=positive, help="time of a batch (default: 12); --service has more forms")
    add(
        "--from",
        dest="source",
        metavar="FILE|URL",
        help="take batch times from `bench --save`, `tune --json`, or a server",
    )
    add("--max-batch", metavar="N", type=at_least_1, help="requests of a batch (default: 1, or as measured)")
    text = f"how servers are chosen, or `all` (default: two-choices): {', '.join(POLICIES)}"
    add("--policy", metavar="NAME", type=several(policy), default=["two-choices"], help=text)
    add("--deadline", metavar="TIME", type=duration, default=0, help="requests that take longer fail")
    text = "all servers of a zone fail at AT, e.g. 5s+20s"
    add("--kill-zone", metavar="AT[+FOR]", type=when, action="append", default=[], help=text)
    text = "scale with the requests in flight"
    add("--autoscale", metavar="N-M", type=span, help=text)
    text = "number of requests to simulate (default: 200k, or past the last failure)"
    add("--requests", metavar="N", type=requests, default=0, help=text)
    _add_service(command)
    _add_balancers(command)
    _add_changes(command)
    add_output(command, json="print JSON, with a timeline")


def _add_service(command: CommandParser) -> None:
    add = command.add_argument
    text = "time of a batch: 5ms, 1ms+0.2ms/row, lognormal:5ms,0.4 or table:FILE (docs/sizing.md)"
    rare(add, "--service", metavar="TIME", help=text)
    rare(add, "--model", metavar="NAME", default="", help="with --from URL: the model (default: the only one)")
    rare(add, "--delay", metavar="TIME", type=duration, help="how long a batch waits for more requests (default: 0)")
    text = "price of an instance per hour (default: 2.5)"
    rare(add, "--price", metavar="N", type=positive, default=2.5, help=text)
    rare(add, "--seconds", metavar="N", type=positive, default=0.0, help="how long requests are sent")
    rare(add, "--seed", metavar="N", type=at_least_0, default=0, help="random seed (default: 0)")
    rare(add, "--exact", action="store_true", help="run the product's scheduler itself, which takes longer")


def _add_balancers(command: CommandParser) -> None:
    add = command.add_argument
    text = "load balancers; each knows only its own requests in flight (default: 1)"
    rare(add, "--balancers", metavar="N", type=integer(1, 1000), default=1, help=text)
    text = "servers report their requests in flight this often; balancers add what they have sent since"
    rare(add, "--report-every", metavar="TIME", type=duration, default=0, help=text)
    text = "one way between a balancer and a server (default: 250us)"
    rare(add, "--network", metavar="TIME", type=duration, default=250_000, help=text)
    text = "number of different requests, for the response cache and the hash policies (default: all differ)"
    rare(add, "--keys", metavar="N", type=keys, default=0, help=text)
    text = "exponent of the Zipf distribution of the keys; 0: all keys are equally frequent (default: 1)"
    rare(add, "--skew", metavar="N", type=number, default=1.0, help=text)
    text = "responses in the cache of each server (default: no cache)"
    rare(add, "--cache", metavar="N", type=keys, default=0, help=text)
    text = "for bounded-hash: maximum requests in flight at a server, relative to the mean (default: 1.25)"
    rare(add, "--bound", metavar="N", type=positive, default=1.25, help=text)


def _add_changes(command: CommandParser) -> None:
    add = command.add_argument
    rare(
        add, "--zones", metavar="N", type=at_least_1, default=3, help="zones with equal numbers of servers (default: 3)"
    )
    text = "N servers fail at AT; repeatable"
    rare(add, "--kill", metavar="N@AT[+FOR]", type=counted, action="append", default=[], help=text)
    text = "mean time between failures of one server (default: none)"
    rare(add, "--mtbf", metavar="TIME", type=duration, default=0, help=text)
    text = "with --mtbf: time until a server is back (default: 60s)"
    rare(add, "--repair", metavar="TIME", type=duration, default=60_000_000_000, help=text)
    text = "time until balancers stop sending to a failed server (default: 2s)"
    rare(add, "--detect", metavar="TIME", type=duration, default=2_000_000_000, help=text)
    text = "time until a connection to a failed server is given up (default: 200ms)"
    rare(add, "--connect", metavar="TIME", type=duration, default=200_000_000, help=text)
    text = "how often a request that reached no server is sent to another one (default: 2)"
    rare(add, "--retries", metavar="N", type=at_least_0, default=2, help=text)
    text = "also retry requests that a failed server had received; they may run twice"
    rare(add, "--retry-lost", action="store_true", help=text)
    text = "multiply the rate by FACTOR at AT; repeatable"
    rare(add, "--surge", metavar="FACTOR@AT[+FOR]", type=factored, action="append", default=[], help=text)
    text = "with --autoscale: requests in flight per instance to aim at (default: 1)"
    rare(add, "--target", metavar="N", type=positive, default=1.0, help=text)
    text = "with --autoscale: time between decisions (default: 15s)"
    rare(add, "--scale-every", metavar="TIME", type=duration, default=15_000_000_000, help=text)
    text = "with --autoscale: time until a new server is ready (default: 60s)"
    rare(add, "--start", metavar="TIME", type=duration, default=60_000_000_000, help=text)
    text = "with --autoscale: how long fewer servers must be enough before some stop (default: 300s)"
    rare(add, "--scale-down", metavar="TIME", type=duration, default=300_000_000_000, help=text)


# ------------------------------------------------------------------------------------ argument types


def several(one: Any) -> Any:
    """Values separated by commas."""

    def read(text: str) -> list[Any]:
        results = [one(word) for word in text.split(",")]
        return [value for each in results for value in (each if isinstance(each, tuple) else (each,))]

    return read


def policy(text: str) -> str | tuple[str, ...]:
    if text == "all":
        return POLICIES
    if text not in POLICIES:
        raise argparse.ArgumentTypeError(f"'{text}' is not a policy; the policies are {', '.join(POLICIES)}, and all")
    return text


def rate(text: str) -> float:
    """500, 50k or 1.2M."""
    result = _RATE.fullmatch(text.strip())
    value = float(result[1]) * _FACTORS[result[2]] if result else 0.0
    if not 0 < value < 1e10:
        raise argparse.ArgumentTypeError(f"'{text}' is not a rate above 0, such as 500, 50k or 1.2M")
    return value


def requests(text: str) -> int:
    value = round(rate(text))
    if not 1 <= value <= MAX_REQUESTS:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of requests from 1 to {MAX_REQUESTS:,}")
    return value


def keys(text: str) -> int:
    value = round(rate(text))
    if not 1 <= value <= MAX_KEYS:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 1 to {MAX_KEYS:,}")
    return value


def number(text: str) -> float:
    value = parsed(text)
    if not 0 <= value < 100:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 0 to 100")
    return value


def when(text: str) -> tuple[int, int]:
    """5s or 5s+20s: when it begins, and how long it lasts (0: to the end)."""
    at, plus, lasts = text.partition("+")
    return duration(at), duration(lasts) if plus else 0


def counted(text: str) -> tuple[int, int, int]:
    """2@5s+20s."""
    count, result, rest = text.partition("@")
    if not result:
        raise argparse.ArgumentTypeError(f"'{text}' is not N@AT or N@AT+FOR, such as 2@5s+20s")
    return at_least_1(count), *when(rest)


def factored(text: str) -> tuple[float, int, int]:
    """1.5@5s+20s."""
    factor, result, rest = text.partition("@")
    if not result:
        raise argparse.ArgumentTypeError(f"'{text}' is not FACTOR@AT or FACTOR@AT+FOR, such as 1.5@5s+20s")
    return positive(factor), *when(rest)
