"""The query `traffic` and the operation `set_traffic`: shares of versions, and aliases.

Invariant: a change is applied completely or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from shmserve.broker.observability.logs import log_record
from shmserve.core.events import SetTraffic
from shmserve.core.models.model import Model
from shmserve.core.state import State
from shmserve.core.traffic import Traffic
from shmserve.errors import InvalidRequest, NotFound

ENTRIES = 64
"""Limit of the shares and of the aliases of a model."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_VERSION = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]


class TrafficBody(Struct, forbid_unknown_fields=True):
    """`shares` replace all shares; None: they stay. `aliases` are added to the others; None as version removes one."""

    shares: dict[_VERSION, Annotated[int, Meta(ge=0, le=100)]] | None = None
    aliases: dict[str, _VERSION | None] = {}


class TrafficControl:
    """`put` passes an event to the core."""

    def __init__(self, state: State, put: Callable[[SetTraffic], None]) -> None:
        self._state = state
        self._put = put

    def document(self, name: str) -> dict[str, Any]:
        model = self._find(name)
        return _document(model, model.traffic)

    def change(self, name: str, body: bytes) -> dict[str, Any]:
        model = self._find(name)
        try:
            change = msgspec.json.decode(body or b"{}", type=TrafficBody, strict=False)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"the traffic of model '{name}' cannot be set: {error}") from None
        shares = model.traffic.shares if change.shares is None else change.shares
        merged = model.traffic.aliases | change.aliases
        aliases = {alias: number for alias, number in merged.items() if number is not None}
        _check(model, shares, change.aliases, aliases)
        traffic = Traffic(shares, aliases)
        if traffic != model.traffic:
            log_record("info", f"traffic of model '{name}': {_text(traffic)}", {"model": name})
            self._put(SetTraffic(name, traffic))
        return _document(model, traffic)

    def _find(self, name: str) -> Model:
        model = self._state.models.get(name)
        if model is None or not model.versions:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        return model


def _check(model: Model, shares: Mapping[int, int], changed: Mapping[str, Any], aliases: Mapping[str, int]) -> None:
    total = sum(shares.values())
    if total > 100:
        raise InvalidRequest(f"the shares of model '{model.name}' are {total} % together, expected at most 100 %")
    if len(shares) > ENTRIES or len(aliases) > ENTRIES:
        raise InvalidRequest(f"{max(len(shares), len(aliases))} shares or aliases, expected at most {ENTRIES} of each")
    for alias in changed:
        if not _NAME.fullmatch(alias):
            text = "expected up to 64 letters, digits, '_', '-' and '.', not beginning with '-' or '.'"
            raise InvalidRequest(f"alias {alias[:80]!r}: {text}")


def _document(model: Model, traffic: Traffic) -> dict[str, Any]:
    """`now`: the percentage of each version that is READY; what is left is for none."""
    weights = traffic.weights([number for number in model.versions if model.is_ready(number)])
    total = sum(weight for _, weight in weights)
    return {
        "model": model.name,
        "shares": {str(number): percent for number, percent in sorted(traffic.shares.items())},
        "aliases": dict(sorted(traffic.aliases.items())),
        "now": {str(number): round(100 * weight / total, 1) for number, weight in weights},
    }


def _text(traffic: Traffic) -> str:
    parts = [f"{percent} % to version {number}" for number, percent in sorted(traffic.shares.items())]
    parts += [f"'{alias}' is version {number}" for alias, number in sorted(traffic.aliases.items())]
    return ", ".join(parts) or "all to the highest version"
