"""Checks Kubernetes objects, a JSON list on standard input, against schemas; run by the Python of `programs.CLUSTER`.

Prints a JSON list with the problems of each object: Kubernetes' own kinds are checked against the schemas of the API
versions in the arguments, others against the models of their operators.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import kserve
import kubernetes.client
import kubernetes_validate
import pydantic
from cloudcoil.models.keda import v1alpha1 as keda
from cloudcoil.models.prometheus_operator import v1 as prometheus_operator

KINDS = {
    ("monitoring.coreos.com/v1", "PodMonitor"): prometheus_operator.PodMonitor,
    ("keda.sh/v1alpha1", "ScaledObject"): keda.ScaledObject,
}
KSERVE = {
    ("serving.kserve.io/v1alpha1", "ClusterServingRuntime"): "V1alpha1ClusterServingRuntime",
    ("serving.kserve.io/v1beta1", "InferenceService"): "V1beta1InferenceService",
}
"""Kinds that have a class in KServe's client, which names the types of its fields."""
PLAIN = {"str": str, "int": int, "bool": bool, "float": float}


def problems(thing: dict[str, Any], versions: list[str]) -> list[str]:
    kind = thing["apiVersion"], thing["kind"]
    if kind in KINDS:
        try:
            read = KINDS[kind].model_validate(thing)
        except pydantic.ValidationError as error:
            return [str(found) for found in error.errors(include_url=False, include_context=False)]
        return unknown(thing, json.loads(read.model_dump_json(by_alias=True, exclude_none=True)), "")
    if kind in KSERVE:
        return of_kserve(thing, KSERVE[kind], "")
    found = []
    for version in versions:
        try:
            kubernetes_validate.validate(thing, version, strict=True)
        except kubernetes_validate.SchemaNotFoundError:
            found.append(f"{version}: no schema of {kind}")
        except kubernetes_validate.ValidationError as error:
            found.append(f"{version}: {'.'.join(map(str, error.path))}: {error.message}")
    return found


def unknown(given: Any, read: Any, where: str) -> list[str]:
    """Fields that a model did not read. The API server would reject them."""
    if isinstance(given, dict) and isinstance(read, dict):
        missing = [f"{where}.{name}: unknown field" for name in given if name not in read]
        return missing + [
            more for name in given if name in read for more in unknown(given[name], read[name], f"{where}.{name}")
        ]
    if isinstance(given, list) and isinstance(read, list):
        return [
            more
            for index, pair in enumerate(zip(given, read, strict=True))
            for more in unknown(*pair, f"{where}[{index}]")
        ]
    return []


def of_kserve(value: Any, kind: str, where: str) -> list[str]:
    """`kind` is a type as generated clients name it: "list[V1Container]", "Dict[str, str]", "V1Volume", "int"."""
    if match := re.fullmatch(r"[Ll]ist\[(.*)\]", kind):
        if not isinstance(value, list):
            return [f"{where}: not a list"]
        return [more for index, part in enumerate(value) for more in of_kserve(part, match[1], f"{where}[{index}]")]
    if match := re.fullmatch(r"[Dd]ict[(\[]str, (.*)[)\]]", kind):
        if not isinstance(value, dict):
            return [f"{where}: not an object"]
        return [more for name, part in value.items() for more in of_kserve(part, match[1], f"{where}.{name}")]
    if kind in PLAIN:
        return [] if type(value) is PLAIN[kind] else [f"{where}: {value!r} is not of type {kind}"]
    model = getattr(kserve, kind, None) or getattr(kubernetes.client, kind, None)
    if model is None or not hasattr(model, "attribute_map"):
        return []  # an object of any form, or a quantity
    if not isinstance(value, dict):
        return [f"{where}: not an object"]
    types = {model.attribute_map[name]: type_ for name, type_ in model.openapi_types.items()}
    found = [f"{where}.{name}: unknown field" for name in value if name not in types]
    return found + [
        more for name in value if name in types for more in of_kserve(value[name], types[name], f"{where}.{name}")
    ]


if __name__ == "__main__":
    json.dump([problems(thing, sys.argv[1:]) for thing in json.load(sys.stdin)], sys.stdout)
