"""What is wrong with a configuration: each thing with its place, and all of them in one error.

The rule of the file: a text names the file inside its repository, never the path of the repository on this machine.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import NamedTuple

from shmserve.errors import InvalidRequest
from shmserve.repo.config.outline import shown

CONFIG_BYTES = 1024 * 1024
"""The largest config.pbtxt."""
LIMIT = 50
"""Problems listed for one file; the rest is counted."""

_LONGEST_NAME = 100
_LONGEST_PATH = 200
_LONGEST_TEXT = 1000

Place = tuple[int, int]
"""Line and column, from 1; (0, 0) where there is none."""


class Problem(NamedTuple):
    """One thing that is wrong, or worth a warning. `path` is the field, as in `input[0].dims`."""

    file: str
    line: int
    column: int
    path: str
    text: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return ": ".join(part for part in (where, self.path, self.text) if part)


class ConfigError(InvalidRequest):
    """A configuration that cannot be served. `problems` are all that were found."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class Report:
    """Collects the problems and warnings of one file. `places` maps a field path to where it stands."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.places: dict[str, Place] = {}
        self.repeated: dict[str, int] = {}
        """Entries of maps that stand in the file again, and the line of the first."""
        self.warnings: list[Problem] = []
        self._problems: list[Problem] = []
        self._more = 0

    @property
    def full(self) -> bool:
        """True when more problems are only counted."""
        return len(self._problems) >= LIMIT

    @property
    def problems(self) -> tuple[Problem, ...]:
        """In the order of the file; those without a place come first."""
        found = sorted(self._problems, key=lambda problem: (problem.line, problem.column))
        if not self._more:
            return tuple(found)
        return (*found, Problem(self.file, 0, 0, "", f"and {self._more} more problems"))

    def problem(self, path: str, text: str, place: Place | None = None) -> None:
        if self.full:
            self._more += 1
        else:
            self._problems.append(self._at(path, text, place))

    def warn(self, path: str, text: str, place: Place | None = None) -> None:
        if len(self.warnings) < LIMIT:
            self.warnings.append(self._at(path, text, place))

    def _at(self, path: str, text: str, place: Place | None) -> Problem:
        line, column = place or self.place(path)
        return Problem(self.file, line, column, shown(path, _LONGEST_PATH), shown(text, _LONGEST_TEXT))

    def place(self, path: str) -> Place:
        """Where the field stands, or the nearest message around it that the file has."""
        while path:
            found = self.places.get(path)
            if found:
                return found
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return (0, 0)

    def raise_problems(self) -> None:
        if self._problems:
            raise ConfigError(self.problems)


def nearest(found: str, valid: Iterable[str]) -> str | None:
    """The valid name that was probably meant, if one is near."""
    if len(found) > _LONGEST_NAME:
        return None
    by_lower = {name.lower(): name for name in valid}
    lower = found.lower()
    for candidate, name in by_lower.items():
        if candidate == lower or candidate.endswith("_" + lower):
            return name
    close = difflib.get_close_matches(lower, by_lower, n=1, cutoff=0.6)
    return by_lower[close[0]] if close else None


def meant(found: str, valid: Iterable[str]) -> str:
    """The end of a message about a name that does not exist: the nearest one, or all there are."""
    names = list(valid)
    near = nearest(found, names)
    if near:
        return f'did you mean "{near}"?'
    return f"expected one of {', '.join(names)}" if names else "nothing is expected here"


def decode_text(data: str | bytes, report: Report) -> str | None:
    """The text within its limits, or None and a problem in the report."""
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
