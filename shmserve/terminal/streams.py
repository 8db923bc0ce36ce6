"""Handles standard streams of a command that are closed, cannot be written, or cannot encode a text."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def prepare() -> None:
    """Opens /dev/null for each standard stream that is closed (`>&-`). Otherwise the next file or socket would get its
    number, and the output of child processes. Escapes characters that the encoding of the terminal lacks."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


@contextmanager
def errors_in_one_line(command: str) -> Iterator[None]:
    """On an OSError, such as a full disk, prints one line and exits with code 1. Prints nothing if the reader of a pipe
    has closed it, as `head` does. Flushes standard output at the end of the block."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            print(f"{command}: {_of_command(error)}", file=sys.stderr)
        _flush_or_discard()
        raise SystemExit(1) from None


def error_text(error: OSError) -> str:
    """The text of the error without its number, prefixed with its file name, if any."""
    text = error.strerror or str(error)
    return text if error.filename is None else f"{os.fsdecode(error.filename)}: {text}"


def _of_command(error: OSError) -> str:
    if error.filename is None and error.errno in _FULL:
        return f"cannot write standard output: {error_text(error)}"
    if error.filename is None and error.errno == errno.ENOENT:  # getcwd
        return "the current directory has been deleted; change to another"
    return error_text(error)


def _flush_or_discard() -> None:
    """Flushes standard output, or discards text that it does not accept, which the interpreter would write at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
