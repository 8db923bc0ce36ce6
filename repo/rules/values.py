"""Checks of values of parameters and of --backend-config, which are texts.

Invariant: an invalid value raises an error with its name, its value and the values that are allowed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from shmserve.errors import InvalidRequest
from shmserve.repo.parameters import NO, YES

LARGEST = 999_999_999


def flag_in(what: str, text: str) -> bool:
    word = text.strip().lower()
    if word not in YES | NO:
        raise InvalidRequest(f"{what} must be true or false, not '{text}'")
    return word in YES


def whole_in(what: str, text: str, maximum: int = LARGEST, minimum: int = 0) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdecimal()):
        raise InvalidRequest(f"{what} must be an integer of at least {minimum}, not '{text}'")
    number = int(digits) if len(digits) < 30 else maximum + 1
    if not minimum <= number <= maximum:
        raise InvalidRequest(f"{what} is {text}; it can be {minimum} to {maximum}")
    return number


Check = Callable[[str, str], str]
"""(name for errors, value) -> the value in the engine's form."""


def whole(maximum: int, minimum: int = 0) -> Check:
    return lambda what, value: str(whole_in(what, value, maximum, minimum))


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
