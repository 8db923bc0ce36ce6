"""The argument parser of `shmserve`: all commands, and the help that lists them.

Invariant: only what `--help` needs is imported here; a command's module is imported when it runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from shmserve.clients.cli.arguments import infer, local, observe, operate
from shmserve.clients.cli.arguments.bench import add_bench
from shmserve.clients.cli.arguments.common import add_color
from shmserve.clients.cli.arguments.convert import add_convert, add_describe, add_quantize
from shmserve.clients.cli.arguments.plan import add_plan
from shmserve.clients.cli.arguments.tune import add_tune
from shmserve.clients.cli.help import CommandParser, rare
from shmserve.terminal.help_text import rows

ABOUT = "Serve models on this machine and send requests to the server."
EPILOG = """
first steps:
  shmserve serve model.onnx                       serve a model of your own; Ctrl-C stops the server
  shmserve init net --from model.onnx             write a directory for it, with all settings explained
  shmserve serve --model-repository ./models      serve all models of a directory
  shmserve models                                 list its models
  shmserve infer model --random                   try a model
  shmserve stats                                  show statistics
  eval "$(shmserve completion bash)"              enable Tab completion of commands, options and models

`shmserve tritonserver` takes Triton's command line, with Triton's defaults.
`shmserve COMMAND --help` describes a command, with examples. Exit codes: 0 success, 1 failure, 2 wrong usage,
130 interrupted.
"""
USUAL = (
    (
        ("serve", "start a server; Ctrl-C stops it"),
        ("init", "create a model directory with a commented configuration"),
        ("check", "check a model repository before it is served"),
        ("dev", "serve a file, and load it again when it is saved"),
    ),
    (
        ("models", "list models, their states and processes"),
        ("stats", "show requests, batches, and how long they took"),
        ("top", "watch the server live; load and restart models by key"),
        ("ready", "check whether the server, or a model, is ready"),
        ("config", "show a model's configuration, and where it is from"),
        ("logs", "show the server's log, or one model's lines"),
    ),
    (
        ("load", "load a model, or reload what has changed"),
        ("unload", "finish a model's requests and stop its processes"),
    ),
    (
        ("infer", "send a request and print the outputs"),
        ("bench", "put load on a model; throughput and latency"),
        ("tune", "find the settings that hold a latency target"),
    ),
)
"""The commands that the short help describes, in groups. It only names the others."""


def _overview(names: Iterable[str]) -> list[str]:
    usual = dict(pair for group in USUAL for pair in group)
    lines: list[str] = []
    aligned = iter(rows([*usual.items(), ("others", ", ".join(sorted(set(names) - usual.keys())))]))
    for group in USUAL:
        lines += ["", *islice(aligned, len(group))]
    return [*lines, *aligned, "`shmserve COMMAND --help` describes a command, `shmserve --help-all` lists all"]


def parser() -> CommandParser:
    """The parser of all commands except serve, whose arguments the broker parses."""
    shmserve = CommandParser(
        prog="shmserve", overview=lambda: _overview(commands.choices), description=ABOUT, epilog=EPILOG
    )
    rare(
        shmserve.add_argument,
        "--version",
        action="store_true",
        dest="show_version",
        help="the same as `shmserve version`",
    )
    add_color(shmserve)
    commands = shmserve.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=CommandParser)
    commands.add_parser("serve", help="start a server (its options: shmserve serve --help)")
    for add in (
        observe.add_models,
        operate.add_load,
        operate.add_unload,
        operate.add_restart,
        operate.add_traffic,
        operate.add_drain,
        operate.add_context,
        infer.add_infer,
        infer.add_chat,
        infer.add_run,
        infer.add_dev,
        add_bench,
        observe.add_stats,
        observe.add_top,
        observe.add_ready,
        observe.add_config,
        observe.add_logs,
        observe.add_trace,
        local.add_check,
        local.add_doctor,
        local.add_init,
        local.add_pull,
        local.add_build,
        add_convert,
        add_quantize,
        add_describe,
        local.add_gateway,
        local.add_keygen,
        add_tune,
        add_plan,
        observe.add_version_command,
        infer.add_demo,
        local.add_completion,
    ):
        add(commands)
    return shmserve
