"""Checks of parameter values: each check returns the value in the engine's form or raises.

Invariant: an error names the parameter, its value, and the allowed values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from shmserve.errors import InvalidRequest
from shmserve.workers.backends.parameters import flag_in, whole_in

Check = Callable[[str, str], str]
"""(name for errors, value) -> the value in the engine's form."""


def whole(most: int, least: int = 0) -> Check:
    return lambda what, value: str(whole_in(what, value, most, least))


def flag(what: str, value: str) -> str:
    return "1" if flag_in(what, value) else "0"


def choice(options: Mapping[str, str]) -> Check:
    """Accepts the numbers used in configurations, or the engine's names."""

    def check(what: str, value: str) -> str:
        word = value.strip()
        if word in options:
            return options[word]
        for name in options.values():
            if name.lower() == word.lower():
                return name
        allowed = ", ".join(key if key == name else f"{key} ({name})" for key, name in options.items())
        raise InvalidRequest(f"{what} must be one of {allowed}, not '{value}'")

    return check


def text_of(pattern: str, meaning: str) -> Check:
    compiled = re.compile(pattern)

    def check(what: str, value: str) -> str:
        word = value.replace(" ", "")
        if not compiled.fullmatch(word):
            raise InvalidRequest(f"{what} must be {meaning}, not '{value}'")
        return word

    return check


def as_it_is(what: str, value: str) -> str:
    return value
