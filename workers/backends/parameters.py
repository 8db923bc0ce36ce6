"""Typed access to the parameters of a configuration.

Invariant: an invalid value raises an error with the parameter, its value and the values that are allowed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from shmserve.errors import InvalidRequest
from shmserve.repo.parameters import NO, YES

if TYPE_CHECKING:
    from shmserve.repo.config.schema import ModelConfig


class Parameters:
    """The parameters of one model, for a backend."""

    def __init__(self, config: ModelConfig, defaults: Mapping[str, str] | None = None) -> None:
        """`defaults`: values of parameters that the model does not set."""
        self._model = config.name
        self._values = {**(defaults or {}), **{key: value.string_value for key, value in config.parameters.items()}}

    def text(self, key: str, default: str = "") -> str:
        return self._values.get(key, "") or default

    def flag(self, key: str, default: bool) -> bool:
        text = self.text(key).lower()
        if not text:
            return default
        if text in YES or text in NO:
            return text in YES
        raise self.wrong(key, "true or false")

    def whole(self, key: str, default: int) -> int:
        """Returns an integer of at least 0."""
        text = self.text(key)
        if not text:
            return default
        if not (text.isascii() and text.isdecimal() and len(text) < 10):
            raise self.wrong(key, "an integer of at least 0")
        return int(text)

    def number(self, key: str, default: float) -> float:
        """Returns a finite number."""
        text = self.text(key)
        try:
            found = float(text) if text else default
        except ValueError:
            raise self.wrong(key, "a number") from None
        if not math.isfinite(found):
            raise self.wrong(key, "a number")
        return found

    def wrong(self, key: str, expected: str) -> InvalidRequest:
        return InvalidRequest(f"parameter {key} of model '{self._model}' must be {expected}, not '{self.text(key)}'")
