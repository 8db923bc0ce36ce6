"""Model parameters about the versions of a model: `traffic`, `aliases` and `shadow`, such as "2=90,3=10".

A load sets them; operators may change them later (`shmserve traffic`).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from shmserve.repo.config.outline import escaped
from shmserve.repo.config.problems import ProblemFunction
from shmserve.repo.config.schema import ModelConfig, parameter

TRAFFIC = "traffic"
"""Model parameter: shares of versions, of the requests that name none."""
ALIASES = "aliases"
"""Model parameter: names of versions."""
SHADOW = "shadow"
"""Model parameter: the version that also gets a share of these requests."""
PARAMETERS = (TRAFFIC, ALIASES, SHADOW)
ENTRIES = 64
ALIAS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", re.ASCII)
_VERSION = re.compile(r"[1-9][0-9]{0,17}", re.ASCII)
_PERCENT = re.compile(r"([0-9]{1,3})%?", re.ASCII)


class GivenTraffic(NamedTuple):
    """Version -> percent, name -> version, and version -> percent."""

    shares: dict[int, int]
    aliases: dict[str, int]
    shadow: dict[int, int]


def traffic_of(config: ModelConfig) -> GivenTraffic:
    """What a valid configuration says."""
    return GivenTraffic(
        _shares(parameter(config, TRAFFIC)), _aliases(parameter(config, ALIASES)), _shares(parameter(config, SHADOW))
    )


def why_no_shadow(ensemble: bool, sequences: bool, decoupled: bool, ordered: bool) -> str:
    """Why answers of the model cannot be compared; "" if they can."""
    kinds = (
        ("an ensemble", ensemble),
        ("a model with sequences", sequences),
        ("a decoupled model", decoupled),
        ("a model with preserve_ordering", ordered),
    )
    return next((f"{kind} cannot have a shadow" for kind, found in kinds if found), "")


def validate_traffic(config: ModelConfig, problem: ProblemFunction) -> None:
    for key in (TRAFFIC, SHADOW):
        try:
            shares = _shares(parameter(config, key))
        except ValueError as error:
            problem(f'parameters["{key}"]', f'{error}, expected VERSION=PERCENT, such as "3=10"')
            continue
        if sum(shares.values()) > 100:
            problem(f'parameters["{key}"]', f"the shares add up to {sum(shares.values())} %; the maximum is 100 %")
        if key == SHADOW and shares:
            if len(shares) > 1:
                problem(f'parameters["{key}"]', f"found {len(shares)} versions, expected one")
            policy = config.model_transaction_policy
            decoupled = policy is not None and policy.decoupled
            ensemble, sequences = config.ensemble_scheduling is not None, config.sequence_batching is not None
            ordered = config.dynamic_batching is not None and config.dynamic_batching.preserve_ordering
            if reason := why_no_shadow(ensemble, sequences, decoupled, ordered):
                problem(f'parameters["{key}"]', reason)
    try:
        _aliases(parameter(config, ALIASES))
    except ValueError as error:
        problem(f'parameters["{ALIASES}"]', f'{error}, expected NAME=VERSION, such as "prod=2"')


def _pairs(text: str) -> list[tuple[str, str]]:
    found = []
    for entry in text.split(",") if text.strip() else ():
        name, separator, value = entry.strip().partition("=")
        if not separator:
            raise ValueError(f'found "{escaped(name)}"')
        found.append((name, value))
    names = [name for name, _ in found]
    if len(found) > ENTRIES:
        raise ValueError(f"found {len(found)} entries")
    if len(set(names)) < len(names):
        raise ValueError(f'found "{escaped(max(names, key=names.count))}" twice')
    return found


def _shares(text: str) -> dict[int, int]:
    """Raises ValueError if the text is invalid."""
    shares = {}
    for version, value in _pairs(text):
        percent = _PERCENT.fullmatch(value)
        if not _VERSION.fullmatch(version) or percent is None or int(percent[1]) > 100:
            raise ValueError(f'found "{escaped(f"{version}={value}")}"')
        shares[int(version)] = int(percent[1])
    return shares


def _aliases(text: str) -> dict[str, int]:
    """Raises ValueError if the text is invalid."""
    aliases = {}
    for name, version in _pairs(text):
        if not ALIAS.fullmatch(name) or not _VERSION.fullmatch(version):
            raise ValueError(f'found "{escaped(f"{name}={version}")}"')
        aliases[name] = int(version)
    return aliases
