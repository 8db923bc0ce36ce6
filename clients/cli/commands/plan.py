"""`shmserve plan`: simulates a fleet of servers.

Invariant: this module simulates nothing. It makes plans from the arguments, runs them in `shmserve.tools.plan`, and
prints the results.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmserve.clients.cli.commands.base import StatusLine, print_json, screen_of
from shmserve.errors import InvalidRequest
from shmserve.terminal.console import FAINT, HEAD, Column, Screen
from shmserve.terminal.errors import Failed, Misuse

if TYPE_CHECKING:
    from shmserve.sim import SimModel
    from shmserve.sim.service import Service
    from shmserve.tools.plan import FleetPlan, FleetResult
    from shmserve.tools.plan.measured import MeasuredModel

SERVERS = 100
INSTANCES = 8
SERVICE_MS = 12.0
LOAD = 0.7
"""Default rate, as a share of the capacity."""
REQUESTS = 200_000
AFTER = 10
"""Seconds simulated after the last change, if no end is given."""
STARTS = 3
"""Time simulated after the last change with an autoscaler, as a multiple of a server's start time."""
WINDOWS = 24
"""Rows of the timeline."""
SECOND = 1_000_000_000
MS = 1_000_000
ASK_S = 30.0

COLUMNS = (
    Column("POLICY"),
    Column("SERVERS", right=True),
    Column("RATE/S", right=True),
    Column("IN TIME", right=True),
    Column("P50 MS", right=True),
    Column("P99 MS", right=True),
    Column("P99.9 MS", right=True, rank=3),
    Column("USE", right=True, rank=2),
    Column("HITS", right=True, rank=5),
    Column("FAILED", right=True),
    Column("PER MILLION", right=True, rank=1),
    Column("RECOVERED", right=True, rank=4),
)
TIMELINE = (
    Column("FROM S", right=True),
    Column("SENT/S", right=True),
    Column("IN TIME/S", right=True),
    Column("FAILED", right=True),
    Column("P50 MS", right=True),
    Column("P99 MS", right=True),
    Column("SERVERS", right=True),
)


def plan(args: argparse.Namespace) -> int:
    """Returns 1 if no request was answered in time, else 0."""
    measured = _measured(args) if args.source else None
    try:
        plans = list(_plans(args, measured))
        for each in plans:
            each.check()
    except InvalidRequest as error:
        raise Misuse(str(error)) from error
    from shmserve.tools.plan import simulate_fleet

    results = []
    with StatusLine() as status:
        for number, each in enumerate(plans, 1):
            which = f"{number}/{len(plans)} " if len(plans) > 1 else ""
            results.append(simulate_fleet(each, _progress(status, each, which)))
    if args.json:
        matches = [result.as_json(args.price) for result in results]
        print_json({"service": _described(args, measured), "price_per_hour": args.price, "results": matches})
    else:
        print(_text(args, results, screen_of(args), measured))
    return 0 if any(result.good for result in results) else 1


# ------------------------------------------------------------------------------------------------- the plans


def _plans(args: argparse.Namespace, measured: MeasuredModel | None) -> Iterator[FleetPlan]:
    from shmserve.tools.plan import Autoscale, FleetPlan, Outage, Surge

    model = _model(args, measured)
    outages = [Outage(at, lasts, zone=number % args.zones) for number, (at, lasts) in enumerate(args.kill_zone)]
    outages += [Outage(at, lasts, servers=count) for count, at, lasts in args.kill]
    surges = tuple(Surge(factor, at, lasts) for factor, at, lasts in args.surge)
    policies = [name for name in args.policy if args.keys or not name.endswith("hash") or len(args.policy) == 1]
    for servers, policy in product(args.servers or _default_servers(args), policies):
        for rate in args.rate or [_capacity(model) * servers * LOAD]:
            seconds, requests = _end(args)
            scale = None
            if args.autoscale:
                minimum, maximum = args.autoscale
                scale = Autoscale(minimum, maximum, args.target, args.scale_every, args.start, args.scale_down)
            yield FleetPlan(
                model=model,
                servers=servers,
                rate=rate,
                seconds=seconds,
                requests=requests,
                policy=policy,
                balancers=args.balancers,
                report_ns=args.report_every,
                bound=args.bound,
                keys=args.keys,
                skew=args.skew,
                cached=args.cache,
                network_ns=args.network,
                timeout_ns=args.deadline,
                zones=args.zones,
                outages=tuple(outages),
                mtbf_s=args.mtbf / SECOND,
                repair_ns=args.repair,
                detect_ns=args.detect,
                connect_ns=args.connect,
                retries=args.retries,
                retry_lost=args.retry_lost,
                surges=surges,
                autoscale=scale,
                fast=not args.exact,
                seed=args.seed,
                windows=WINDOWS,
            )


