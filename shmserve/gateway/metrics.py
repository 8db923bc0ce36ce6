"""Metrics of the endpoints in the Prometheus format. Invariant: all names begin with shmserve_gateway_."""

from __future__ import annotations

from collections.abc import Mapping


def family(name: str, kind: str, about: str, values: Mapping[str, int]) -> str:
    """`values`: label, such as code="0", or "" for none -> value."""
    full = f"shmserve_gateway_{name}"
    lines = [f"# HELP {full} {about}", f"# TYPE {full} {kind}"]
    lines += [f"{full}{{{label}}} {value}" if label else f"{full} {value}" for label, value in values.items()]
    return "\n".join(lines) + "\n"
