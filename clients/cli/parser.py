"""The argument parser of `shmserve`: commands, options and help.

Invariant: only what `--help` needs is imported here; a command's module is imported when it runs.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shmserve.clients.cli.commands import completion
from shmserve.gateway import options

ABOUT = "Serve models on this machine and send requests to the server."
EPILOG = """
first steps:
  shmserve serve --model-repository ./models      start a server; Ctrl-C stops it
  shmserve models                                 list its models
  shmserve infer mlp --random                     try a model
  shmserve stats                                  show statistics
  eval "$(shmserve completion bash)"              enable Tab completion of commands, options and models

`shmserve COMMAND --help` describes a command, with examples. Exit codes: 0 success, 1 failure, 2 wrong usage,
130 interrupted.
"""
WHERE = """
Connects to this user's server on this machine, unless --url, --runtime-dir, SHMSERVE_URL or SHMSERVE_RUNTIME_DIR
selects another.
"""
CODES = """exit codes:
  0    {}
  1    {}
  2    wrong usage
  130  interrupted
"""


class _CommandParser(argparse.ArgumentParser):
    def __init__(self, **kwargs: Any) -> None:
        kwargs["formatter_class"] = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, **kwargs)


def parser() -> argparse.ArgumentParser:
    """The parser of all commands except serve, whose arguments the broker parses."""
    shmserve = _CommandParser(prog="shmserve", description=ABOUT, epilog=EPILOG)
    shmserve.add_argument("--version", action="store_true", dest="show_version", help="the same as `shmserve version`")
    commands = shmserve.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=_CommandParser)
    commands.add_parser("serve", help="start a server (its options: shmserve serve --help)")
    for add in (
        _add_models, _add_load, _add_unload, _add_restart, _add_infer, _add_run, _add_stats, _add_ready, _add_config,
        _add_check, _add_build, _add_gateway, _add_keygen, _add_version, _add_demo, _add_completion,
    ):  # fmt: skip
        add(commands)
    return shmserve


def _add_command(
    commands: Any, name: str, module: str, about: str, epilog: str, codes: tuple[str, str]
) -> argparse.ArgumentParser:
    """Add a command, which is the function of this name in a module of `commands`. `about` is one sentence, without its
    capital letter and full stop. `codes`: meanings of exit codes 0 and 1.
    """
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=about, description=f"{about[0].upper()}{about[1:]}.", epilog=f"{CODES.format(*codes)}{epilog}"
    )

    def run(args: argparse.Namespace) -> int:
        code: int = getattr(importlib.import_module(f"shmserve.clients.cli.commands.{module}"), name)(args)
        return code

    command.set_defaults(run=run)
    return command


def _add_server_command(
    commands: Any,
    name: str,
    module: str,
    about: str,
    examples: str,
    codes: tuple[str, str] = ("done", "failed"),
    keys: bool = True,
) -> argparse.ArgumentParser:
    """Add a command that connects to a server. `keys`: also over tcp."""
    command = _add_command(commands, name, module, about, f"{WHERE}\nexamples:\n{examples}", codes)
    where = command.add_mutually_exclusive_group()
    where.add_argument(
        "--url", metavar="URL", help="unix:///path/lane.sock, ipc:///path/broker.sock or tcp://host:port"
    )
    where.add_argument("--runtime-dir", metavar="DIR", help="the server's runtime directory (--runtime-dir of serve)")
    if keys:
        command.add_argument(
            "--server-key", metavar="KEY", help="with tcp://: the server's public key, or the file NAME.pub"
        )
        command.add_argument(
            "--key-file", metavar="FILE", help="with tcp://: your own NAME.key, from `shmserve keygen NAME`"
        )
    return command


def _model(command: argparse.ArgumentParser, nargs: str | None = None) -> None:
    kind: dict[str, Any] = {} if nargs is None else {"nargs": nargs}
    completion.completes(command.add_argument("model", metavar="MODEL", **kind), completion.models)


def _json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON")


def _version_of(command: argparse.ArgumentParser) -> None:
    text = "model version (default: latest)"
    completion.completes(
        command.add_argument("--version", metavar="N", type=_at_least_1, help=text), completion.versions
    )


def _add_models(commands: Any) -> None:
    examples = (
        "  shmserve models\n  shmserve models mlp --instances\n  shmserve models --watch\n  shmserve models --json\n"
    )
    about = "list models: versions, states, processes, resources, and the reason if one is not READY"
    command = _add_server_command(commands, "models", "status", about, examples)
    _model(command, "*")
    command.add_argument("--instances", action="store_true", help="print one line per model process")
    command.add_argument(
        "--watch", metavar="SECONDS", type=_seconds, nargs="?", const=1.0,
        help="refresh every SECONDS (default: 1) until Ctrl-C",
    )  # fmt: skip
    _json(command)


def _add_gateway(commands: Any) -> None:
    examples = """  shmserve gateway
  shmserve gateway --http-port 9000 --no-metrics
  shmserve gateway --http-roles infer,observe,operate
