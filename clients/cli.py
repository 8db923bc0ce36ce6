"""The command `shmserve`: what it understands, and how it ends.

Exit codes: 0 done, 1 failed, 2 used wrongly. The rule of the file: nothing is imported that `--help` does not need;
what a command does is in commands_*.py and demo.py.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shmserve.clients.commands_base import Failed, Misuse
from shmserve.errors import DeadlineExceeded, ServeError

ABOUT = "Serves models on this machine, and asks the server that serves them."
EPILOG = """
first steps:
  shmserve serve --model-repository ./models      start a server; Ctrl-C stops it
  shmserve models                                 what it serves
  shmserve infer mlp --random                     try a model
  shmserve stats                                  what it has done

`shmserve COMMAND --help` explains each command, with examples. Exit codes: 0 done, 1 failed, 2 used wrongly.
"""
WHERE = """
The server is the one of this machine and user, unless --url, --runtime-dir, SHMSERVE_URL or SHMSERVE_RUNTIME_DIR
names another.
"""

Run = Callable[[argparse.Namespace], int]


class _Parser(argparse.ArgumentParser):
    def __init__(self, **kwargs: Any) -> None:
        kwargs["formatter_class"] = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, **kwargs)


# ------------------------------------------------------------------------------------------ what it understands


def parser() -> argparse.ArgumentParser:
    """Of all commands but serve, whose arguments the broker understands."""
    found = _Parser(prog="shmserve", description=ABOUT, epilog=EPILOG)
    found.add_argument("--version", action="store_true", dest="show_version", help="the same as `shmserve version`")
    commands = found.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=_Parser)
    commands.add_parser("serve", help="start a server (its options: shmserve serve --help)")
    _add_models(commands)
    _add_infer(commands)
    _add_run(commands)
    _add_stats(commands)
    _add_ready(commands)
    _add_config(commands)
    _add_version(commands)
    _add_demo(commands)
    return found


def _command(commands: Any, name: str, run: Run, about: str, examples: str) -> argparse.ArgumentParser:
    """A command that asks a server. `about` is one sentence, without its capital and its full stop."""
    made: argparse.ArgumentParser = commands.add_parser(
        name, help=about, description=f"{about[0].upper()}{about[1:]}.", epilog=f"{WHERE}\nexamples:\n{examples}"
    )
    made.set_defaults(run=run)
    where = made.add_mutually_exclusive_group()
    where.add_argument(
        "--url", metavar="URL", help="unix:///path/lane.sock, ipc:///path/broker.sock or tcp://host:port"
    )
    where.add_argument("--runtime-dir", metavar="DIR", help="the directory that the server was given by this name")
    return made


def _json(made: argparse.ArgumentParser) -> None:
    made.add_argument("--json", action="store_true", help="print JSON, for programs")


def _version_of(made: argparse.ArgumentParser) -> None:
    made.add_argument("--version", metavar="N", type=_at_least_1, help="a version of the model (default: its latest)")


def _add_models(commands: Any) -> None:
    examples = "  shmserve models\n  shmserve models --json\n"
    about = "list the models, their versions, and why one is not READY"
    made = _command(commands, "models", _models, about, examples)
    _json(made)


def _add_infer(commands: Any) -> None:
    examples = """  shmserve infer mlp --random
  shmserve infer mlp --random --batch 8 --repeat 1000
  shmserve infer add_sub --input INPUT0=1,2,3,4 --input INPUT1='[10, 20, 30, 40]'
  shmserve infer mlp --input x=@x.npy --out results
  echo '{"inputs": {"INPUT0": [1, 2, 3, 4], "INPUT1": [1, 1, 1, 1]}}' | shmserve infer add_sub - --json
