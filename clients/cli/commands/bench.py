"""`shmserve bench`: puts load on a model, prints and saves the results, or compares two saved runs."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from secrets import randbelow
from typing import TYPE_CHECKING

import msgspec

from shmserve.clients.cli.commands.base import StatusLine, next_step, print_json, print_text, screen_of, write_file
from shmserve.clients.cli.contexts import place_of
from shmserve.errors import InvalidRequest
from shmserve.terminal.errors import Failed, Misuse

if TYPE_CHECKING:
    from shmserve.tools.load.plan import Load, LoadPlan, PromptPlan
    from shmserve.tools.load.record import Point, SavedRun

PREVIEW = 3
"""Number of error texts in the message for a run without a successful request."""
SEEDS = 1_000_000
"""Seeds that are chosen at random are below this: short enough to type."""


def bench(args: argparse.Namespace) -> int:
    if args.compare:
        return _compare(args)
    if args.model is None:
        raise Misuse("name the model: `shmserve models` lists them")
    try:
        plan = plan_of(args)
        run = _measured(args, plan)
    except InvalidRequest as error:
        raise Misuse(next_step(error, args)) from error
    if args.json:
        print_json(msgspec.to_builtins(run))
    else:
        from shmserve.tools.load.report.table import run_text

        print_text(run_text(run, screen_of(args)))
    _write(args, run)  # after the results are printed: a file that cannot be written must not lose them
    if not any(point.latency.count for point in run.points):
        raise Failed(_why(run.points))
    return int(plan.limit is not None and run.best is None)


def plan_of(args: argparse.Namespace) -> LoadPlan:
    from shmserve.tools.load.plan import (
        Endpoint,
        LatencyLimit,
        LoadPlan,
        MeasureSettings,
        Objectives,
        RequestInputs,
        Sequences,
    )

    if args.openai and (args.url or args.runtime_dir or args.context):
        raise Misuse("--openai URL is the server: leave out --url, --runtime-dir and --context")
    place = place_of(args, args.openai)
    token = place.token if place.is_http else ""
    endpoint = Endpoint(
        url=place.url,
        runtime_dir=place.runtime_dir,
        server_key=place.server_key,
        key_file=place.key_file,
        memory=args.memory,
        headers=(*args.header, *([("Authorization", f"Bearer {token}")] if token else [])),
        ca=args.ca,
        client_cert=args.client_cert,
        client_key=args.client_key,
        openai=args.openai is not None,
    )
    seed = args.seed if args.seed is not None else randbelow(SEEDS)
    inputs = RequestInputs(
        texts=tuple(args.input),
        data=args.data,
        batch=args.batch,
        shapes=tuple(args.shape),
        seed=seed,
        outputs=tuple(args.outputs.split(",")) if args.outputs else (),
    )
    settings = MeasureSettings(
        warmup_ns=args.warmup,
        window_ns=args.window,
        min_windows=args.windows[0],
        max_windows=args.windows[1],
        tolerance=args.tolerance,
        confidence=args.confidence,
        percentile=args.percentile,
    )
    prompts = None
    if args.openai or asks(args):
        if args.input or args.data or args.shape or args.batch:
            raise Misuse("a language model is sent prompts: leave out --input, --data, --shape and --batch")
        prompts = prompts_of(args, seed)
    limit = None
    if args.until is not None:
        (percentile, ns), (low, high) = args.until, _bounds(args)
        limit = LatencyLimit(percentile, ns, low, high)
    return LoadPlan(
        model=args.model,
        version=str(args.version or ""),
        endpoint=endpoint,
        loads=_loads(args, seed),
        limit=limit,
        inputs=inputs,
        prompts=prompts,
        objectives=Objectives(**args.slo) if args.slo else None,
        stream=args.stream or prompts is not None,
        sequences=Sequences(args.sequences, args.sequence_length) if args.sequence_length else None,
        deadline_ns=args.deadline or 0,
        settings=settings,
        processes=args.processes,
        in_flight=args.in_flight,
    )


def asks(args: argparse.Namespace) -> bool:
    """Whether the arguments say what to ask a language model."""
    return any((args.prompts, args.prompt_tokens, args.output_tokens))


def prompts_of(args: argparse.Namespace, seed: int) -> PromptPlan:
    """What a language model is asked."""
    from shmserve.tools.load.plan import DEFAULT_PROMPT, Lengths, PromptPlan

    if args.prompts and args.prompt_tokens:
        raise Misuse("--prompt-tokens is the length of random prompts: leave it out with --prompts")
    return PromptPlan(
        api=args.api,
        file=args.prompts,
        words=Lengths(*args.prompt_tokens) if args.prompt_tokens else DEFAULT_PROMPT,
        output=Lengths(*args.output_tokens) if args.output_tokens else None,
        sampling=args.sampling,
        seed=seed,
    )


def _loads(args: argparse.Namespace, seed: int) -> tuple[Load, ...]:
    from shmserve.tools.load.plan import ClosedLoop, OpenLoop, ReplayLoop

    if args.replay is not None:
        from shmserve.tools.load.generation.schedule import recorded_times

        try:
            text = args.replay.read_text()
        except OSError as error:
            raise Misuse(f"cannot read {args.replay}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise Misuse(f"cannot read {args.replay}: it is not text ({error.reason})") from error
        return (ReplayLoop(recorded_times(text, args.model, str(args.replay)), args.replay.name),)
    if args.rate is not None:
        return tuple(OpenLoop(rate, args.arrivals, seed) for rate in args.rate)
    return tuple(ClosedLoop(int(number)) for number in args.concurrency or (1,))


def _bounds(args: argparse.Namespace) -> tuple[float, float]:
    """The lowest and the highest load of the search."""
    if args.replay is not None:
        raise Misuse("--until needs a load that it can vary: --concurrency or --rate instead of --replay")
    provided = args.rate or args.concurrency
    if provided is None:
        return 1.0, 1024.0
    if not provided[0] < provided[-1]:
        example = "--rate 100:10000" if args.rate is not None else "--concurrency 1:64"
        raise Misuse(f"--until with {example.split()[0]} needs bounds LOW:HIGH, e.g. {example}")
    return provided[0], provided[-1]


def _measured(args: argparse.Namespace, plan: LoadPlan) -> SavedRun:
    from shmserve.tools.load.calibration import calibrate
    from shmserve.tools.load.measure import check, measure
    from shmserve.tools.load.report.table import progress_text

    check(plan)
    with StatusLine() as status:
        echo = None
        if args.echo and plan.prompts is None:
            status.show("measuring the generator against an echo server")
            echo = calibrate(plan)
        return measure(plan, on_progress=lambda progress: status.show(progress_text(progress)), echo=echo)


def _why(points: tuple[Point, ...]) -> str:
    counts: Counter[str] = Counter()
    for point in points:
        counts.update(point.errors)
    texts = [text for text, _ in counts.most_common(PREVIEW)]
    return f"no request succeeded: {'; '.join(texts)}" if texts else "no response arrived; --window allows more time"


def _write(args: argparse.Namespace, run: SavedRun) -> None:
    if args.save is not None:
        from shmserve.tools.load.record import encode

        write_file(args.save, encode(run).decode())
    if args.csv is not None:
        from shmserve.tools.load.report.csv import csv_text

        write_file(args.csv, csv_text(run))
    if args.html is not None:
        from shmserve.tools.load.report.html import html_text

        write_file(args.html, html_text(run))


def _compare(args: argparse.Namespace) -> int:
    from shmserve.tools.load.analysis.compare import compare
    from shmserve.tools.load.record import read
    from shmserve.tools.load.report.table import comparison_text

    if args.model is not None:
        raise Misuse("--compare takes two saved runs and no model")
    old, new = args.compare
    try:
        result = compare(read(old), read(new), args.confidence)
    except InvalidRequest as error:
        raise Misuse(str(error)) from error
    if args.json:
        print_json(json.loads(msgspec.json.encode(result)))
    else:
        print_text(comparison_text(result, (old.stem, new.stem), screen_of(args)))
    return int(result.is_worse)
