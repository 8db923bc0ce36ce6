"""The query `traffic` and the operation `set_traffic`: shares of versions, and aliases.

Invariant: a change is applied completely or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from shmserve.broker.observability.logs import log_record
from shmserve.core.events import SetTraffic
from shmserve.core.owners.model import Model
from shmserve.core.state import State
from shmserve.core.traffic import Traffic
from shmserve.errors import InvalidRequest, NotFound
from shmserve.protocol.bodies import decode_body
from shmserve.repo.parameters import ALIAS, ENTRIES
from shmserve.repo.rules.parameter_rules import why_no_shadow

_VERSION = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]


class TrafficBody(Struct, forbid_unknown_fields=True):
    """`shares` replaces all shares, and `shadow` the shadow; None keeps them. `aliases` adds or changes aliases; None
    as the version removes one."""

    shares: dict[_VERSION, Annotated[int, Meta(ge=0, le=100)]] | None = None
    aliases: dict[str, _VERSION | None] = {}
    shadow: dict[_VERSION, Annotated[int, Meta(ge=1, le=100)]] | None = None


class TrafficControl:
    """`put` passes an event to the core."""

    def __init__(self, state: State, put: Callable[[SetTraffic], None]) -> None:
        self._state = state
        self._put = put

    def document(self, name: str) -> dict[str, Any]:
        model = self._find(name)
        return traffic_document(model, model.traffic)

    def change(self, name: str, body: bytes) -> dict[str, Any]:
        model = self._find(name)
        change: TrafficBody = decode_body(body, TrafficBody, "'set_traffic'")
        traffic = model.traffic.changed(change.shares, change.aliases, change.shadow)
        _check(model, traffic, change.aliases)
        if traffic != model.traffic:
            log_record("info", f"traffic of model '{name}': {traffic.text}", {"model": name})
        # Send the change rather than the result, as other changes may be queued for the core's next turn.
        self._put(SetTraffic(name, change.shares, change.aliases, change.shadow))
        return traffic_document(model, traffic)

    def _find(self, name: str) -> Model:
        model = self._state.models.get(name)
        if model is None or not model.versions:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        return model


def _check(model: Model, traffic: Traffic, changed: Mapping[str, Any]) -> None:
    total, entries = sum(traffic.shares.values()), max(len(traffic.shares), len(traffic.aliases))
    if total > 100:
        raise InvalidRequest(f"the shares of model '{model.name}' add up to {total} %; the maximum is 100 %")
    if entries > ENTRIES:
        raise InvalidRequest(f"{entries} shares or aliases, expected at most {ENTRIES} of each")
    if len(traffic.shadow) > 1:
        raise InvalidRequest(f"model '{model.name}': {len(traffic.shadow)} shadows, expected at most one")
    if traffic.shadow != model.traffic.shadow:
        for version in model.versions.values():
            policy, service = version.policy, version.service
            ordered = service.order is not None
            kinds = (service.graph is not None, service.sequence_slots is not None, service.decoupled, ordered)
            if policy is not None and traffic.shadow and (reason := why_no_shadow(*kinds)):
                raise InvalidRequest(f"model '{model.name}' version {version.number}: {reason}")
    for alias in changed:
        if not ALIAS.fullmatch(alias):
            text = "expected up to 64 letters, digits, '_', '-' and '.', not beginning with '-' or '.'"
            raise InvalidRequest(f"alias {alias[:80]!r}: {text}")


def traffic_document(model: Model, traffic: Traffic) -> dict[str, Any]:
    """The traffic settings. `now`: the resulting percentage of each version."""
    return {
        "model": model.name,
        "shares": {str(number): percent for number, percent in sorted(traffic.shares.items())},
        "aliases": dict(sorted(traffic.aliases.items())),
        "shadow": {str(number): percent for number, percent in traffic.shadow.items()},
        "compared": [
            {"version": str(version), "shadow": str(shadow)}
            | {result: counts.get(result, 0) for result in ("equal", "different", "failed", "skipped")}
            for (version, shadow), counts in sorted(model.comparisons.items())
        ],
        "now": {str(number): percent for number, percent in model.shares_now(traffic).items()},
    }
