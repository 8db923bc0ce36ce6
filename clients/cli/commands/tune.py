"""`shmserve tune`: finds settings for a model that hold a latency target.

Invariant: this module makes no decisions. It starts a temporary server, runs `shmserve.tools.tune`, and prints the
outcome.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from shmserve.clients.cli.commands.base import StatusLine, print_json, screen_of, write_file
from shmserve.clients.cli.commands.bench import asks, prompts_of
from shmserve.errors import InvalidRequest, Unsupported
from shmserve.system.files import new_file
from shmserve.terminal.errors import Failed, Misuse

if TYPE_CHECKING:
    from shmserve.clients.client import Client
    from shmserve.repo.config.schema import ModelConfig
    from shmserve.terminal.console import Screen
    from shmserve.tools.tune.bench import SharedBench
    from shmserve.tools.tune.goal import Goal
    from shmserve.tools.tune.joint import JointTarget, TunedStep
    from shmserve.tools.tune.language import LanguageTuner
    from shmserve.tools.tune.predict import Prediction
    from shmserve.tools.tune.sequences import SequenceTuner
    from shmserve.tools.tune.served import ServedModel
    from shmserve.tools.tune.space import TunedModel
    from shmserve.tools.tune.tuner import Events, TuningOutcome

CONFIG = "config.pbtxt"
ASK_S = 30.0
SAMPLE_MS = "100"
"""Interval at which the server measures the memory on GPUs."""
SAMPLES = 8
"""Number of different inputs for the steps of an ensemble."""
CALLERS = 16
"""Requests in flight when the steps of an ensemble are compared."""
SEED = 1
"""The seed of the prompts for a language model: all settings get the same prompts."""
VARIETY = 64
"""Number of different requests."""
VARIETY_BYTES = 64 << 20
STEPS = {
    "measure": "measuring service times",
    "calibrate": "measuring the present settings",
    "search": "searching",
    "confirm": "confirming on the server",
}


def tune(args: argparse.Namespace) -> int:
    """Returns 0 if a setting holds the target, 130 after Ctrl-C, else 1."""
    folders = [_folder(provided) for provided in args.model]
    folder, screen = folders[0], screen_of(args)
    _name_constraints(args, [each.name for each in folders])
    if args.slo is not None or asks(args):
        if len(folders) > 1:
            raise Misuse("a language model is tuned alone: give one model")
        return _tune_language(args, folder)
    if len(folders) == 1 and _parsed(folder).sequence_batching is not None:
        return _tune_sequences(args, folder)
    if not args.p99:
        raise Misuse("--p99 TIME is the target; of a language model, it is --slo ttft=TIME,itl=TIME")
    if len(folders) > 1 or _parsed(folder).ensemble_scheduling is not None:
        if args.html is not None:
            raise Misuse("--html shows a single model: leave it out")
        if len(folders) > 1:
            return _tune_together(args, folders, screen)
        return _tune_ensemble(args, folder, _goal(args, folder.name), screen)
    return _tune_model(args, folder, screen)


def _tune_model(args: argparse.Namespace, folder: Path, screen: Screen) -> int:
    """Tunes one model that has neither steps nor sequences, and whose settings are simulated."""
    from shmserve.tools.tune import compared, html, report

    goal, path = _goal(args, folder.name), _shown(folder / CONFIG)
    target = {"model": folder.name, "p99_ms": goal.p99_ns / 1e6, "rate": goal.rate or None}
    before = _earlier(args, lambda document: compared.check(document, target))
    outcome = _tuned(args, folder, goal)
    changes = report.diff(outcome, path)
    if args.json:
        print_json(report.as_json(outcome, path))
    else:
        print(report.text(outcome, screen))
        if before is not None:
            print(f"\n{compared.text(before, report.as_json(outcome, path), screen)}")
        print(f"\n{changes}" if changes else "\nNo changes.", end="" if changes else "\n")
    if args.html is not None:  # after the results are printed: a file that cannot be written must not lose them
        write_file(args.html, html.page(outcome, path))
    if outcome.interrupted:
        return 130
    if args.apply and not outcome.holds:
        raise Failed(f"{path} is not changed: {_missed(outcome)}")
    if args.apply and changes:
        assert outcome.chosen is not None
        apply_changes(folder / CONFIG, outcome.model.text, outcome.model.text_of(outcome.chosen))
        if not args.json:
            print(f"\n{path} is written; `shmserve load {folder.name}` applies it to a running server")
    return 0 if outcome.holds else 1


def _earlier(args: argparse.Namespace, check: Callable[[Any], Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The run that --compare names. `check` raises InvalidRequest if it had another target."""
    if args.compare is None:
        return None
    try:
        return check(json.loads(args.compare.read_bytes()))
    except OSError as error:
        raise Misuse(f"cannot read {args.compare}: {error.strerror}") from error
    except (ValueError, InvalidRequest) as error:
        raise Misuse(f"--compare {args.compare}: {error}") from error


