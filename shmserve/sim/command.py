"""`python -m shmserve.sim`: simulates a model under a load and prints a table or JSON.

This module parses arguments, reads the models of a repository, and prints results.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any, NoReturn

from msgspec.structs import fields, replace

from shmserve.core.limits import Limits
from shmserve.core.policy import BatchPolicy, InstanceSpec, ModelPolicy, PaddingPolicy, TensorSpec
from shmserve.errors import InvalidRequest, NotFound, ServeError
from shmserve.repo import load
from shmserve.repo.backends import BACKENDS
from shmserve.repo.compile import compile_instances, compile_policy, compile_scaling
from shmserve.repo.config.problems import ConfigError
from shmserve.repo.config.schema import ModelConfig
from shmserve.repo.load import CONFIG_FILE, ModelContext, examine
from shmserve.repo.storage.store import find_model, model_names
from shmserve.sim.faults import Faults
from shmserve.sim.first_come import first_come
from shmserve.sim.load import Bursts, Closed, Load, Poisson, Replay, read_recording
from shmserve.sim.plan import MS, Plan, SimModel
from shmserve.sim.results import ModelResult, Result
from shmserve.sim.run import simulate
from shmserve.sim.service import FORMS, Constant, PerElement, Service, parse

NAME = "model"
EPILOG = f"""\
service times: {FORMS}.
  Give several, MODEL=TIME, for an ensemble.
  A table is a JSON object, rows -> times in ms: {{"1": [2.1, 2.3], "8": [4.0, 4.4]}}
recordings: a JSON object a line, {{"at": seconds, "model": name, "rows": 1}}
faults: {chr(10).join(wrap(", ".join(field.name for field in fields(Faults)), 88, subsequent_indent="  "))}
  Shares are probabilities: --fault crash_share=0.01 --fault death_every_s=30

examples:
  python -m shmserve.sim --rate 1500 --service 2ms+1ms/row --instances 2
  python -m shmserve.sim --repository models --model mlp --rate 2000 --service-ms 5 --deadline-ms 100
  python -m shmserve.sim --sweep 400,800,1600 --service 2ms+1ms/row --deadline-ms 100 --seconds 4
  python -m shmserve.sim --callers 32 --service lognormal:4ms,0.5 --fault death_every_s=2 --check 1
