"""Checks of parameter values: each check returns the value in the engine's form or raises.

Invariant: an error names the parameter, its value, and the allowed values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from shmserve.errors import InvalidRequest
from shmserve.repo.parameters import NO, YES

Check = Callable[[str, str], str]
"""(name for errors, value) -> the value in the engine's form."""


def whole(most: int, least: int = 0) -> Check:
    def check(what: str, value: str) -> str:
        digits = value.strip()
        if not (digits.isascii() and digits.isdecimal()):
            raise InvalidRequest(f"{what} must be an integer of at least {least}, found '{value}'")
        number = int(digits) if len(digits) < 30 else most + 1
        if not least <= number <= most:
            raise InvalidRequest(f"{what} is {value}; it can be {least} to {most}")
        return str(number)

    return check


def flag(what: str, value: str) -> str:
    word = value.strip().lower()
    if word in YES:
        return "1"
    if word in NO:
        return "0"
    raise InvalidRequest(f"{what} must be 0 or 1, not '{value}'")


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
