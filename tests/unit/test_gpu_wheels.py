"""The wheelhouse for a machine with a GPU has all that the server and its tests need there."""

from __future__ import annotations

import configparser
import re
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import ROOT

ON_THE_MACHINE = {"numpy", "onnxruntime"}
FOR_BUILDS = {"setuptools"}
"""A requirement of pbr, which imports it only to build packages."""
PYTHON = {"python_version": "3.12", "python_full_version": "3.12.0", "sys_platform": "linux", "extra": ""}
TESTS = ("hypothesis", "ml_dtypes", "msgpack", "pytest", "pytest-timeout", "pytest-xdist")
"""Of the extra `dev`: what tests/conftest.py, its plug-ins and tests/gpu import."""


def listed() -> dict[str, Requirement]:
    lines = (ROOT / "tests" / "gpu" / "wheels.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(requirement.name): requirement for requirement in found}


def test_the_list_is_complete_and_has_nothing_else() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    texts = [setup["options"]["install_requires"], *(extras[name] for name in ("cli", "runtime", "bench"))]
    needed = [line for text in texts for line in text.split("\n") if line and not line.startswith("shmserve")]
    found: set[str] = set()
    todo = [Requirement(line) for line in (*needed, "nvidia-ml-py", *TESTS)]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in found | ON_THE_MACHINE | FOR_BUILDS or (
            requirement.marker and not requirement.marker.evaluate(PYTHON)
        ):
            continue
        found.add(name)
        if name != "nvidia-ml-py":  # not installed without a GPU, and needs nothing
            todo += map(Requirement, metadata.requires(name) or ())
    assert set(listed()) == found


def test_versions_are_those_of_setup_cfg() -> None:
    lines = (ROOT / "setup.cfg").read_text().split("\n")
    limited = [requirement for requirement in listed().values() if requirement.specifier]
    assert limited
    for requirement in limited:
        same = [line for line in lines if re.match(rf" +{re.escape(requirement.name)}[<>=]", line)]
        assert [Requirement(line).specifier for line in same] == [requirement.specifier]
