"""Metrics of the doors, as Prometheus reads them. The rule of the file: all of them begin with shmserve_gateway_."""

from __future__ import annotations

from collections.abc import Mapping


def family(name: str, kind: str, about: str, values: Mapping[str, int]) -> str:
    """`values`: by the label of each, as in code="0"; the one without a label has the name ""."""
    full = f"shmserve_gateway_{name}"
    lines = [f"# HELP {full} {about}", f"# TYPE {full} {kind}"]
    lines += [f"{full}{{{label}}} {value}" if label else f"{full} {value}" for label, value in values.items()]
    return "\n".join(lines) + "\n"