"""
    about = "run a gateway: serve HTTP and gRPC (KServe v2) and Prometheus metrics for a running server"
    codes = ("stopped by SIGTERM or Ctrl-C", "could not start or listen")
    options.add(_add_server_command(commands, "gateway", "run", about, examples, codes, keys=False))


def _add_keygen(commands: Any) -> None:
    examples = """
examples:
  shmserve keygen                              NAME defaults to the host name
  shmserve keygen alice --out ~/.config/shmserve
  shmserve keygen robot --roles infer,observe,operate
"""
    about = "create a key pair for ZeroMQ over tcp, for a gateway or a client"
    command = _add_command(commands, "keygen", "keygen", about, examples, ("done", "not written"))
    command.add_argument("name", metavar="NAME", nargs="?", help="name of the key pair (default: the host name)")
    command.add_argument("--out", metavar="DIR", type=Path, default=Path(), help="directory for NAME.key and NAME.pub")
    command.add_argument(
        "--roles", metavar="ROLE,ROLE", default="infer,observe",
        help="roles to write into NAME.pub: infer, observe, operate (default: %(default)s)",
    )  # fmt: skip
    _json(command)


def _add_load(commands: Any) -> None:
    examples = """  shmserve load mlp
  shmserve load mlp cnn
  shmserve load mlp --previous                go back to what was served before the last load
  shmserve load mlp --config-json config.json
  shmserve load new --config-json config.json --file 1/model.onnx=./new.onnx
"""
    about = "load models, or reload what has changed, and wait until they are READY"
    codes = ("every model is READY", "a load failed; what was served before is still served")
    command = _add_server_command(commands, "load", "operate", about, examples, codes)
    _model(command, "*")
    add = command.add_argument
    add("--all", action="store_true", help="every model in the server's repositories")
    add(
        "--config-json",
        metavar="FILE",
        help="JSON configuration to use instead of config.pbtxt; - reads standard input",
    )
    add("--file", metavar="NAME=PATH", action="append", default=[],
        help="with --config-json: send a model file, e.g. 1/model.onnx=./model.onnx; the repository's files are then "
        "ignored; repeatable")  # fmt: skip
    add("--previous", action="store_true",
        help="restore what was served before the last load, whatever the repository has; in every mode")  # fmt: skip
    _operation(command)


def _add_unload(commands: Any) -> None:
    examples = "  shmserve unload mlp\n  shmserve unload mlp cnn --no-wait\n  shmserve unload mlp --force\n"
    about = "unload models: finish requests in flight, then stop their processes and free their memory"
    codes = ("unloaded (with --no-wait: started)", "failed")
    command = _add_server_command(commands, "unload", "operate", about, examples, codes)
    _model(command, "+")
    command.add_argument("--no-wait", action="store_false", dest="wait", help="do not wait for the processes to exit")
    command.add_argument(
        "--force", action="store_true", help="fail requests in flight and kill the processes immediately"
    )
    command.add_argument(
        "--dependents", action="store_true", help="also unload models that were loaded only for this ensemble"
    )
    _operation(command)


def _add_restart(commands: Any) -> None:
    examples = """  shmserve restart mlp
  shmserve restart mlp --version 2
  shmserve restart mlp --instance mlp_0_1     a name from `shmserve models --instances`
"""
    about = "replace the processes of models without losing requests"
    command = _add_server_command(commands, "restart", "operate", about, examples)
    _model(command, "+")
    version = command.add_argument(
        "--version", metavar="N", type=_at_least_1, help="restart only this version (default: all)"
    )
    completion.completes(version, completion.versions)
    instance = command.add_argument("--instance", metavar="NAME", help="restart only this instance")
    completion.completes(instance, completion.instances)
    _operation(command)


def _operation(command: argparse.ArgumentParser) -> None:
    text = "maximum time to wait (default: no limit); the server continues the operation"
    command.add_argument("--timeout", metavar="SECONDS", type=_seconds, help=text)
    _json(command)


def _add_infer(commands: Any) -> None:
    examples = """  shmserve infer mlp --random
  shmserve infer mlp --random --batch 8 --repeat 1000
  shmserve infer add_sub --input INPUT0=1,2,3,4 --input INPUT1='[10, 20, 30, 40]'
  shmserve infer mlp --input x=@x.npy --out results
  echo '{"inputs": {"INPUT0": [1, 2, 3, 4], "INPUT1": [1, 1, 1, 1]}}' | shmserve infer add_sub - --json
  shmserve infer repeat --input IN=1,2,3 --stream