"""
    made = _command(commands, "infer", _infer, "run a model once and show its outputs", examples)
    add = made.add_argument
    add("model", metavar="MODEL")
    _feeding(made)
    add("--timeout", metavar="SECONDS", type=_seconds, help="wait so long for an answer (default: no limit)")
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
    made: argparse.ArgumentParser = commands.add_parser(
        "run", help=about, description=f"{about[0].upper()}{about[1:]}.", epilog=examples
    )
    made.set_defaults(run=_run_model)
    add = made.add_argument
    add("model_dir", metavar="MODEL_DIR", type=Path, help="the directory that has the model's config.pbtxt")
    _feeding(made)
    add("--pdb", action="store_true", help="stop in Python's debugger where the model raises")
    add("--backend-config", metavar="BACKEND,KEY=VALUE", action="append", default=[],
        help="a setting for a backend, as for serve; may be given several times")  # fmt: skip
    add("--model-config-name", metavar="NAME", default="", help="take MODEL_DIR/configs/NAME.pbtxt, if it is there")
    add("--version", metavar="N", type=_at_least_1, help="a version of the model (default: its highest)")
    _json(made)


def _add_stats(commands: Any) -> None:
    examples = "  shmserve stats\n  shmserve stats mlp --json\n"
    about = "show how many requests were answered, in which batches, and how long they waited and ran"
    made = _command(commands, "stats", _stats, about, examples)
    made.add_argument("model", metavar="MODEL", nargs="?")
    _version_of(made)
    _json(made)


def _add_ready(commands: Any) -> None:
    examples = "  shmserve ready                  exit code 0 if every model is READY\n"
    examples += "  shmserve ready mlp --wait 30    wait for it, for scripts that start a server\n"
    about = "exit with 0 if the server, or a model, can take requests, and with 1 if not"
    made = _command(commands, "ready", _ready, about, examples)
    made.add_argument("model", metavar="MODEL", nargs="?")
    made.add_argument(
        "--wait", metavar="SECONDS", type=_seconds, help="wait so long, also for a server that is not there yet"
    )


def _add_config(commands: Any) -> None:
    about = "show the configuration of a model as JSON, with all that the server has completed"
    made = _command(commands, "config", _config, about, "  shmserve config mlp\n")
    made.add_argument("model", metavar="MODEL")
    _version_of(made)
    made.add_argument("--json", action="store_true", help="as everywhere; it is JSON without it, too")


def _add_version(commands: Any) -> None:
    examples = "  shmserve version\n  shmserve version --runtime-dir /run/shmserve    and that of the server there\n"
    about = "show the version of this program, and of a server that is named"
    made = _command(commands, "version", _version, about, examples)
    _json(made)


def _add_demo(commands: Any) -> None:
    about = "run the sample models on real examples and say what they did"
    _json(_command(commands, "demo", _demo, about, "  shmserve demo\n"))


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


# ------------------------------------------------------------------------------------------ what is run


def _serve(options: Sequence[str]) -> int:
    """This process becomes the broker. What is in the current directory is importable there only if it is here."""
    safe = ["-P"] if sys.version_info >= (3, 11) and os.getcwd() not in sys.path and "" not in sys.path else []
    os.execv(sys.executable, [sys.executable, *safe, "-m", "shmserve.broker.main", *options])


def _models(args: argparse.Namespace) -> int:
    from shmserve.clients import commands_status

    return commands_status.models(args)


def _infer(args: argparse.Namespace) -> int:
    from shmserve.clients import commands_infer

    return commands_infer.infer(args)


def _run_model(args: argparse.Namespace) -> int:
    from shmserve.clients import commands_run

    return commands_run.run(args)


def _stats(args: argparse.Namespace) -> int:
    from shmserve.clients import commands_status

    return commands_status.stats(args)


def _ready(args: argparse.Namespace) -> int:
    from shmserve.clients import commands_status

    return commands_status.ready(args)


def _config(args: argparse.Namespace) -> int:
    from shmserve.clients import commands_status

    return commands_status.config(args)


def _version(args: argparse.Namespace) -> int:
    from shmserve.clients import commands_status

    return commands_status.version(args)


def _demo(args: argparse.Namespace) -> int:
    from shmserve.clients.demo import demo

    return demo(args)


# ------------------------------------------------------------------------------------------ how it ends


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["serve"]:
        return _serve(words[1:])
    understood = parser()
    args = understood.parse_args(words)
    if args.show_version:
        args = understood.parse_args(["version"])
    if args.command is None:
        understood.print_help(sys.stderr)
        return 2
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except Misuse as error:
        return _end(args, str(error), 2)
    except (Failed, ServeError) as error:
        return _end(args, _with_next_step(error, args), 1)
    except BrokenPipeError:  # who reads our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return _end(args, "interrupted", 130)


def _end(args: argparse.Namespace, text: str, code: int) -> int:
    print(f"shmserve {args.command}: {' '.join(text.split())}", file=sys.stderr)
    return code


def _with_next_step(error: Exception, args: argparse.Namespace) -> str:
    text = str(error).replace(" by url=", " by --url or --runtime-dir").replace(" by runtime_dir=", " by --runtime-dir")
    if text.startswith("Request for unknown model"):
        return f"{text}; `shmserve models` lists what is served"
    if isinstance(error, DeadlineExceeded) and getattr(args, "timeout", None) is not None:
        return f"{text}; --timeout gives it more"
    return text


if __name__ == "__main__":
    sys.exit(main())
