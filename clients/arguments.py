"""What the command `shmserve` understands: its commands, their options and their help.

The rule of the file: nothing is imported that `--help` does not need; a command's own module is imported when it runs.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shmserve.clients import completion
from shmserve.clients.gateway import flags

ABOUT = "Serves models on this machine, and asks the server that serves them."
EPILOG = """
first steps:
  shmserve serve --model-repository ./models      start a server; Ctrl-C stops it
  shmserve models                                 what it serves
  shmserve infer mlp --random                     try a model
  shmserve stats                                  what it has done
  eval "$(shmserve completion bash)"              the Tab key completes commands, options and models

`shmserve COMMAND --help` explains each command, with examples. Exit codes: 0 done, 1 failed, 2 used wrongly,
130 interrupted.
"""
WHERE = """
The server is the one of this machine and user, unless --url, --runtime-dir, SHMSERVE_URL or SHMSERVE_RUNTIME_DIR
names another.
"""
CODES = """exit codes:
  0    {}
  1    {}
  2    used wrongly
  130  interrupted
"""

Run = Callable[[argparse.Namespace], int]


class _Parser(argparse.ArgumentParser):
    def __init__(self, **kwargs: Any) -> None:
        kwargs["formatter_class"] = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, **kwargs)


def parser() -> argparse.ArgumentParser:
    """Of all commands but serve, whose arguments the broker understands."""
    found = _Parser(prog="shmserve", description=ABOUT, epilog=EPILOG)
    found.add_argument("--version", action="store_true", dest="show_version", help="the same as `shmserve version`")
    commands = found.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=_Parser)
    commands.add_parser("serve", help="start a server (its options: shmserve serve --help)")
    for add in (
        _add_models, _add_load, _add_unload, _add_restart, _add_infer, _add_run, _add_stats, _add_ready, _add_config,
        _add_check, _add_build, _add_gateway, _add_keygen, _add_version, _add_demo, _add_completion,
    ):  # fmt: skip
        add(commands)
    return found


def _later(module: str, name: str) -> Run:
    """A function of a module that is imported when it is called."""

    def run(args: argparse.Namespace) -> int:
        code: int = getattr(importlib.import_module(f"shmserve.clients.{module}"), name)(args)
        return code

    return run


def _made(
    commands: Any, name: str, run: Run, about: str, epilog: str, codes: tuple[str, str]
) -> argparse.ArgumentParser:
    """`about` is one sentence, without its capital and its full stop. `codes`: what 0 and 1 mean."""
    made: argparse.ArgumentParser = commands.add_parser(
        name, help=about, description=f"{about[0].upper()}{about[1:]}.", epilog=f"{CODES.format(*codes)}{epilog}"
    )
    made.set_defaults(run=run)
    return made


def _command(
    commands: Any,
    name: str,
    run: Run,
    about: str,
    examples: str,
    codes: tuple[str, str] = ("done", "failed"),
    keys: bool = True,
) -> argparse.ArgumentParser:
    """A command that asks a server. `keys`: also one over tcp."""
    made = _made(commands, name, run, about, f"{WHERE}\nexamples:\n{examples}", codes)
    where = made.add_mutually_exclusive_group()
    where.add_argument(
        "--url", metavar="URL", help="unix:///path/lane.sock, ipc:///path/broker.sock or tcp://host:port"
    )
    where.add_argument("--runtime-dir", metavar="DIR", help="the directory that the server was given by this name")
    if keys:
        made.add_argument(
            "--server-key", metavar="KEY", help="with tcp://: the server's public key, or its file NAME.pub"
        )
        made.add_argument(
            "--key-file", metavar="FILE", help="with tcp://: your own NAME.key, from `shmserve keygen NAME`"
        )
    return made


def _model(made: argparse.ArgumentParser, nargs: str | None = None) -> None:
    kind: dict[str, Any] = {} if nargs is None else {"nargs": nargs}
    completion.completes(made.add_argument("model", metavar="MODEL", **kind), completion.models)


def _json(made: argparse.ArgumentParser) -> None:
    made.add_argument("--json", action="store_true", help="print JSON, for programs")


def _version_of(made: argparse.ArgumentParser) -> None:
    text = "a version of the model (default: its latest)"
    completion.completes(made.add_argument("--version", metavar="N", type=_at_least_1, help=text), completion.versions)


def _add_models(commands: Any) -> None:
    examples = (
        "  shmserve models\n  shmserve models mlp --instances\n  shmserve models --watch\n  shmserve models --json\n"
    )
    about = "list the models: their versions and processes, what they take, and why one is not READY"
    made = _command(commands, "models", _later("commands_status", "models"), about, examples)
    _model(made, "*")
    made.add_argument("--instances", action="store_true", help="a line for each process of a model")
    made.add_argument(
        "--watch", metavar="SECONDS", type=_seconds, nargs="?", const=1.0,
        help="again every so many seconds (default: 1), until Ctrl-C",
    )  # fmt: skip
    _json(made)


def _add_gateway(commands: Any) -> None:
    examples = """  shmserve gateway
  shmserve gateway --http-port 9000 --no-metrics
  shmserve gateway --http-roles infer,observe,operate
