"""Arguments of the commands that show a server: models, stats, top, ready, config, logs, trace, version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shmserve.clients.cli.arguments.common import (
    add_color,
    add_json,
    add_model,
    add_output,
    add_server_command,
    add_version,
    at_least_1,
    seconds,
)
from shmserve.clients.cli.commands import completion
from shmserve.clients.cli.commands.base import LEVELS
from shmserve.clients.cli.help import rare


def add_models(commands: Any) -> None:
    examples = (
        "  shmserve models\n  shmserve models 'p05*'\n  shmserve models mlp --instances\n  shmserve models --watch\n"
        "  shmserve models --json\n"
    )
    about = "list models: versions, states, processes, resources, and the reason if one is not READY"
    command = add_server_command(commands, "models", "status", about, examples)
    add_model(command, "*")
    command.add_argument("--instances", action="store_true", help="print one line per model process")
    add_output(command, watch=True)


def add_stats(commands: Any) -> None:
    examples = "  shmserve stats\n  shmserve stats mlp --watch 2\n  shmserve stats mlp --json\n"
    examples += "  shmserve stats mlp 'p05*' --history\n  shmserve stats --prometheus\n  shmserve stats --callers\n"
    about = "show statistics: requests, batches, queue times and compute times"
    command = add_server_command(commands, "stats", "status", about, examples)
    add_model(command, "*")
    add_version(command)
    command.add_argument(
        "--history", action="store_true", help="show curves of the last hour, which the gateway has recorded"
    )
    text = "print all metrics in the Prometheus format"
    command.add_argument("--prometheus", action="store_true", help=text)
    command.add_argument(
        "--callers", action="store_true", help="for operators: show the callers of gateways that use the most"
    )
    add_output(command, watch=True)


def add_top(commands: Any) -> None:
    examples = """  shmserve top
  shmserve top host1 host2 host3              several servers over HTTP
  shmserve top --url http://localhost:8000
  shmserve top --once --table instances
  shmserve top --once --filter mlp
  shmserve top --json --interval 5            a line of JSON every 5 s
  shmserve top --interval 0.5 --sort p99
"""
    about = "watch a server live, and load, unload and restart models by key; or watch several servers"
    codes = ("ended by the user", "no server, or a package is missing")
    command = add_server_command(commands, "top", "top", about, examples, codes)
    add = command.add_argument
    text = "servers: HOST or HOST:PORT over HTTP (port 8000), or a URL as for --url"
    add("server", metavar="SERVER", nargs="*", help=text)
    add("--interval", metavar="SECONDS", type=seconds, default=2.0, help="time between refreshes (default: 2)")
    add("--once", action="store_true", help="print one snapshot as text, after one interval, and exit")
    add_json(command, "print a line of JSON at each refresh; with --once, one document")
    text = "models, instances, clients or gpus; of several servers: servers, models or by-server (default: the first, "
    text += "or all with --once or --json)"
    tables = ("models", "instances", "clients", "gpus", "servers", "by-server")
    add("--table", metavar="NAME", choices=tables, help=text)
    add("--filter", metavar="TEXT", default="", help="show only rows with these words")
    add("--sort", metavar="COLUMN", help="sort by this column, e.g. p99, queue or 'req/s'")
    text = "with http://: the metrics endpoint (default: port 8002 of the same host); of several servers, once for each"
    rare(add, "--metrics-url", metavar="URL", action="append", default=[], help=text)
    add_color(command)


def add_ready(commands: Any) -> None:
    examples = "  shmserve ready                  exit code 0 if every model is READY\n"
    examples += "  shmserve ready mlp --wait 30    wait for up to 30 s, e.g. after starting a server\n"
    about = "check whether the server, or a model, is ready to take requests"
    codes = ("ready", "not ready, or no server")
    command = add_server_command(commands, "ready", "ready", about, examples, codes)
    add_model(command, "?")
    command.add_argument(
        "--wait",
        metavar="SECONDS",
        type=seconds,
        help="wait up to this long, also for a server that has not started (default: do not wait)",
    )
    add_output(command, watch=True)


def add_config(commands: Any) -> None:
    about = "show a model's configuration as completed by the server, with the origin of each value"
    examples = "  shmserve config mlp\n  shmserve config mlp --json\n"
    command = add_server_command(commands, "config", "status", about, examples)
    add_model(command)
    add_version(command)
    text = "with --json: also the origins of the values; "
    text += '{"config": ..., "origins": {path: file, override, model or default}}'
    command.add_argument("--origins", action="store_true", help=text)
    add_output(command, watch=True, json="print JSON in Triton's form")


def add_logs(commands: Any) -> None:
    about = "show the latest records of the server's log, or those about a model"
    examples = """  shmserve logs
  shmserve logs mlp -f                        what the model prints, until Ctrl-C
  shmserve logs --lines 20 --level warning
"""
    command = add_server_command(commands, "logs", "logs", about, examples)
    add_model(command, "?")
    command.add_argument(
        "-f", "--follow", action="store_true", help="continue with new records until Ctrl-C, also across restarts"
    )
    command.add_argument("-n", "--lines", metavar="N", type=at_least_1, help="only the last N records")
    command.add_argument(
        "--level", choices=LEVELS, default=LEVELS[0], help="only records of this level and above; default: all"
    )
    instance = command.add_argument("--instance", metavar="NAME", help="only records of this instance")
    completion.completes(instance, completion.instances)
    add_output(command, json="print one line of JSON per record")


def add_trace(commands: Any) -> None:
    about = "record what ran when, and write a timeline that ui.perfetto.dev opens"
    examples = """  shmserve trace                              5 s of all models, to trace.json
  shmserve trace --seconds 30 -o run.json.gz  until Ctrl-C or for 30 s
  shmserve trace --model mlp --json
"""
    command = add_server_command(commands, "trace", "trace", about, examples)
    add = command.add_argument
    add(
        "--seconds",
        metavar="N",
        type=seconds,
        default=5.0,
        help="how long to record (default: 5); Ctrl-C also ends the recording",
    )
    text = "the file to write (default: trace.json); compressed if its name ends with .gz"
    add("-o", "--output", metavar="FILE", type=Path, default=Path("trace.json"), help=text)
    text = "only this model; repeatable"
    completion.completes(add("--model", metavar="MODEL", action="append", default=[], help=text), completion.models)
    text = "maximum number of requests to keep (default: 200000, about 120 MB of JSON); others are counted"
    rare(add, "--limit", metavar="N", type=at_least_1, default=200_000, help=text)
    add_output(command, json="print a summary as JSON")


def add_version_command(commands: Any) -> None:
    examples = "  shmserve version\n  shmserve version --runtime-dir /run/shmserve    also the version of that server\n"
    about = "print the version of this program, and of the server if one is named"
    command = add_server_command(commands, "version", "version", about, examples)
    rare(command.add_argument, "--json", action="store_true", help="print JSON")
