"""Ctrl-C while a process starts, and while it starts others."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

_INTERRUPT = (signal.SIGINT,)


def end_process() -> None:
    """From here on, Ctrl-C ends the process by the signal's default action. For imports, in which Python would print a
    traceback, or lose the signal in a callback of the import system."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as in a script's background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPT)


def raise_exception() -> None:
    """Ends `end_process`: Ctrl-C is KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def block_until_exec() -> None:
    """Keeps Ctrl-C for the program that replaces this one, which begins with `end_process`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPT)


@contextmanager
def blocked_in_children() -> Iterator[None]:
    """Processes that are started within this block never receive Ctrl-C, not even while they import their modules. This
    process receives it at the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