"""
    about = "be a door to the network: requests over HTTP (KServe v2) go to the server, and metrics to Prometheus"
    codes = ("stopped by SIGTERM or Ctrl-C", "could not listen")
    flags.add(_command(commands, "gateway", _later("commands_run", "gateway"), about, examples, codes, keys=False))


def _add_keygen(commands: Any) -> None:
    examples = """
examples:
  shmserve keygen                              of this machine: NAME is its host name
  shmserve keygen alice --out ~/.config/shmserve
  shmserve keygen robot --roles infer,observe,operate
"""
    about = "make a pair of keys for ZeroMQ over tcp: of a gateway, or of a client"
    made = _made(commands, "keygen", _later("commands_keygen", "keygen"), about, examples, ("done", "not written"))
    made.add_argument("name", metavar="NAME", nargs="?", help="whose keys they are (default: this machine's)")
    made.add_argument("--out", metavar="DIR", type=Path, default=Path(), help="where NAME.key and NAME.pub go")
    made.add_argument(
        "--roles", metavar="ROLE,ROLE", default="infer,observe",
        help="what the line of NAME.pub lets a client do, of infer, observe, operate (default: %(default)s)",
    )  # fmt: skip
    _json(made)


def _add_load(commands: Any) -> None:
    examples = """  shmserve load mlp
  shmserve load mlp cnn
  shmserve load mlp --previous                go back to what was served before the last load
  shmserve load mlp --config-json config.json
  shmserve load new --config-json config.json --file 1/model.onnx=./new.onnx
"""
    about = "load models, or what has changed of models that are served, and wait until they are READY"
    codes = ("every model is READY", "one could not be loaded; what was served of it before still is")
    made = _command(commands, "load", _later("commands_operate", "load"), about, examples, codes)
    _model(made, "*")
    add = made.add_argument
    add("--all", action="store_true", help="every model of the repositories, as far as it is known to the server")
    add("--config-json", metavar="FILE", help="a configuration, as JSON, instead of config.pbtxt; - is standard input")
    add("--file", metavar="NAME=PATH", action="append", default=[],
        help="with --config-json: a file of the model, e.g. 1/model.onnx=./model.onnx; the repository's files do not "
        "count then; may be given several times")  # fmt: skip
    add("--previous", action="store_true",
        help="load what was served before the last load, whatever is in the repository; in every mode")  # fmt: skip
    _operation(made)


def _add_unload(commands: Any) -> None:
    examples = "  shmserve unload mlp\n  shmserve unload mlp cnn --no-wait\n  shmserve unload mlp --force\n"
    about = "end models: requests in flight are answered, then their processes and memory go"
    codes = ("unloaded (or with --no-wait: begun)", "failed")
    made = _command(commands, "unload", _later("commands_operate", "unload"), about, examples, codes)
    _model(made, "+")
    made.add_argument("--no-wait", action="store_false", dest="wait", help="do not wait until the processes have ended")
    made.add_argument("--force", action="store_true", help="requests in flight fail and the processes are killed, now")
    made.add_argument(
        "--dependents", action="store_true", help="also what was loaded only because this ensemble needs it"
    )
    _operation(made)


def _add_restart(commands: Any) -> None:
    examples = """  shmserve restart mlp
  shmserve restart mlp --version 2
  shmserve restart mlp --instance mlp_0_1     a name from `shmserve models --instances`
"""
    about = "give models new processes without losing a request"
    made = _command(commands, "restart", _later("commands_operate", "restart"), about, examples)
    _model(made, "+")
    version = made.add_argument("--version", metavar="N", type=_at_least_1, help="only this version (default: all)")
    completion.completes(version, completion.versions)
    instance = made.add_argument("--instance", metavar="NAME", help="only this process")
    completion.completes(instance, completion.instances)
    _operation(made)


def _operation(made: argparse.ArgumentParser) -> None:
    text = "wait so long (default: no limit); the server goes on with it"
    made.add_argument("--timeout", metavar="SECONDS", type=_seconds, help=text)
    _json(made)


def _add_infer(commands: Any) -> None:
    examples = """  shmserve infer mlp --random
  shmserve infer mlp --random --batch 8 --repeat 1000
  shmserve infer add_sub --input INPUT0=1,2,3,4 --input INPUT1='[10, 20, 30, 40]'
  shmserve infer mlp --input x=@x.npy --out results
  echo '{"inputs": {"INPUT0": [1, 2, 3, 4], "INPUT1": [1, 1, 1, 1]}}' | shmserve infer add_sub - --json
  shmserve infer repeat --input IN=1,2,3 --stream
