"""Processes of a measurement. Each is a new interpreter that receives orders as lines of JSON.

    child = Child("bench.lib.bare_engine:engine", model=path, batch=32)   # returns when its set-up is done
    child.ask(seconds=1.0)                                       # -> what its handler returned

Invariant: a child is idle between orders, so that parties can take turns on the same cores, and it exits at the end of
its standard input.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

Answer = dict[str, Any]
Handler = Callable[..., Answer]


class ChildFailed(RuntimeError):
    """The child exited or raised instead of answering; its output is on standard error."""


class Child:
    """`python`: the interpreter of the child."""

    def __init__(self, target: str, python: str = sys.executable, /, **setup: Any) -> None:
        self._target = target
        self._process = subprocess.Popen(
            [python, "-m", "bench.lib.child", target, json.dumps(setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.pid = self._process.pid
        from bench.lib import processes  # here, because a child may run in a Python without the server's packages

        processes.seen(self.pid)
        self._waiting = True

    def ready(self) -> Answer:
        """Waits for the set-up. `ask` calls it if necessary; call it separately to set up several children
        concurrently.
        """
        return self.answer() if self._waiting else {}

    def tell(self, **order: Any) -> None:
        self.ready()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._waiting = True

    def answer(self) -> Answer:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self._waiting = False
        if not line:
            raise ChildFailed(f"{self._target} ended with {self._process.wait()} instead of an answer")
        answer: Answer = json.loads(line)
        return answer

    def ask(self, **order: Any) -> Answer:
        self.tell(**order)
        return self.answer()

    def fileno(self) -> int:
        """Readable when an answer is available or the child has exited."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def dump_stacks(self) -> None:
        """Makes the child dump the stacks of its threads to standard error."""
        os.kill(self.pid, signal.SIGUSR1)

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Team:
    """Several children that run the same order concurrently."""

    def __init__(self, children: list[Child]) -> None:
        self.children = children
        for child in children:
            child.ready()

    def ask(self, **order: Any) -> list[Answer]:
        for child in self.children:
            child.tell(**order)
        return [child.answer() for child in self.children]

    def close(self) -> None:
        for child in self.children:
            child.close()

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main() -> int:
    # Redirect output of models and libraries, which must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    faulthandler.register(signal.SIGUSR1)
    module, _, name = sys.argv[1].partition(":")
    handler: Handler = getattr(importlib.import_module(module), name)(**json.loads(sys.argv[2]))
    answers.write("{}\n")
    for line in sys.stdin:
        answers.write(json.dumps(handler(**json.loads(line))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
