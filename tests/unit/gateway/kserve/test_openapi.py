"""The document that the HTTP door gives of itself says all that is there, and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from shmserve.gateway.auth.access import NEEDS
from shmserve.gateway.http import openapi
from shmserve.gateway.http.routes import PATHS, resolve
from shmserve.gateway.kserve.plans import plan_of

DOCUMENT = json.loads(openapi.text())
GIVEN = {"{model}": "m", "{version}": "3", "{region}": "r", "{repository}": "s"}


def operations() -> Iterator[tuple[str, str, Any]]:
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def test_it_has_every_route_and_every_route_leads_somewhere() -> None:
    told = {(path, method.upper()) for path, method, _ in operations()}
    assert told == {(path.template, method) for path in PATHS for method in path.wants}
    actions = set()
    for template, method in told:
        path = re.sub(r"{\w+}", lambda found: GIVEN[found[0]], template)
        route = resolve(method, path)
        assert route.status == 200, path
        assert route.version == ("3" if "{version}" in template else "")
        actions.add(route.action)
    assert actions == set(NEEDS) - {"metrics"} == set(openapi.OPERATIONS)


def test_names_are_used_once_and_parameters_are_all_there() -> None:
    names = [operation["operationId"] for _, _, operation in operations()]
    assert len(names) == len(set(names))
    for path, _, operation in operations():
        told = [parameter["name"] for parameter in operation["parameters"] if parameter["in"] == "path"]
        assert told == re.findall(r"{(\w+)}", path)


def references(node: Any) -> Iterator[str]:
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if key == "$ref":
            yield value
        elif isinstance(value, dict | list):
            yield from references(value)


def test_references_lead_somewhere_and_all_schemas_are_used() -> None:
    found = set(references(DOCUMENT))
    for reference in found:
        place: Any = DOCUMENT
        for word in reference.removeprefix("#/").split("/"):
            place = place[word]
    assert {reference.rpartition("/")[2] for reference in found} == {*DOCUMENT["components"]["schemas"], "Error"}


@pytest.mark.parametrize("datatype", DOCUMENT["components"]["schemas"]["Datatype"]["enum"])
def test_datatypes_are_those_that_are_taken(datatype: str) -> None:
    given = {"name": "x", "datatype": datatype, "shape": [0], "parameters": {"binary_data_size": 0}}
    assert plan_of(json.dumps({"inputs": [given]}).encode()).inputs[0].dtype == datatype
