"""Handling of Ctrl-C while a process starts, and while it starts other processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

_INTERRUPT = (signal.SIGINT,)


def end_process() -> None:
    """Makes Ctrl-C end the process by the signal's default action. Use it during imports, in which Python prints a
    traceback, or loses the signal in a callback of the import system."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if ignored, as for a script's background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPT)


def raise_exception() -> None:
    """Reverts `end_process`: Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def block_until_exec() -> None:
    """Defers Ctrl-C to the program that replaces this one, which must start with `end_process`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPT)


@contextmanager
def blocked_in_children() -> Iterator[None]:
    """Blocks Ctrl-C in processes that are started within this block, even while they import their modules. This process
    receives it at the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
