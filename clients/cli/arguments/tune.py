"""Arguments of `shmserve tune`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from shmserve.clients.cli.arguments.bench import add_prompts, objectives
from shmserve.clients.cli.arguments.common import (
    add_backend_settings,
    add_command,
    add_output,
    at_least_1,
    duration,
    positive,
    seconds,
    size,
    span,
)
from shmserve.clients.cli.help import rare

Value = TypeVar("Value")
OBJECTIVES = ("throughput", "latency", "memory")


def of_model(parse: Callable[[str], Value]) -> Callable[[str], tuple[str, Value]]:
    """A parser of [MODEL=]VALUE. The name is empty if there is none."""

    def parsed(text: str) -> tuple[str, Value]:
        name, _, value = text.rpartition("=")
        return name, parse(value)

    return parsed


def add_tune(commands: Any) -> None:
    examples = """  shmserve tune models/mlp --p99 20ms --memory 2GiB
  shmserve tune models/mlp --p99 20ms --rate 500           the cheapest setting for this load
  shmserve tune models/mlp --p99 20ms --apply --html report.html
  shmserve tune models/mlp models/cnn --p99 20ms --p99 cnn=80ms --memory 4GiB
  shmserve tune models/chat --slo ttft=500ms,itl=50ms --prompt-tokens 64:256 --output-tokens 64
"""
    note = """
Measures how long batches take, searches in the simulator, and confirms the best settings on a server of its own. The
changes of config.pbtxt are printed as a diff. Ctrl-C prints what was found until then.
"""
    about = "find the settings of a model that hold a latency target under the most load"
    codes = ("a setting holds the target", "none does, or the model cannot be tuned")
    command = add_command(commands, "tune", "tune", about, examples, codes, note)
    add = command.add_argument
    add("model", metavar="MODEL", type=Path, nargs="+", help="directory with config.pbtxt, or several")
    constraint = partial(add, action="append", default=[])
    text = "limit of the 99th percentile, e.g. 20ms; not for language models"
    constraint("--p99", metavar="[MODEL=]TIME", type=of_model(duration), help=text)
    add("--slo", metavar="NAME=TIME,...", type=objectives, help="target of a language model: ttft=500ms,itl=50ms")
    add_prompts(command)
    text = "memory limit of all instances, e.g. 2GiB (default: none)"
    constraint("--memory", metavar="[MODEL=]SIZE", type=of_model(size), help=text)
    text = "hold the limit at N requests per second (default: find the highest rate)"
    constraint("--rate", metavar="[MODEL=]N", type=of_model(positive), help=text)
    add("--apply", action="store_true", help="write the changes, if the target is held")
    add("--html", metavar="FILE", type=Path, help="write a report with curves")
    text = "compare with an earlier run, saved by --json"
    add("--compare", metavar="FILE", type=Path, help=text)
    add("--rows", metavar="N", type=at_least_1, default=1, help="rows of each request (default: 1)")
    add("--lengths", metavar="N[-M]", type=span, help="sizes of the input dims that are -1")
    add("--instances", metavar="N[-M]", type=span, default=(1, 16), help="instances to try (default: 1-16)")
    text = "largest batch to try (default: max_batch_size)"
    add("--max-batch", metavar="N", type=at_least_1, default=0, help=text)
    text = "with --rate, prefer the lowest p99 (latency) or the least memory (default: the fewest instances)"
    rare(add, "--objective", choices=OBJECTIVES, default="", help=text)
    text = "of a model with sequences: requests of each (default: 10)"
    rare(add, "--sequence-length", metavar="N", type=at_least_1, default=10, help=text)
    text = "an input: numbers, JSON, or @FILE.npy; repeatable (default: random)"
    rare(add, "-i", "--input", metavar="NAME=VALUE", action="append", default=[], help=text)
    text = "duration of each measurement (default: 2); of a language model, enough for 30 texts"
    rare(add, "--seconds", metavar="SECONDS", type=seconds, default=2.0, help=text)
    text = "number of settings to measure on the server (default: 3)"
    rare(add, "--confirm", metavar="N", type=at_least_1, default=3, help=text)
    text = "requests of each simulation; more is slower and steadier (default: 2000)"
    rare(add, "--simulated", metavar="N", type=at_least_1, default=2000, help=text)
    add_backend_settings(add)
    add_output(command)