"""
    command = _add_server_command(
        commands,
        "infer",
        "infer",
        "send a request to a model and print its outputs",
        examples,
    )
    _model(command)
    _feeding(command)
    command.add_argument(
        "--timeout", metavar="SECONDS", type=_seconds, help="maximum time to wait for a response (default: no limit)"
    )
    command.add_argument("--stream", action="store_true", help="print each response of a decoupled model as it arrives")
    _version_of(command)
    _json(command)


def _feeding(command: argparse.ArgumentParser) -> None:
    """Arguments for inputs, repetition and outputs."""
    add = command.add_argument
    add("file", metavar="FILE", nargs="?", help='JSON file: {"inputs": {"NAME": [[1, 2, 3]]}}; - reads standard input')
    add("-i", "--input", metavar="NAME=VALUE", action="append", default=[],
        help="an input: comma-separated numbers, a JSON literal, or @FILE.npy; dtype and shape come from the "
        "model; repeatable")  # fmt: skip
    add("--random", action="store_true", help="random data for inputs that are not given; dims of variable size are 1")
    add("--batch", metavar="N", type=_at_least_1, help="with --random: batch size")
    add("--shape", metavar="NAME=D1,D2,...", action="append", default=[],
        help="with --random: full shape of an input")  # fmt: skip
    add("--seed", metavar="N", type=int, help="with --random: seed, for reproducible data")
    add("--outputs", metavar="NAME,...", help="outputs to compute (default: all)")
    add("--out", metavar="DIR", type=Path, help="write each output to DIR/NAME.npy")
    add("--repeat", metavar="N", type=_at_least_1, default=1,
        help="send it N times, one after another, and print the median and 99th percentile of the latency")  # fmt: skip


def _add_run(commands: Any) -> None:
    examples = """
examples:
  shmserve run models/mlp --random
  shmserve run models/mlp --input x=@x.npy --repeat 100
  shmserve run models/add_sub request.json --json
  shmserve run models/add_sub --random --pdb      stop in the debugger where the model raises
"""
    about = "run one model in this terminal without a server; breakpoint() works"
    codes = ("success", "the model could not be loaded, or failed")
    command = _add_command(commands, "run", "run", about, examples, codes)
    add = command.add_argument
    add("model_dir", metavar="MODEL_DIR", type=Path, help="directory with the model's config.pbtxt")
    _feeding(command)
    add("--pdb", action="store_true", help="stop in Python's debugger where the model raises")
    add("--backend-config", metavar="BACKEND,KEY=VALUE", action="append", default=[],
        help="backend setting, as for serve; repeatable")  # fmt: skip
    _backend_directory(add)
    add("--model-config-name", metavar="NAME", default="", help="use MODEL_DIR/configs/NAME.pbtxt if it exists")
    add("--version", metavar="N", type=_at_least_1, help="model version (default: highest)")
    _json(command)


def _add_stats(commands: Any) -> None:
    examples = "  shmserve stats\n  shmserve stats mlp --json\n  shmserve stats --prometheus\n"
    about = "show statistics: requests, batches, queue times and compute times"
    command = _add_server_command(commands, "stats", "status", about, examples)
    _model(command, "?")
    _version_of(command)
    text = "print all metrics in the Prometheus format"
    command.add_argument("--prometheus", action="store_true", help=text)
    _json(command)


def _add_ready(commands: Any) -> None:
    examples = "  shmserve ready                  exit code 0 if every model is READY\n"
    examples += "  shmserve ready mlp --wait 30    wait for up to 30 s, e.g. after starting a server\n"
    about = "exit with 0 if the server, or a model, can take requests, else with 1"
    codes = ("ready", "not ready, or no server")
    command = _add_server_command(commands, "ready", "status", about, examples, codes)
    _model(command, "?")
    command.add_argument(
        "--wait",
        metavar="SECONDS",
        type=_seconds,
        help="maximum time to wait, also for a server that has not started (default: do not wait)",
    )


def _add_config(commands: Any) -> None:
    about = "show a model's configuration as completed by the server, with the origin of each value"
    examples = "  shmserve config mlp\n  shmserve config mlp --json\n"
    command = _add_server_command(commands, "config", "status", about, examples)
    _model(command)
    _version_of(command)
    command.add_argument("--json", action="store_true", help="print JSON in Triton's form")
    text = 'with --json: {"config": ..., "origins": {path: file, override, model or default}}'
    command.add_argument("--origins", action="store_true", help=text)


def _backend_directory(add: Callable[..., Any]) -> None:
    variable = "SHMSERVE_BACKEND_DIRECTORY"
    text = f"directory of custom backends, as for serve (default: ${variable})"
    add("--backend-directory", metavar="DIR", type=Path, default=os.environ.get(variable) or None, help=text)


def _add_check(commands: Any) -> None:
    examples = """
