"""The command `shmserve`: how it begins and how it ends.

Exit codes: 0 done, 1 failed, 2 used wrongly, 130 interrupted. The rule of the file: nothing is imported that `--help`
does not need; what is understood is in parser.py, and what a command does in commands_*.py and demo.py.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from shmserve.clients.cli.commands import completion
from shmserve.clients.cli.commands.base import next_step
from shmserve.clients.cli.parser import parser
from shmserve.errors import ServeError
from shmserve.paths import python
from shmserve.terminal.errors import Failed, Misuse

__all__ = ["main", "parser"]


def _serve(options: Sequence[str]) -> int:
    """This process becomes the broker."""
    os.execv(sys.executable, [*python(), "-m", "shmserve.broker.main", *options])


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    if completion.wanted():
        completion.complete(parser())
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
        return _end(args, next_step(error, args), 1)
    except BrokenPipeError:  # who reads our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return _end(args, "interrupted", 130)


def _end(args: argparse.Namespace, text: str, code: int) -> int:
    print(f"shmserve {args.command}: {' '.join(text.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