def _default_servers(args: argparse.Namespace) -> list[int]:
    return [args.autoscale[0] if args.autoscale else SERVERS]


def _end(args: argparse.Namespace) -> tuple[float, int]:
    """Seconds and requests: as given, else enough to show the effect of all changes."""
    changes = [at + lasts for at, lasts in args.kill_zone]
    changes += [at + lasts for _, at, lasts in [*args.kill, *args.surge]]
    if args.seconds or args.requests:
        return args.seconds, args.requests
    if args.autoscale:
        return max(changes, default=0) / SECOND + STARTS * args.start / SECOND, 0
    return (max(changes) / SECOND + AFTER, 0) if changes else (0.0, REQUESTS)


def _model(args: argparse.Namespace, measured: MeasuredModel | None) -> SimModel:
    from shmserve.core.policy import BatchPolicy, ModelPolicy, TensorSpec
    from shmserve.sim.plan import simple_model

    batch = args.max_batch or (measured.max_batch if measured is not None else 0) or 1
    delay = args.delay if args.delay is not None else max(measured.delay_ns, 0) if measured is not None else 0
    tensors = (TensorSpec("x", "FP32", (16,)),), (TensorSpec("y", "FP32", (16,)),)
    policy = ModelPolicy("model", 1, batch, *tensors, BatchPolicy(delay_ns=delay) if batch > 1 else None)
    return simple_model(
        policy, args.instances or (measured.instances if measured else 0) or INSTANCES, _service(args, measured)
    )


def _service(args: argparse.Namespace, measured: MeasuredModel | None) -> Service:
    from shmserve.sim.service import Constant, parse

    provided = [name for name in ("service", "service_ms", "source") if getattr(args, name)]
    if len(provided) > 1:
        names = " and ".join(f"--{'from' if name == 'source' else name.replace('_', '-')}" for name in provided)
        raise Misuse(f"{names} exclude each other")
    if measured is not None:
        return measured.service
    return parse(args.service) if args.service else Constant(round((args.service_ms or SERVICE_MS) * MS))


def _capacity(model: SimModel) -> float:
    """Requests per second of a server with full batches, from the mean of some drawn times. The broker handles at most
    two messages per request."""
    from random import Random

    from shmserve.sim import Plan

    draws, rows = Random(0), model.policy.max_batch if model.policy.batching is not None else 1
    times = [model.service.ns(rows, draws) for _ in range(1000)]
    return SECOND * min(rows * len(model.instances) * len(times) / sum(times), 1 / (2 * Plan((model,)).message_ns))


def _measured(args: argparse.Namespace) -> MeasuredModel:
    from shmserve.tools.plan.measured import read_measured

    try:
        return read_measured(_document(args), args.model)
    except InvalidRequest as error:
        raise Failed(f"--from {args.source}: {error}") from error


def _document(args: argparse.Namespace) -> Any:
    source = args.source
    if "://" not in source:
        try:
            return json.loads(Path(source).read_bytes())
        except OSError as error:
            raise Failed(f"cannot read {source}: {error.strerror}") from error
        except ValueError as error:
            raise Failed(f"{source} is not JSON: {error}") from error
    if not source.startswith(("http://", "https://")):
        from shmserve.clients.client import Client

        with Client(source, timeout=ASK_S) as client:
            return client.statistics(args.model or None)
    from shmserve.transport.http_link import HttpLink, parts_of

    parts = parts_of(source)
    path = f"models/{args.model}/stats" if args.model else "models/stats"
    with closing(HttpLink(parts.scheme, parts.netloc, "", ASK_S)) as link:
        return link.call("GET", f"{parts.path.rstrip('/')}/v2/{path}")


