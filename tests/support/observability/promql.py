"""The names in a PromQL expression. promtool and Prometheus check the syntax."""

from __future__ import annotations

import re

_TEXT = re.compile(r'"[^"]*"')
_LABELS = re.compile(r"\{([^{}]*)\}")
_GROUPED = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^()]*)\)")
_NAME = re.compile(r"(?<![\w.$])[a-zA-Z_:][\w:]*(?!\s*\(|[\w:])")
_WORDS = {"and", "or", "unless", "bool", "offset", "sum", "count", "min", "max", "avg"}


def metrics_in(expression: str) -> set[str]:
    """All names that are not functions, labels or operators."""
    rest = _GROUPED.sub(" ", _LABELS.sub(" ", _TEXT.sub(" ", expression)))
    return set(_NAME.findall(rest)) - _WORDS


def labels_in(expression: str) -> set[str]:
    plain = _TEXT.sub(" ", expression)
    selected = {name for found in _LABELS.findall(plain) for name in re.findall(r"(\w+)\s*(?:=|!)", found)}
    grouped = {name for found in _GROUPED.findall(plain) for name in re.findall(r"\w+", found)}
    return selected | grouped