examples:
  shmserve check ./models
  shmserve check ./models --load --timeout 60
  shmserve check ./models ./more --json
"""
    about = "check model repositories for errors before they are served"
    codes = ("no errors", "errors found (with --strict: errors or warnings)")
    command = _add_command(commands, "check", "check", about, examples, codes)
    add = command.add_argument
    add("roots", metavar="ROOT", nargs="+", help="model repository: a directory with one directory per model")
    add("--load", action="store_true", help="also load each model, in a temporary server")
    add("--strict", action="store_true", help="treat warnings as errors")
    add("--quiet", action="store_true", help="print only errors")
    add("--model-config-name", metavar="NAME", default="", help="use configs/NAME.pbtxt of each model that has it")
    add("--timeout", metavar="SECONDS", type=_seconds, help="with --load: maximum loading time (default: no limit)")
    _backend_directory(add)
    _json(command)


def _add_build(commands: Any) -> None:
    examples = """
examples:
  shmserve build models/resnet -o models/resnet_trt/1/model.plan     batch size and dims from its config.pbtxt
  shmserve build model.onnx -o model.plan --max-batch 32
  shmserve build model.onnx -o model.plan --profile x=1x3x224x224:8x3x224x224:32x3x224x224

A plan works only with this GPU type and this TensorRT version, unless --hardware or --version-compatible is given.
"""
    about = "compile an ONNX model to a TensorRT plan for this machine's GPU"
    command = _add_command(commands, "build", "run", about, examples, ("done", "failed"))
    add = command.add_argument
    add("model", metavar="MODEL", type=Path, help="ONNX file, or model directory with one")
    add("-o", "--out", metavar="FILE", type=Path, required=True, help="output file; an existing file is replaced")
    add(
        "--profile",
        metavar="NAME=MIN:BEST:MAX",
        nargs="+",
        action="append",
        default=[],
        help="shapes, such as 1x3x224x224, of each input with dynamic dims; repeat to add a profile",
    )
    add("--max-batch", metavar="N", type=_at_least_1, help="build for batches of 1 to N rows")
    add("--version", metavar="N", type=_at_least_1, help="model version, for a model directory (default: highest)")
    add(
        "--precision",
        choices=("fp16", "bf16"),
        help="also let TensorRT 10 compute in this type (default, and always with 11: only the types of the ONNX file)",
    )
    add("--workspace-mb", metavar="MIB", type=_at_least_1, help="maximum device memory for the workspace of a layer")
    add(
        "--level",
        type=int,
        choices=range(6),
        help="optimization level: 0 builds fastest, 5 searches longest (default: 3)",
    )
    add("--timing-cache", metavar="FILE", help="timings from earlier builds (default: in ~/.cache/shmserve)")
    add("--no-timing-cache", action="store_true", help="measure everything again")
    add("--version-compatible", action="store_true", help="build a plan that later TensorRT versions can also run")
    add(
        "--hardware",
        choices=("ampere+", "same"),
        help="build a plan for all GPUs since Ampere, or for all of the same compute capability",
    )
    add("--plugins", metavar="LIST", help="plug-in libraries, separated by ';'")
    _json(command)


def _add_version(commands: Any) -> None:
    examples = "  shmserve version\n  shmserve version --runtime-dir /run/shmserve    also the version of that server\n"
    about = "print the version of this program, and of the server if one is named"
    command = _add_server_command(commands, "version", "status", about, examples)
    _json(command)


def _add_demo(commands: Any) -> None:
    about = "run the sample models on real examples and print the results"
    _json(_add_server_command(commands, "demo", "demo", about, "  shmserve demo\n"))


def _add_completion(commands: Any) -> None:
    examples = """
In ~/.bashrc or ~/.zshrc:       eval "$(shmserve completion bash)"      (or zsh)
In ~/.config/fish/config.fish:  shmserve completion fish | source

examples:
  shmserve completion bash
"""
    about = "print a shell script for Tab completion of commands, options and models"
    command = _add_command(commands, "completion", "completion", about, examples, ("done", "failed"))
    command.add_argument("shell", choices=completion.SHELLS)


def _at_least_1(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not an integer of at least 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds above 0")
    return value