"""
    made = _command(
        commands, "infer", _later("commands_infer", "infer"), "run a model once and show its outputs", examples
    )
    _model(made)
    _feeding(made)
    made.add_argument(
        "--timeout", metavar="SECONDS", type=_seconds, help="wait so long for an answer (default: no limit)"
    )
    made.add_argument("--stream", action="store_true", help="show answers as they come, of a model that gives several")
    _version_of(made)
    _json(made)


def _feeding(made: argparse.ArgumentParser) -> None:
    """What a model gets, how often, and where its answer goes."""
    add = made.add_argument
    add("file", metavar="FILE", nargs="?", help='JSON: {"inputs": {"NAME": [[1, 2, 3]]}}; - is standard input')
    add("-i", "--input", metavar="NAME=VALUE", action="append", default=[],
        help="an input: numbers with commas between them, a JSON literal, or @FILE.npy; dtype and shape are the "
        "model's; may be given several times")  # fmt: skip
    add("--random", action="store_true", help="random data for the inputs that are not given; free dims are 1")
    add("--batch", metavar="N", type=_at_least_1, help="with --random: so many rows")
    add("--shape", metavar="NAME=D1,D2,...", action="append", default=[],
        help="with --random: the whole shape of an input")  # fmt: skip
    add("--seed", metavar="N", type=int, help="with --random: the same data again")
    add("--outputs", metavar="NAME,...", help="only these outputs (default: all)")
    add("--out", metavar="DIR", type=Path, help="write each output to DIR/NAME.npy")
    add("--repeat", metavar="N", type=_at_least_1, default=1,
        help="send it N times, one after another, and show the median and 99th percentile of the latency")  # fmt: skip


def _add_run(commands: Any) -> None:
    examples = """
examples:
  shmserve run models/mlp --random
  shmserve run models/mlp --input x=@x.npy --repeat 100
  shmserve run models/add_sub request.json --json
  shmserve run models/add_sub --random --pdb      stop in the debugger where the model fails
"""
    about = "run one model in this terminal, without a server, where breakpoint() works"
    codes = ("the model has answered", "it could not be loaded, or failed")
    made = _made(commands, "run", _later("commands_run", "run"), about, examples, codes)
    add = made.add_argument
    add("model_dir", metavar="MODEL_DIR", type=Path, help="the directory that has the model's config.pbtxt")
    _feeding(made)
    add("--pdb", action="store_true", help="stop in Python's debugger where the model raises")
    add("--backend-config", metavar="BACKEND,KEY=VALUE", action="append", default=[],
        help="a setting for a backend, as for serve; may be given several times")  # fmt: skip
    _backend_directory(add)
    add("--model-config-name", metavar="NAME", default="", help="take MODEL_DIR/configs/NAME.pbtxt, if it is there")
    add("--version", metavar="N", type=_at_least_1, help="a version of the model (default: its highest)")
    _json(made)


def _add_stats(commands: Any) -> None:
    examples = "  shmserve stats\n  shmserve stats mlp --json\n  shmserve stats --prometheus\n"
    about = "show how many requests were answered, in which batches, and how long they waited and ran"
    made = _command(commands, "stats", _later("commands_status", "stats"), about, examples)
    _model(made, "?")
    _version_of(made)
    text = "all that the server counts, as Prometheus reads it"
    made.add_argument("--prometheus", action="store_true", help=text)
    _json(made)


def _add_ready(commands: Any) -> None:
    examples = "  shmserve ready                  exit code 0 if every model is READY\n"
    examples += "  shmserve ready mlp --wait 30    wait for it, for scripts that start a server\n"
    about = "exit with 0 if the server, or a model, can take requests, and with 1 if not"
    codes = ("ready", "not ready, or no server")
    made = _command(commands, "ready", _later("commands_status", "ready"), about, examples, codes)
    _model(made, "?")
    made.add_argument(
        "--wait", metavar="SECONDS", type=_seconds, help="wait so long, also for a server that is not there yet"
    )


def _add_config(commands: Any) -> None:
    about = "show the configuration of a model with all that the server has completed, and where each value is from"
    examples = "  shmserve config mlp\n  shmserve config mlp --json\n"
    made = _command(commands, "config", _later("commands_status", "config"), about, examples)
    _model(made)
    _version_of(made)
    made.add_argument("--json", action="store_true", help="print it as JSON, in Triton's form, for programs")
    text = 'with --json: {"config": ..., "origins": {path: file, override, model or default}}'
    made.add_argument("--origins", action="store_true", help=text)


def _backend_directory(add: Callable[..., Any]) -> None:
    variable = "SHMSERVE_BACKEND_DIRECTORY"
    text = f"where backends of your own are, as for serve (default: ${variable})"
    add("--backend-directory", metavar="DIR", type=Path, default=os.environ.get(variable) or None, help=text)


def _add_check(commands: Any) -> None:
    examples = """
