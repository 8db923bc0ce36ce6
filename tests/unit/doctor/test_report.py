"""The command: its table, its advice and its exit code."""

from __future__ import annotations

import io
import json
import subprocess

import pytest

from shmserve.clients.cli.commands.doctor import report
from shmserve.clients.cli.main import main
from shmserve.doctor.machine import ERROR, INFO, OK, WARNING, Finding
from shmserve.terminal.console import Screen
from tests import ROOT
from tests.support.commands import COMMAND

FINDINGS = [
    Finding("linux", OK, "6.1", "5.3"),
    Finding("cores", INFO, "2", "", "look"),
    Finding("descriptors", WARNING, "1024", "25600", "ulimit -Hn 25600"),
    Finding("port 8000", ERROR, "in use", "free", "shmserve serve --http-port N"),
]


def test_the_report() -> None:
    assert report(FINDINGS, Screen(False, io.StringIO())).splitlines() == [
        "check        state    found   needed",
        "linux        ok       6.1     5.3",
        "cores        info     2       -",
        "descriptors  warning  1024    25600",
        "port 8000    error    in use  free",
        "",
        "port 8000: shmserve serve --http-port N",
        "descriptors: ulimit -Hn 25600",
        "cores: look",
        "",
        "a server cannot run here: errors 1, warnings 1",
    ]


def test_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for findings, code in ((FINDINGS[:3], 0), (FINDINGS, 1)):
        monkeypatch.setattr("shmserve.clients.cli.commands.doctor.examine", lambda machine, found=findings: found)
        assert main(["doctor", "--json"]) == code
        document = json.loads(capsys.readouterr().out)
        assert document["can_serve"] is (code == 0)
        assert document["findings"][2] == {
            "check": "descriptors", "state": "warning", "found": "1024", "needed": "25600", "fix": "ulimit -Hn 25600",
        }  # fmt: skip


def test_every_finding_that_is_a_fault_has_a_fix() -> None:
    """Tested on this machine, whatever it lacks."""
    command = [*COMMAND, "doctor", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    document = json.loads(done.stdout)
    assert done.returncode == (0 if document["can_serve"] else 1)
    for finding in document["findings"]:
        assert finding["found"]
        assert finding["state"] in (OK, INFO) or (finding["fix"] and finding["needed"]), finding
    assert {finding["check"] for finding in document["findings"]} > {"linux", "/dev/shm", "memory", "descriptors"}
