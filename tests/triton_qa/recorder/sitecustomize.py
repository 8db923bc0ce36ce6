"""Loaded by every Python that a suite's script starts: appends the outcome of each unit test to a file, as JSON lines.

It runs in the tests' environment, and in the server's workers for unit tests inside of models. It only imports the
standard library.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import unittest
from typing import Any

RESULTS = os.environ.get("TRITON_QA_RESULTS", "")
STARTS = os.environ.get("TRITON_QA_STARTS", "")
MORE = os.environ.get("TRITON_QA_MORE", "")
"""The server's packages: scripts create models with PyTorch, which the environment of the tests lacks."""
TEXT = 400
MODEL_FILE = "model.py"
"""File of unit tests without a script: inside of a model."""
NOBODY = str(2**22)
"""A pid that no process has. Tests signal SERVER_PID, which is 0 if the server has not started, and would be their own
group."""


def _starts() -> int:
    try:
        with open(STARTS) as lines:
            return sum(1 for _ in lines)
    except OSError:
        return 0


def _reason(error: Any) -> str:
    """The reason with the line in the test's own file, because many tests turn every error into "False is not true"."""
    kind, value, trace = error
    causes = [trace, value.__context__.__traceback__ if value.__context__ else None]
    own = os.path.basename(sys.argv[0])
    found = [[at.lineno for at in traceback.extract_tb(one) if at.filename.endswith(own)] for one in causes]
    lines = ", ".join(str(numbers[-1]) for numbers in found if numbers)
    return f"{kind.__name__}: {value} (line {lines})"


def note(file: str, test: str, outcome: str, reason: str, seconds: float) -> None:
    line = {"file": file, "test": test, "server": _starts(), "outcome": outcome}
    with open(RESULTS, "a") as results:
        results.write(json.dumps({**line, "reason": reason[:TEXT], "seconds": round(seconds, 1)}) + "\n")


class Recording(unittest.TextTestResult):
    """A test counts once: as failed when any of its subtests fails."""

    _failed: str | None = None
    _skipped: str | None = None
    _started = 0.0

    def startTest(self, test: unittest.TestCase) -> None:
        self._failed = self._skipped = None
        self._started = time.monotonic()
        self._note(test, "started", "")
        super().startTest(test)

    def addError(self, test: Any, err: Any) -> None:
        self._failed = _reason(err)
        super().addError(test, err)
        if not isinstance(test, unittest.TestCase):
            self._note(test, "failed", self._failed)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._failed = _reason(err)
        super().addFailure(test, err)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        if err is not None:
            self._failed = _reason(err)
        super().addSubTest(test, subtest, err)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._skipped = reason
        super().addSkip(test, reason)

    def stopTest(self, test: unittest.TestCase) -> None:
        outcome = "failed" if self._failed is not None else "skipped" if self._skipped is not None else "passed"
        self._note(test, outcome, self._failed or self._skipped or "")
        super().stopTest(test)

    def _note(self, test: Any, outcome: str, reason: str) -> None:
        name = ".".join(str(test.id()).split(".")[-2:])
        note(os.path.basename(sys.argv[0]) or MODEL_FILE, name, outcome, reason, time.monotonic() - self._started)


if os.environ.get("SERVER_PID") == "0":
    os.environ["SERVER_PID"] = NOBODY
if MORE:
    sys.path.append(MORE)
if RESULTS:
    unittest.TextTestRunner.resultclass = Recording  # type: ignore[assignment]
