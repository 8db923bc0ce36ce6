"""The entry point of the command `shmserve`.

Exit codes: 0 success, 1 failure, 2 usage error, 130 interrupted. Invariant: only what `--help` needs is imported here.
Arguments are defined in parser.py, commands are implemented in commands/. A link with the name `tritonserver` to this
program is `shmserve tritonserver`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from shmserve.clients.cli.commands import completion
from shmserve.clients.cli.commands.base import complain, next_step
from shmserve.clients.cli.commands.run import serve
from shmserve.clients.cli.parser import parser
from shmserve.errors import ServeError
from shmserve.extras import missing_text
from shmserve.terminal import streams
from shmserve.terminal.errors import Failed, Misuse

TRITON = "tritonserver"


def main(argv: Sequence[str] | None = None) -> int:
    streams.prepare()
    words = _words(sys.argv) if argv is None else list(argv)
    if completion.wanted():
        completion.complete(parser())
    if words[:1] == ["serve"]:
        return serve(words[1:])
    if words[:1] == [TRITON]:
        return serve(["--triton-compatible", *words[1:]])
    command = next((word for word in words if not word.startswith("-")), "")
    with streams.errors_in_one_line(f"shmserve {command}".rstrip()):
        return _run(words)


def _words(argv: Sequence[str]) -> list[str]:
    return [TRITON, *argv[1:]] if os.path.basename(argv[0]) == TRITON else list(argv[1:])


def _run(words: Sequence[str]) -> int:
    commands = parser()
    args = commands.parse_args(words)
    if args.show_version:
        args = commands.parse_args(["version"])
    if args.command is None:
        commands.print_help(sys.stderr)
        return 2
    try:
        code: int = args.run(args)
        return code
    except Misuse as error:
        return _end(args, str(error), 2)
    except (Failed, ServeError) as error:
        return _end(args, next_step(error, args), 1)
    except ModuleNotFoundError as error:
        if (text := missing_text(error.name, args.command)) is None:
            raise
        return _end(args, text, 1)
    except KeyboardInterrupt:
        return _end(args, "interrupted", 130)


def _end(args: argparse.Namespace, text: str, code: int) -> int:
    complain(args, text)
    return code


if __name__ == "__main__":
    sys.exit(main())
