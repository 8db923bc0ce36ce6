"""Problems of a configuration, each with its position, collected into one error.

Invariant: texts name files relative to the repository, never by their path on this machine.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from shmserve.errors import InvalidRequest
from shmserve.repo.config.outline import escaped

CONFIG_BYTES = 1024 * 1024
"""Maximum size of a config.pbtxt."""
LIMIT = 50
"""Maximum number of problems listed per file; the others are only counted."""

_MAX_NAME_LENGTH = 100
_MAX_PATH_LENGTH = 200
_MAX_TEXT_LENGTH = 1000

Place = tuple[int, int]
"""Line and column, starting at 1; (0, 0) if unknown."""
ProblemFunction = Callable[[str, str], None]
"""Called with a field path and the problem's text."""


class Problem(NamedTuple):
    """One problem or warning. `path` is the field, as in `input[0].dims`."""

    file: str
    line: int
    column: int
    path: str
    text: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return ": ".join(part for part in (where, self.path, self.text) if part)


class ConfigError(InvalidRequest):
    """An invalid configuration. `problems` has all that were found."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class Report:
    """Collects the problems and warnings of one file. `places` maps field paths to positions."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.places: dict[str, Place] = {}
        self.repeated: dict[str, int] = {}
        """Duplicate map entries -> the line of the first occurrence."""
        self.warnings: list[Problem] = []
        self._problems: list[Problem] = []
        self._more = 0

    @property
    def full(self) -> bool:
        """Whether further problems are only counted."""
        return len(self._problems) >= LIMIT

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Sorted by position; those without a position come first."""
        problems = sorted(self._problems, key=lambda problem: (problem.line, problem.column))
        if not self._more:
            return tuple(problems)
        return (*problems, Problem(self.file, 0, 0, "", f"and {self._more} more problems"))

    def problem(self, path: str, text: str, place: Place | None = None) -> None:
        if self.full:
            self._more += 1
        else:
            self._problems.append(self._at(path, text, place))

    def warn(self, path: str, text: str) -> None:
        if len(self.warnings) < LIMIT:
            self.warnings.append(self._at(path, text))

    def _at(self, path: str, text: str, place: Place | None = None) -> Problem:
        line, column = place or place_of(path, self.places)
        return Problem(self.file, line, column, escaped(path, _MAX_PATH_LENGTH), escaped(text, _MAX_TEXT_LENGTH))

    def raise_problems(self) -> None:
        if self._problems:
            raise ConfigError(self.problems)


def place_of(path: str, places: Mapping[str, Place]) -> Place:
    """The position of the field, or of the nearest enclosing message in the file."""
    while path:
        place = places.get(path)
        if place:
            return place
        path = path[: max(path.rfind("."), path.rfind("["), 0)]
    return (0, 0)


def nearest(value: str, valid: Iterable[str]) -> str | None:
    """The closest valid name, or None."""
    if len(value) > _MAX_NAME_LENGTH:
        return None
    by_lower = {name.lower(): name for name in valid}
    lower = value.lower()
    for candidate, name in by_lower.items():
        if candidate == lower or candidate.endswith("_" + lower):
            return name
    close = difflib.get_close_matches(lower, by_lower, n=1, cutoff=0.6)
    return by_lower[close[0]] if close else None


def meant(value: str, valid: Iterable[str]) -> str:
    """The end of an error text about an unknown name: the closest name, or all valid ones."""
    names = list(valid)
    near = nearest(value, names)
    if near:
        return f'did you mean "{near}"?'
    return f"expected one of {', '.join(names)}" if names else "nothing is expected here"


def decode_text(data: str | bytes, report: Report) -> str | None:
    """The decoded text, or None with a problem in the report."""
    if len(data) > CONFIG_BYTES:
        report.problem("", f"{len(data)} bytes, expected at most {CONFIG_BYTES}")
        return None
    try:
        if isinstance(data, str):
            data.encode()
            return data
        return data.decode("utf-8-sig")
    except UnicodeError as error:
        position = error.start if isinstance(error, (UnicodeDecodeError, UnicodeEncodeError)) else 0
        before = data[:position]
        line = 1 + (before.count("\n") if isinstance(before, str) else before.count(b"\n"))
        report.problem("", "not UTF-8 text", (line, 1))
        return None