# ------------------------------------------------------------------------------------------------- output


def _described(args: argparse.Namespace, measured: MeasuredModel | None) -> str:
    if measured is not None:
        times = ", ".join(f"{rows}: {ns / MS:.3g}" for rows, ns in measured.service.entries)
        return f"{measured.origin}, ms by rows: {times}"
    return args.service or f"{args.service_ms or SERVICE_MS:g}ms"


def _text(args: argparse.Namespace, results: list[FleetResult], screen: Screen, measured: MeasuredModel | None) -> str:
    cached, changed = args.cache, any(result.disturbed_ns >= 0 for result in results)
    names = {"HITS": cached, "RECOVERED": changed}
    shown = [at for at, column in enumerate(COLUMNS) if names.get(column.name, True)]
    rows = [_row(result, args.price) for result in results]
    parts = [screen.table([COLUMNS[at] for at in shown], [[row[at] for at in shown] for row in rows])]
    if len(results) == 1 and (changed or args.autoscale or args.mtbf):
        parts.append(f"{screen.styled('Over time:', HEAD)}\n{screen.table(TIMELINE, _timeline(results[0]))}")
    failed = sorted({code for result in results for code in result.failed})
    if failed:
        counts = [f"{sum(result.failed.get(code, 0) for result in results):,} {code}" for code in failed]
        parts.append(f"failed: {', '.join(counts)}")
    engine = "the scheduler itself" if args.exact else "servers as queues; --exact runs the scheduler itself"
    note = f"{results[0].instances} instances per server, service time {_described(args, measured)}; {engine}"
    parts.append("\n".join(screen.wrapped(note, "", "", FAINT)))
    return "\n\n".join(parts)


def _row(result: FleetResult, price: float) -> list[str]:
    latency, cost = result.latency, result.cost(price)
    failed = sum(result.failed.values())
    use = f"{result.utilization:.0%}" if result.busy else "-"
    spread = f" ({result.busy[0]:.0%}-{result.busy[-1]:.0%})" if len(result.busy) > 1 else ""
    recovered = result.recovered_s
    return [
        result.policy,
        f"{result.servers:,}",
        f"{result.rate:,.0f}",
        f"{result.good / max(result.sent, 1):.3%}",
        *[f"{latency.quantile(share) / MS:.2f}" if latency.count else "-" for share in (0.5, 0.99, 0.999)],
        use + spread,
        f"{result.hits / max(result.sent, 1):.0%}",
        f"{failed:,}",
        f"{cost:.4g}" if cost is not None else "-",
        "-" if result.disturbed_ns < 0 else "never" if recovered is None else f"{recovered:.2f} s",
    ]


def _timeline(result: FleetResult) -> list[list[str]]:
    length = result.windows[1].start_ns / SECOND
    return [
        [
            f"{window.start_ns / SECOND:.2f}",
            f"{window.sent / length:,.0f}",
            f"{window.good / length:,.0f}",
            f"{window.failed:,}",
            *[f"{window.latency.quantile(share) / MS:.2f}" if window.latency.count else "-" for share in (0.5, 0.99)],
            f"{window.servers:,}",
        ]
        for window in result.windows
        if window.sent
    ]


def _progress(status: StatusLine, plan: FleetPlan, which: str) -> Callable[[int, float], None] | None:
    """Shows the progress on stderr: a live line on a terminal, else a line per simulation."""
    text = f"{which}{plan.policy}, {plan.servers:,} servers, {plan.rate:,.0f} requests/s"
    if not status.is_shown:
        print(f"shmserve plan: {text}", file=sys.stderr, flush=True)
        return None
    return lambda sent, at_s: status.show(f"{text}, {at_s * SECOND / plan.duration_ns:.0%}")