"""


def parser() -> argparse.ArgumentParser:
    created = argparse.ArgumentParser(
        prog="python -m shmserve.sim",
        description="Runs the scheduler of the server over simulated time: the same decisions as in a server, with\n"
        "callers, workers and the clock simulated. No server, no model and no GPU is needed, and the\n"
        "same arguments and seed give the same result.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = created.add_argument_group("the model: one of a repository, or a plain one that batches")
    model.add_argument("--repository", action="append", type=Path, metavar="DIR", help="models with their config.pbtxt")
    model.add_argument("--model", metavar="NAME", help="model that receives the requests (default: the only one)")
    model.add_argument("--instances", type=_count, metavar="N", help="number of instances, instead of instance_group")
    model.add_argument("--max-batch", type=_count, metavar="N", help="plain model: max_batch_size (default: 8)")
    model.add_argument("--delay-ms", type=_number, metavar="MS", help="plain model: queue delay (default: 0)")
    model.add_argument("--padding", action="store_true", help="plain model: pad requests of different lengths")
    model.add_argument(
        "--service",
        action="append",
        metavar="[MODEL=]TIME",
        help="execution time of a batch (default: 1ms)",
        default=[],
    )
    model.add_argument(
        "--calls",
        type=_calls,
        action="append",
        default=[],
        metavar="NAME=NAME,...",
        help="this model calls these for each request, one after the other, before it computes",
    )
    model.add_argument("--service-ms", type=_number, metavar="MS", help="execution time of every batch, in ms")

    _add_load(created.add_argument_group("the load"))

    how = created.add_argument_group("the simulation")
    how.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (default: 0)")
    how.add_argument("--fault", action="append", type=_fault, default=[], metavar="NAME=N", help="inject a fault")
    how.add_argument("--reload-every", type=_number, default=0.0, metavar="S", help="mean time to the next reload")
    how.add_argument("--link-us", type=_number, default=20.0, metavar="US", help="delay of a message (default: 20)")
    how.add_argument(
        "--turn-us", type=_number, default=20.0, metavar="US", help="duration of a turn of the broker (default: 20)"
    )
    how.add_argument("--cache-mib", type=_number, default=0.0, metavar="N", help="response cache (default: none)")
    how.add_argument("--rate-limit", action="store_true", help="instances need their resources (rate_limiter)")
    how.add_argument("--check", type=_count, default=0, metavar="N", help="check all invariants after every Nth turn")
    how.add_argument("--compare", action="store_true", help="also simulate a first-come queue under the same load")
    how.add_argument("--json", action="store_true", help="print JSON")
    return created


def _add_load(load: argparse._ArgumentGroup) -> None:
    load.add_argument("--rate", type=_positive, metavar="N", help="requests a second, at random times (default: 100)")
    load.add_argument("--burst", type=_count, metavar="N", help="requests per burst")
    load.add_argument("--callers", type=_count, metavar="N", help="instead of --rate: callers in a closed loop")
    load.add_argument("--think-ms", type=_number, metavar="MS", help="pause of a caller between requests (default: 0)")
    load.add_argument("--recording", type=Path, metavar="FILE", help="instead of --rate: recorded arrivals")
    load.add_argument("--sweep", type=_rates, metavar="N,N,...", help="simulate each of these rates; prints a row each")
    load.add_argument("--rows", type=_span, default=(1, 1), metavar="N[-M]", help="rows of a request (default: 1)")
    load.add_argument(
        "--lengths",
        type=_span,
        default=(1, 1),
        metavar="N[-M]",
        help="size of input dimensions that are -1 (default: 1)",
    )
    load.add_argument(
        "--sequence", type=_span, default=(1, 1), metavar="N[-M]", help="requests of a sequence (default: 1)"
    )
    load.add_argument(
        "--gap-ms", type=_number, default=0.0, metavar="MS", help="pause between the requests of a sequence"
    )
    load.add_argument(
        "--distinct", type=_count, default=0, metavar="N", help="number of different inputs, for the response cache"
    )
    load.add_argument(
        "--clients", type=_count, default=8, metavar="N", help="connections that share the load (default: 8)"
    )
    load.add_argument(
        "--deadline-ms", type=_positive, metavar="MS", help="deadline; later responses do not count as goodput"
    )
    load.add_argument("--seconds", type=_positive, metavar="N", help="how long requests are sent (default: 10)")
    load.add_argument("--requests", type=_count, default=0, metavar="N", help="limit on the number of requests")


# ------------------------------------------------------------------------------------ argument types


def _wrong(text: str) -> NoReturn:
    raise argparse.ArgumentTypeError(text)


def _number(text: str) -> float:
    try:
        result = float(text)
    except ValueError:
        _wrong(f"'{text}' is not a number")
    if not 0 <= result < 1e12:
        _wrong(f"{text} is out of range")
    return result


def _positive(text: str) -> float:
    return _number(text) or _wrong("it must be more than 0")


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        _wrong(f"'{text}' is not an integer of at least 1")
    return int(text)


def _rates(text: str) -> list[float]:
    return [_positive(word) for word in text.split(",")]


def _span(text: str) -> tuple[int, int]:
    low, dash, high = text.partition("-")
    result = _count(low), _count(high if dash else low)
    return result if result[0] <= result[1] else _wrong(f"'{text}': the upper bound is below the lower bound")


def _fault(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    known = [field.name for field in fields(Faults)]
    if name not in known:
        _wrong(f"'{name}' is not a fault; the faults are {', '.join(known)}")
    return name, _number(value)


def _calls(text: str) -> tuple[str, tuple[str, ...]]:
    name, _, called = text.partition("=")
    result = tuple(word for word in called.split(",") if word)
    return (name, result) if name and result else _wrong(f"'{text}' is not NAME=NAME,...")


def _services(args: argparse.Namespace) -> dict[str, Service]:
    results: dict[str, Service] = {}
    if args.service_ms is not None:
        results[""] = parse(f"{args.service_ms:.6f}ms")
    for text in args.service:
        name, equals, time = text.partition("=")
        results[name if equals else ""] = parse(time if equals else text)
    return results


# ------------------------------------------------------------------------------------ the plan


def _plain(args: argparse.Namespace, services: Mapping[str, Service]) -> SimModel:
    name = args.model or NAME
    batches = args.max_batch or 8
    delay = round((args.delay_ms or 0) * MS)
    batching = BatchPolicy(delay_ns=delay) if batches > 1 else None
    dims = (16,) if args.lengths == (1, 1) else (-1,)
    tensors = (TensorSpec("x", "FP32", dims),), (TensorSpec("y", "FP32", (16,)),)
    padding = PaddingPolicy((("x", (0,)),)) if args.padding and batching is not None else None
    policy = ModelPolicy(name, 1, batches, *tensors, batching, padding=padding)
    specs = tuple(InstanceSpec(f"{name}_{index}") for index in range(args.instances or 1))
    return SimModel(policy, specs, services.get(name) or services.get("") or Constant(MS))


def _models(
    args: argparse.Namespace, services: Mapping[str, Service], recorded: Sequence[str]
) -> tuple[list[SimModel], list[str]]:
    """The models to simulate, and the names of those that clients send requests to: the `recorded` ones, if any."""
    if args.calls and not args.repository:
        raise InvalidRequest("--calls is for models of a repository")
    if not args.repository:
        model = _plain(args, services)
        return [model], [model.policy.name]
    if args.max_batch or args.delay_ms is not None or args.padding:
        raise InvalidRequest(
            "--max-batch, --delay-ms and --padding are for the plain model; for a model of a repository, set them in "
            "its config.pbtxt"
        )
    asked = list(recorded) or ([args.model] if args.model else names(args.repository))
    if not recorded and len(asked) != 1:
        raise InvalidRequest(f"choose a model with --model; the models are {', '.join(asked) or 'none'}")
    calls = dict(args.calls)
    unknown = calls.keys() - set(names(args.repository))
    if unknown:
        raise InvalidRequest(f"--calls names an unknown model '{sorted(unknown)[0]}'")
    needed = [*asked, *(called for each in calls.values() for called in each)]
    simulated = models(args.repository, needed, services, args.instances or 0)
    return [replace(model, calls=calls.get(model.policy.name, ())) for model in simulated], asked


def _plan(args: argparse.Namespace, rate: float) -> Plan:
    recorded = read_recording(args.recording) if args.recording else {}
    if args.recording and args.model:
        recorded = {name: replay for name, replay in recorded.items() if name == args.model}
    services = _services(args)
    simulated, asked = _models(args, services, list(recorded))
    served = {model.policy.name for model in simulated}
    if unknown := recorded.keys() - served:
        raise InvalidRequest(
            f"the recording has requests for '{sorted(unknown)[0]}', which is not served; see --repository and --model"
        )
    if unknown := services.keys() - served - {""}:
        raise InvalidRequest(
            f"--service names '{sorted(unknown)[0]}', which is not served; see --repository and --model"
        )
    loads = [_load(args, name, recorded.get(name), rate) for name in (recorded or asked)]
    seconds = args.seconds if args.seconds is not None else 0.0 if recorded or args.requests else 10.0
    turn = round(args.turn_us * 1000)
    limits = Limits(rate_limit=args.rate_limit, cache_bytes=round(args.cache_mib * (1 << 20)))
    faults = Faults(**{name: round(value) if name.endswith("_ns") else value for name, value in args.fault})
    return Plan(
        tuple(simulated),
        tuple(loads),
        seconds,
        args.requests,
        args.seed,
        faults,
        limits,
        link_ns=round(args.link_us * 1000),
        turn_ns=turn,
        message_ns=turn // 5,
        check_every=args.check,
        reload_every_s=args.reload_every,
    )


def _load(args: argparse.Namespace, name: str, replay: Replay | None, rate: float) -> Load:
    arrivals: Poisson | Bursts | Closed | Replay = Poisson(rate)
    if replay is not None:
        arrivals = replay
    elif args.callers:
        arrivals = Closed(args.callers, round((args.think_ms or 0) * MS))
    elif args.burst:
        arrivals = Bursts(rate, args.burst)
    timeout = round((args.deadline_ms or 0) * MS)
    gap = round(args.gap_ms * MS)
    return Load(
        name,
        arrivals,
        args.clients,
        args.rows,
        timeout,
        sequence=args.sequence,
        gap_ns=gap,
        distinct=args.distinct,
        lengths=args.lengths,
    )


def _first_come(plan: Plan, result: Result) -> ModelResult:
    load = plan.loads[0]
    model = next(model for model in plan.models if model.policy.name == load.model)
    if len(plan.loads) > 1 or model.policy.steps is not None or model.policy.sequence is not None:
        raise InvalidRequest("--compare needs a single model, which is not an ensemble and has no sequences")
    if isinstance(model.service, PerElement):
        raise InvalidRequest("--compare needs a model whose service time depends on rows only")
    batches = model.policy.max_batch if model.policy.batching is not None else 1
    return first_come(load, model.service, batches, len(model.instances), result.seconds, plan.seed)


# ------------------------------------------------------------------------------------ output


def _show(result: Result, beside: ModelResult | None) -> None:
    shown = [(model.name, model) for model in result.models.values()]
    if beside is not None:
        shown.append((f"{beside.name}, first come first served", beside))
    for title, model in shown:
        print(f"{title}:")
        for label, text in _lines(model):
            print(f"  {label:<12}{text}")
    lost = "nothing lost" if not result.lost else f"{result.lost} LOST"
    print(f"{lost}; {result.turns} turns of the broker; digest {result.digest}")
    if result.cache_hits:
        print(f"response cache: {result.cache_hits} hits, {result.cache_misses} misses")
    for line in result.log:
        print(f"  at {line}")


def _lines(model: ModelResult) -> list[tuple[str, str]]:
    latency = model.latency
    lines = []
    if model.sent:
        failed = "".join(f", {count} {code}" for code, count in sorted(model.failed.items()))
        gone = f", {model.abandoned} whose client died" if model.abandoned else ""
        lines.append(("requests", f"{model.sent} sent, {model.answered} answered{failed}{gone}"))
        lines.append(("goodput", f"{model.goodput:.1f} responses per second within the deadline"))
    if model.parts:
        lines.append(("parts", str(model.parts)))
    if latency.count:
        shares = "  ".join(f"{name} {latency.quantile(share) / MS:.3f}" for name, share in QUANTILES)
        lines.append(("latency ms", f"mean {latency.mean / MS:.3f}  {shares}  max {latency.largest / MS:.3f}"))
    if model.batches:
        lines.append(("batches", f"{sum(model.batches.values())}, of {model.mean_batch:.2f} rows on average"))
        sizes = ", ".join(f"{count} from {at:.2f} s" for at, count in model.sizes)
        lines.append(("instances", f"{sizes or model.instances}, busy {model.utilization:.1%} of the time"))
    if model.elements:
        share = model.padded_elements / model.elements
        lines.append(("padding", f"{share:.1%} of {model.elements} elements (rows x padded length)"))
    if model.deaths:
        lines.append(("deaths", f"{model.deaths} worker processes"))
    return lines


QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999))


def _sweep(args: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    lost = 0
    for rate in args.sweep:
        plan = _plan(args, rate)
        result = simulate(plan)
        lost += result.lost
        asked = result.models[plan.loads[0].model]
        answer = asked.as_json()
        row: dict[str, Any] = {"rate": rate, "goodput": asked.goodput, "p99_ms": answer["latency_ms"]["p99"]}
        row |= {"mean_batch": answer["mean_batch"], "utilization": answer["utilization"]}
        if args.compare:
            row["first_come"] = round(_first_come(plan, result).goodput, 3)
        rows.append(row)
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        print("".join(f"{title:>13}" for title in rows[0]))
        for row in rows:
            print("".join(f"{value:>13.2f}" for value in row.values()))
    return 1 if lost else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 for success, 1 if requests were lost, 2 for arguments that cannot be simulated. An
    internal error of the core is raised as an AssertionError."""
    created = parser()
    args = created.parse_args(argv)
    if sum(map(bool, (args.rate, args.callers, args.recording, args.sweep))) > 1:
        created.error("use only one of --rate, --callers, --recording and --sweep")
    try:
        if args.sweep:
            return _sweep(args)
        plan = _plan(args, args.rate or 100.0)
        result = simulate(plan)
        beside = _first_come(plan, result) if args.compare else None
    except ServeError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    if args.json:
        value = result.as_json()
        if beside is not None:
            value["first_come"] = beside.as_json()
        print(json.dumps(value, indent=2))
    else:
        _show(result, beside)
    return 1 if result.lost else 0