examples:
  shmserve check ./models
  shmserve check ./models --load --timeout 60
  shmserve check ./models ./more --json
"""
    about = "find what is wrong in model repositories, before they are served"
    codes = ("no errors", "errors were found (with --strict: or warnings)")
    made = _made(commands, "check", _later("commands_check", "check"), about, examples, codes)
    add = made.add_argument
    add("roots", metavar="ROOT", nargs="+", help="a model repository: a directory with a directory for each model")
    add("--load", action="store_true", help="also load each model, in a server of its own that ends with the command")
    add("--strict", action="store_true", help="warnings count as errors")
    add("--quiet", action="store_true", help="show errors only")
    add("--model-config-name", metavar="NAME", default="", help="take configs/NAME.pbtxt of each model that has it")
    add("--timeout", metavar="SECONDS", type=_seconds, help="with --load: give the models so long (default: no limit)")
    _backend_directory(add)
    _json(made)


def _add_build(commands: Any) -> None:
    examples = """
examples:
  shmserve build models/resnet -o models/resnet_trt/1/model.plan     batches and dims as its config.pbtxt has them
  shmserve build model.onnx -o model.plan --max-batch 32
  shmserve build model.onnx -o model.plan --profile x=1x3x224x224:8x3x224x224:32x3x224x224

A plan is for this kind of GPU and this version of TensorRT, unless --hardware and --version-compatible widen that.
"""
    about = "make a TensorRT plan of an ONNX model, for this machine's GPU"
    made = _made(commands, "build", _later("commands_build", "build"), about, examples, ("done", "failed"))
    add = made.add_argument
    add("model", metavar="MODEL", type=Path, help="an ONNX file, or the directory of a model that has one")
    add("-o", "--out", metavar="FILE", type=Path, required=True, help="where the plan goes; what is there is replaced")
    add(
        "--profile",
        metavar="NAME=MIN:BEST:MAX",
        nargs="+",
        action="append",
        default=[],
        help="shapes to build for, as 1x3x224x224, of each input with dynamic dims; given again: one more profile",
    )
    add("--max-batch", metavar="N", type=_at_least_1, help="build for batches of 1 to N rows")
    add("--version", metavar="N", type=_at_least_1, help="a version of the model's directory (default: its highest)")
    add(
        "--precision",
        choices=("fp16", "bf16"),
        help="let TensorRT 10 compute in this type, too (default, and always with 11: the types of the ONNX file)",
    )
    add("--workspace-mb", metavar="MIB", type=_at_least_1, help="device memory that a layer may use while it runs")
    add("--level", type=int, choices=range(6), help="0 builds fastest, 5 looks longest for the best (default: 3)")
    add("--timing-cache", metavar="FILE", help="what was measured in earlier builds (default: in ~/.cache/shmserve)")
    add("--no-timing-cache", action="store_true", help="measure everything anew")
    add("--version-compatible", action="store_true", help="a plan that later versions of TensorRT can run, too")
    add(
        "--hardware",
        choices=("ampere+", "same"),
        help="a plan for all GPUs since Ampere, or for all of the same compute capability",
    )
    add("--plugins", metavar="LIST", help="libraries of plug-ins, divided by ';'")
    _json(made)


def _add_version(commands: Any) -> None:
    examples = "  shmserve version\n  shmserve version --runtime-dir /run/shmserve    and that of the server there\n"
    about = "show the version of this program, and of a server that is named"
    made = _command(commands, "version", _later("commands_status", "version"), about, examples)
    _json(made)


def _add_demo(commands: Any) -> None:
    about = "run the sample models on real examples and say what they did"
    _json(_command(commands, "demo", _later("demo", "demo"), about, "  shmserve demo\n"))


def _add_completion(commands: Any) -> None:
    examples = """
In ~/.bashrc or ~/.zshrc:       eval "$(shmserve completion bash)"      (or zsh)
In ~/.config/fish/config.fish:  shmserve completion fish | source

examples:
  shmserve completion bash
"""
    about = "print what makes the Tab key of a shell complete commands, options and models"
    made = _made(commands, "completion", _later("completion", "script"), about, examples, ("done", "failed"))
    made.add_argument("shell", choices=completion.SHELLS)


def _at_least_1(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 1 up")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds above 0")
    return value
