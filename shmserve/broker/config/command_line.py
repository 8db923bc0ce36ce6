"""The argument parser of `shmserve serve`. `--help` shows the flags that most users need on one screen, `--help-all`
all flags in groups.
"""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from shmserve.broker.config.values import READERS
from shmserve.settings.parser import add_flags
from shmserve.settings.table import BY_NAME, GROUPS
from shmserve.terminal.help_text import rows

USAGE = "shmserve serve [FILE ...] [--model-repository DIR] [FLAG ...]"
SHORT = {
    "model-repository": "one subdirectory per model; repeatable",
    "model-control-mode": "none (load all), poll (follow changes), explicit",
    "load-model": "load at start, in mode explicit; repeatable",
    "http-port": "port for HTTP (default: 8000)",
    "grpc-port": "port for gRPC (default: 8001)",
    "http-address": "listen on this address (default: 127.0.0.1)",
    "exit-on-error": "exit if a model fails to load at start",
    "log-file": "append the log to this file",
    "log-verbose": "1: more detail; 2: also each batch",
    "config": "read flags from this TOML file",
}
"""The flags that `--help` shows, with their help texts."""
_EPILOG = """
A FILE is served as a model with the name of the file; NAME=FILE gives it another name.

Each flag is also an environment variable, SHMSERVE_MODEL_REPOSITORY=DIR1:DIR2, and a key of the --config file,
model-repository = ["DIR1", "DIR2"]. Precedence: flags, environment, configuration file. If a flag is repeated, the
last value counts, unless it may be given several times. BOOL is true or false; the flag without a value is true.

examples:
  shmserve serve resnet.onnx
      serve the model of one file until Ctrl-C
  shmserve serve app.py
      serve the functions of the file that have the decorator @shmserve.model
  shmserve serve --model-repository ./models
      serve all models of ./models until Ctrl-C; try `shmserve models` and `shmserve infer MODEL --random`
  shmserve serve --model-repository ./models --model-control-mode poll
      also follow changes in the repository
  shmserve serve --model-repository ./models --model-control-mode explicit --load-model mlp
      start with one model; `shmserve load` and `shmserve unload` change the set
  shmserve serve --model-repository ./models --host-policy cpu,cpu-cores=2-7 --exit-on-error true
      keep models off cores 0 and 1, and exit if a model fails to load
  shmserve serve --config ./shmserve.toml --log-verbose 1
      read the settings from a file, and raise the log level
"""

BRIEF = """
examples:
  shmserve serve resnet.onnx app.py
  shmserve serve --model-repository ./models --model-control-mode poll

A flag is also a variable, SHMSERVE_HTTP_PORT, and a key of the --config file.
`shmserve serve --help-all` has all flags, in groups, with their defaults
"""


class FlagParser(argparse.ArgumentParser):
    def format_help(self) -> str:
        pairs = [("FILE", "a model: .onnx, .py, .pt, .xml; NAME=FILE names it")]
        pairs += [(f"--{name} {BY_NAME[name].metavar}".rstrip(), text) for name, text in SHORT.items()]
        return "\n".join([f"usage: {USAGE}\n\n{self.description}\n", *rows(pairs), BRIEF])

    def format_all(self) -> str:
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(2, f"shmserve serve: {message}\n`shmserve serve --help` explains the flags\n")


def parser() -> FlagParser:
    """A parser whose namespace contains only the flags that were given, without defaults."""
    flag_parser = FlagParser(
        prog="shmserve serve",
        usage=USAGE,
        description="Serve model files and repositories over HTTP, gRPC and to local clients.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    flag_parser.add_argument("--help-all", action="store_true", help="show all flags, in groups")
    add_flags(flag_parser, GROUPS, READERS, with_defaults=False)
    return flag_parser