def _folder(provided: Path) -> Path:
    folder = provided.resolve()
    if not folder.is_dir():
        raise Misuse(f"{provided} is not a directory; MODEL is the directory with the model's {CONFIG}")
    return folder


def _shown(file: Path) -> str:
    """The path, relative to the current directory if it is below that."""
    here = Path.cwd()
    return str(file.relative_to(here) if file.is_relative_to(here) else file)


def _missed(outcome: TuningOutcome) -> str:
    """The reason why there is nothing to apply."""
    goal = outcome.goal
    return f"no setting that was measured held {goal.target}; raise --p99{' or lower --rate' if goal.rate else ''}"


def _name_constraints(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Turns the words of each constraint into a mapping from the model's name, "" for all, to its value."""
    if len(set(names)) < len(names):
        raise Misuse("two of the models have the same name")
    for option in ("p99", "memory", "rate"):
        values = dict(getattr(args, option))
        setattr(args, option, values)
        for name in values.keys() - {"", *names}:
            raise Misuse(f"--{option} {name}=...: no model '{name}' is tuned; there is {', '.join(names)}")


def _goal(args: argparse.Namespace, name: str, several: bool = False) -> Goal:
    """`several`: a limit without a model's name is one for the memory of all together, and the rates are shares of the
    load of which the highest is searched with --objective throughput."""
    from shmserve.tools.tune.goal import Goal

    p99, rate = args.p99.get(name, args.p99.get("")), args.rate.get(name, args.rate.get("", 0.0))
    if p99 is None:
        raise Misuse(f"--p99 {name}=TIME is missing")
    if args.objective == "throughput" and rate and not several:
        raise Misuse("--objective throughput finds the highest rate: leave out --rate")
    if args.objective in ("latency", "memory") and not rate:
        raise Misuse(f"--objective {args.objective} compares settings under a load: give it with --rate")
    return Goal(
        p99,
        rate,
        args.memory.get(name, 0 if several else args.memory.get("", 0)),
        args.rows,
        args.lengths or (1, 1),
        args.instances,
        args.seconds,
        args.confirm,
        args.simulated,
        args.objective,
    )


def apply_changes(file: Path, before: str, after: str) -> None:
    """Replaces the file in one step, unless it has changed in the meantime."""
    if _read(file) != before:
        raise Failed(f"{file} has changed since tuning began; it is not overwritten")
    try:
        with new_file(file, file.stat().st_mode & 0o777 if file.exists() else 0o644) as part:
            part.write_bytes(after.encode())
    except OSError as error:
        raise Failed(f"cannot write {file}: {error.strerror}") from error


def _read(file: Path) -> str:
    """The text of the configuration; empty if the model has none."""
    try:
        return file.read_bytes().decode()  # line ends stay as they are
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise Failed(f"cannot read {file}: {error}") from error


# ------------------------------------------------------------------------------------------------- the server


@contextmanager
def _serving(args: argparse.Namespace, folders: Sequence[Path]) -> Iterator[tuple[Client, list[ModelConfig]]]:
    """A server of its own, and the completed configurations of the models."""
    from shmserve.clients.cli.temporary_server import TemporaryServer, ended_in_order
    from shmserve.repo.config.schema import from_triton_json
    from shmserve.tools.tune.served import MAX_IN_FLIGHT

    options = [
        "--model-control-mode",
        "explicit",
        "--metrics-interval-ms",
        SAMPLE_MS,
        "--limit",
        f"client_requests={MAX_IN_FLIGHT}",
    ]
    options += [word for provided in args.backend_config for word in ("--backend-config", provided)]
    options += ["--backend-directory", str(args.backend_directory)] if args.backend_directory else []
    roots = list(dict.fromkeys(folder.parent for folder in folders))
    with ended_in_order(), TemporaryServer(roots, options) as server, server.client(ASK_S) as client:
        server.await_start()
        for folder in folders:
            client.load(folder.name)
        yield client, [from_triton_json(client.config(folder.name)) for folder in folders]


def _tuned(args: argparse.Namespace, folder: Path, goal: Goal) -> TuningOutcome:
    from shmserve.tools.tune.served import ServedModel
    from shmserve.tools.tune.tuner import Tuner

    with _serving(args, [folder]) as (client, (config,)):
        model = _tuned_model(args, folder, config)
        served = ServedModel(client, folder.name, _inputs(args, client, config))
        with StatusLine() as status:
            return Tuner(served, model, goal, _progress(status), model.cores).run()


def _tune_language(args: argparse.Namespace, folder: Path) -> int:
    """Tunes a language model, whose settings are only measured, not simulated."""
    from shmserve.tools.load.plan import Objectives
    from shmserve.tools.tune.language import DEFAULTS, LanguageGoal, LanguageTuner, TunedLanguageModel
    from shmserve.tools.tune.served import ServedModel
    from shmserve.tools.tune.trial_table import language_text

    if args.slo is None:
        raise Misuse("--slo ttft=TIME,itl=TIME is the target of a language model")
    if args.p99 or args.rate or args.html is not None or args.compare is not None or args.objective:
        options = "--p99, --rate, --objective, --html and --compare"
        raise Misuse(f"a language model is tuned for --slo: leave out {options}")
    goal = LanguageGoal(
        Objectives(**args.slo),
        prompts_of(args, SEED),
        args.memory.get(folder.name, args.memory.get("", 0)),
        args.seconds,
    )
    with _serving(args, [folder]) as (client, (config,)):
        if config.backend not in DEFAULTS:
            raise Unsupported(f"backend '{config.backend}' has no slots to tune: {', '.join(DEFAULTS)} has")
        model = TunedLanguageModel(_read(folder / CONFIG), config)
        with StatusLine() as status:
            tuner = LanguageTuner(ServedModel(client, folder.name, lambda _: ()), model, goal, status.show)
            interrupted = _interrupted(tuner.run)
    text = language_text(tuner, screen_of(args))
    return _finish(args, folder, tuner, text, interrupted, f"no setting that was measured held {goal.objectives}")


def _tune_sequences(args: argparse.Namespace, folder: Path) -> int:
    """Tunes a model with sequences, whose settings are also only measured."""
    from shmserve.tools.tune.sequences import SequenceGoal, SequenceTuner, TunedSequenceModel, check_sequences
    from shmserve.tools.tune.served import ServedModel
    from shmserve.tools.tune.trial_table import sequence_text

    if args.rate or args.html is not None or args.compare is not None or args.objective:
        raise Misuse("a model with sequences is tuned for --p99: leave out --rate, --objective, --html and --compare")
    goal = _goal(args, folder.name)
    wanted = SequenceGoal(goal.p99_ns, args.sequence_length, goal.memory, goal.instances, goal.seconds)
    with _serving(args, [folder]) as (client, (config,)):
        check_sequences(config)
        model = TunedSequenceModel(_read(folder / CONFIG), config)
        with StatusLine() as status:
            served = ServedModel(client, folder.name, _inputs(args, client, config))
            tuner = SequenceTuner(served, model, wanted, status.show)
            interrupted = _interrupted(tuner.run)
    text = sequence_text(tuner, screen_of(args))
    return _finish(args, folder, tuner, text, interrupted, f"no setting that was measured held {goal.target}")


def _interrupted(run: Callable[[], None]) -> bool:
    """Whether Ctrl-C ended the run early."""
    try:
        run()
    except KeyboardInterrupt:
        return True
    return False


def _finish(
    args: argparse.Namespace,
    folder: Path,
    tuner: LanguageTuner | SequenceTuner,
    text: str,
    interrupted: bool,
    missed: str,
) -> int:
    """Prints and applies what was found. `missed`: why there is nothing to apply."""
    path, chosen = _shown(folder / CONFIG), tuner.chosen
    changes = tuner.diff(path)
    if args.json:
        print_json(tuner.as_json(path))
    else:
        print(f"{text}\n\n{changes or 'No changes.'}", end="" if changes else "\n")
    if interrupted:
        return 130
    if args.apply and chosen is None:
        raise Failed(f"{path} is not changed: {missed}")
    if args.apply and changes:
        apply_changes(folder / CONFIG, tuner.model.text, tuner.text)
    return 0 if chosen is not None else 1


def _parsed(folder: Path) -> ModelConfig:
    from shmserve.repo.load import parse

    return parse(_read(folder / CONFIG))


def _tune_ensemble(args: argparse.Namespace, folder: Path, goal: Goal, screen: Screen) -> int:
    """Tunes all steps of an ensemble together."""
    from shmserve.repo.compile import compile_policy
    from shmserve.repo.config.schema import from_triton_json
    from shmserve.tools.tune import joint
    from shmserve.tools.tune.served import ServedModel, ServedModels

    with _serving(args, [folder]) as (client, (config,)):
        inputs = _inputs(args, client, config)
        bench = ServedModel(client, config.name, inputs)
        if not args.json:
            print(_steps_text(client, config, bench, args.seconds, screen))
        samples = [
            joint.inputs_of_steps(config, request, lambda name, request: client.infer(name, request))
            for request in inputs(goal.typical_length)[:SAMPLES]
        ]
        share = goal.rate or 1.0
        steps = []
        for name in samples[0]:
            model = _tuned_model(args, folder.parent / name, from_triton_json(client.config(name)), step=True)
            served = ServedModel(client, name, partial(_same, [sample[name] for sample in samples]))
            steps.append(joint.TunedStep(model, served, goal, share))
        target = joint.JointTarget(config.name, goal, share, compile_policy(config, 1))
        files = {name: folder.parent / name / CONFIG for name in samples[0]}
        return _tune_jointly(args, [target], ServedModels([bench]), steps, files, goal.memory, screen)


def _tune_together(args: argparse.Namespace, folders: Sequence[Path], screen: Screen) -> int:
    """Tunes several models that share the machine and are under load at the same time."""
    from shmserve.tools.tune import joint
    from shmserve.tools.tune.served import ServedModel, ServedModels

    if args.input:
        raise Misuse("--input is for a single model; several get random inputs")
    goals = [_goal(args, folder.name, several=True) for folder in folders]
    if len({bool(goal.rate) for goal in goals}) > 1:
        raise Misuse("--rate is missing for some of the models: give it for each, or for none")
    with _serving(args, folders) as (client, configs):
        targets, benches, steps = [], [], []
        for folder, config, goal in zip(folders, configs, goals, strict=True):
            bench = ServedModel(client, config.name, _inputs(args, client, config))
            share = goal.rate or 1.0
            targets.append(joint.JointTarget(config.name, goal, share))
            benches.append(bench)
            steps.append(joint.TunedStep(_tuned_model(args, folder, config), bench, goal, share))
        files = {folder.name: folder / CONFIG for folder in folders}
        return _tune_jointly(args, targets, ServedModels(benches), steps, files, args.memory.get("", 0), screen)


def _tuned_model(args: argparse.Namespace, folder: Path, config: ModelConfig, step: bool = False) -> TunedModel:
    from shmserve.tools.tune.space import TunedModel, check_tunable

    check_tunable(config, step)
    return TunedModel(_read(folder / CONFIG), config, len(os.sched_getaffinity(0)), args.max_batch)


def _tune_jointly(
    args: argparse.Namespace,
    targets: Sequence[JointTarget],
    bench: SharedBench,
    steps: Sequence[TunedStep],
    files: Mapping[str, Path],
    memory: int,
    screen: Screen,
) -> int:
    """`files`: the configurations of the models."""
    from shmserve.repo.config.edit import unified
    from shmserve.tools.tune import joint_report
    from shmserve.tools.tune.joint import JointTuner

    fixed = bool(targets[0].goal.rate) and args.objective != "throughput"
    with StatusLine() as status:
        tuner = JointTuner(targets, bench, steps, steps[0].model.cores, status.show, memory, fixed, args.objective)
        before = _earlier(args, lambda document: joint_report.check(document, joint_report.as_json(tuner)["targets"]))
        outcome = tuner.run()
    if args.json:
        print_json(joint_report.as_json(tuner))
    else:
        print(joint_report.text(tuner, screen))
        if before is not None:
            print(f"\n{joint_report.comparison(before, joint_report.as_json(tuner), screen)}")
    chosen = outcome.chosen
    held = chosen is not None and outcome.rate(chosen) > 0
    for step, candidate in zip(steps, chosen or (), strict=False):
        after = step.model.text_of(candidate)
        if not args.json and (changes := unified(step.model.text, after, _shown(files[step.model.name]))):
            print(f"\n{changes}", end="")
        if args.apply and held and not outcome.interrupted and after != step.model.text:
            apply_changes(files[step.model.name], step.model.text, after)
    if outcome.interrupted:
        return 130
    if args.apply and not held:
        raise Failed("no configuration is changed: no settings that were measured held the targets")
    return 0 if held else 1


def _same(requests: Sequence[Mapping[str, Any]], length: int) -> Sequence[Mapping[str, Any]]:
    return requests


def _steps_text(client: Client, config: ModelConfig, bench: ServedModel, seconds: float, screen: Screen) -> str:
    """Measures how busy the steps of an ensemble are under load."""
    from shmserve.tools.tune import steps

    assert config.ensemble_scheduling is not None
    names = {step.model_name for step in config.ensemble_scheduling.step}
    counts = {entry["name"]: len(entry["instances"]) for entry in client.models() if entry["name"] in names}
    bench.closed(CALLERS, seconds)  # what happens only once does not count
    before, start = client.statistics(), monotonic_ns()
    bench.closed(CALLERS, seconds)
    elapsed_ns = monotonic_ns() - start
    instances = {name: count for name, count in counts.items() if count}
    uses = steps.step_uses(before, client.statistics(), instances, elapsed_ns)
    return f"{steps.text(uses, screen)}\n\nThe bottleneck is {uses[0].model}, with {CALLERS} requests in flight.\n"


def _inputs(
    args: argparse.Namespace, client: Client, config: ModelConfig
) -> Callable[[int], Sequence[Mapping[str, Any]]]:
    """The inputs of the requests: those of --input, or random ones."""
    from shmserve.terminal import inputs

    known = inputs.specs(client.metadata(config.name))
    provided = inputs.from_arguments(args.input, known)
    batched = bool(config.max_batch_size)
    varies = [name for name, spec in known.items() if -1 in spec["shape"][batched:] and name not in provided]
    if varies and args.lengths is None:
        raise Misuse(f"input '{varies[0]}' has dims of any size: give --lengths N or --lengths N-M, or --input")
    for name, array in provided.items():
        if batched and array.shape[0] != args.rows:
            raise Misuse(f"--input {name} has {array.shape[0]} rows, and --rows is {args.rows}")
    low, high = args.lengths or (1, 1)

    def inputs_of(length: int, seed: int) -> Mapping[str, Any]:
        size = length or Random(seed).randint(low, high)
        shapes = {}
        for name, spec in known.items():
            dims = [size if dim < 0 else dim for dim in spec["shape"]]
            shapes[name] = tuple([args.rows, *dims[1:]] if batched else dims)
        remaining = {name: spec for name, spec in known.items() if name not in provided}
        return provided | inputs.random(remaining, None, shapes, seed)

    def requests(length: int) -> Sequence[Mapping[str, Any]]:
        results = [inputs_of(length, 0)]
        size = sum(getattr(array, "nbytes", 0) for array in results[0].values())
        count = min(VARIETY, max(1, VARIETY_BYTES // max(size, 1)))
        return results + [inputs_of(length, seed) for seed in range(1, count)]

    return requests


# ------------------------------------------------------------------------------------------------- progress


def _progress(status: StatusLine) -> Events:
    """Shows the progress on stderr: a live line on a terminal, else a line per step."""
    from shmserve.tools.load.report.table import rate_text
    from shmserve.tools.tune.tuner import Events

    class TuningProgress(Events):
        def step(self, name: str) -> None:
            if status.is_shown:
                status.show(STEPS[name])
            else:
                print(f"shmserve tune: {STEPS[name]}", file=sys.stderr, flush=True)

        def within(self, text: str) -> None:
            status.show(text)

        def simulated(self, done: int, total: int, best: Prediction | None) -> None:
            rate = f"; best so far {rate_text(best.rate)}/s" if best is not None else ""
            status.show(f"simulating, {done:,} of {total:,}{rate}")

    return TuningProgress()
