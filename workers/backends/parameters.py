"""The parameters of a model, which are texts.

Invariant: an invalid value raises an error with its name, its value and the values that are allowed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from shmserve.errors import InvalidRequest
from shmserve.repo.rules.values import flag_in, whole_in

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
        text = self.text(key)
        return flag_in(self._what(key), text) if text else default

    def whole(self, key: str, default: int) -> int:
        """Returns an integer of at least 0."""
        text = self.text(key)
        return whole_in(self._what(key), text) if text else default

    def number(self, key: str, default: float) -> float:
        """Returns a finite number."""
        text = self.text(key)
        try:
            value = float(text) if text else default
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise self.wrong(key, "a number")
        return value

    def wrong(self, key: str, expected: str) -> InvalidRequest:
        return InvalidRequest(f"{self._what(key)} must be {expected}, not '{self.text(key)}'")

    def _what(self, key: str) -> str:
        return f"parameter {key} of model '{self._model}'"
