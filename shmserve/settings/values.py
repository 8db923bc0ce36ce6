"""Readers of the values that flags have, by kind. A reader raises ValueError with a text for users."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shmserve.settings.flag import UNITS, Flag, nearest_name

SECONDS = 1e6
"""Upper bound of a time in seconds."""
_BOOLEANS = dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(("false", "0", "no", "off"), False)

Reader = Callable[[Flag, str], Any]


def boolean(text: str) -> bool:
    value = _BOOLEANS.get(text.lower())
    if value is None:
        raise ValueError(f"'{text}' is neither true nor false")
    return value


def number(text: str, is_bytes: bool, minimum: int | None, maximum: int = 2**63 - 1) -> int:
    match = re.fullmatch(r"(-?[0-9]{1,19})\s*([a-zA-Z]*)", text.strip())
    unit = UNITS.get(match[2].upper()) if match and (is_bytes or not match[2]) else None
    if match is None or unit is None:
        more = ", optionally with the suffix KiB, MiB or GiB" if is_bytes else ""
        raise ValueError(f"'{text}' is not a whole number{more}")
    value = int(match[1]) * unit
    if minimum is not None and value < minimum:
        raise ValueError(f"{text} is too small; the minimum is {minimum}")
    if value > maximum:
        raise ValueError(f"{text} is too large; the maximum is {maximum}")
    return value


def fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise ValueError(f"'{text}' is not a fraction above 0 and up to 1")
    return value


def _integer(flag: Flag, text: str) -> int:
    return number(text, flag.kind == "bytes", None if flag.private else flag.minimum, flag.maximum)


def _seconds(_: Flag, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < SECONDS:
        raise ValueError(f"'{text}' is not a number of seconds, from 0 to {SECONDS:g}")
    return value


def _choice(flag: Flag, text: str) -> str:
    """Ignores case, as Triton does."""
    choices = {choice.lower(): choice for choice in flag.choices}
    if text.lower() in choices:
        return choices[text.lower()]
    close = nearest_name(text.lower(), choices)
    more = f"; did you mean {choices[close]}?" if close else ""
    raise ValueError(f"'{text}' is not one of {', '.join(flag.choices)}{more}")


def text_value(flag: Flag, text: str) -> str:
    if not text and flag.default != "":
        raise ValueError(f"expected a {flag.metavar or 'value'}, found nothing")
    return text


COMMON: Mapping[str, Reader] = {
    "boolean": lambda _, text: boolean(text),
    "integer": _integer,
    "bytes": _integer,
    "seconds": _seconds,
    "choice": _choice,
    "text": text_value,
    "path": lambda flag, text: Path(text_value(flag, text)),
}
"""The readers of kinds that every process knows."""