GPUS = tuple(range(64))
"""GPUs that a configuration may name. Their number does not affect the simulation."""


def names(roots: Sequence[Path]) -> list[str]:
    for root in roots:
        if not root.is_dir():
            raise InvalidRequest(f"{root} is not a directory")
    return list(model_names(roots))


def models(
    roots: Sequence[Path], wanted: Iterable[str], services: Mapping[str, Service], instances: int = 0
) -> list[SimModel]:
    """These models and those of their steps. `services`: by model name, "" for all others. `instances` > 0 overrides
    the number in the configuration."""
    known = names(roots)
    simulated: dict[str, SimModel] = {}
    todo = list(wanted)
    while todo:
        name = todo.pop(0)
        if name not in simulated:
            model = simulated[name] = _model(roots, name, known, services, instances)
            todo += [step.model for step in model.policy.steps or ()]
    return list(simulated.values())


def _model(
    roots: Sequence[Path], name: str, known: Sequence[str], services: Mapping[str, Service], instances: int
) -> SimModel:
    if name not in known:
        raise InvalidRequest(f"there is no model '{name}'; there are {', '.join(known) or 'none'}")
    try:
        path = find_model(roots, name)
    except NotFound as error:
        raise InvalidRequest(error.message) from error
    config, version = _read(path)
    policy = compile_policy(config, version)
    if not policy.inputs or not policy.outputs:
        raise InvalidRequest(
            f"the configuration of model '{name}' names no {'outputs' if policy.inputs else 'inputs'}; a server finds "
            f"them in the model file, a simulation needs them in config.pbtxt (`shmserve config {name}` prints one)"
        )
    service = services.get(name) or services.get("") or Constant(MS)
    specs = () if policy.steps is not None else compile_instances(config)
    if instances and specs:
        specs = tuple(replace(specs[0], name=f"{name}_{index}", passive=False) for index in range(instances))
        return SimModel(policy, specs, service)
    return SimModel(policy, specs, service, scaling=compile_scaling(config))


def _read(path: Path) -> tuple[ModelConfig, int]:
    """The completed configuration, for any engine that it names, and the highest version (1 if there is none yet)."""
    try:
        text = (path / CONFIG_FILE).read_bytes()
        versions = sorted(int(entry.name) for entry in path.iterdir() if entry.name.isdecimal() and entry.is_dir())
        files = [entry.name for entry in (path / str(versions[0])).iterdir()] if versions else []
    except OSError as error:
        raise InvalidRequest(f"the configuration of model '{path.name}' cannot be read: {error.strerror}") from error
    try:
        named = load.parse(text).backend
        context = ModelContext(path.name, BACKENDS | {named} - {""}, files, GPUS)
        config = examine(text, CONFIG_FILE, context).require()
    except ConfigError as error:
        raise InvalidRequest(f"model '{path.name}' could not be served: {error}") from error
    return config, versions[-1] if versions else 1
