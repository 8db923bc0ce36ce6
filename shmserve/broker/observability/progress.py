"""Startup messages: a log line for each version that becomes READY, then example commands on the console."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shmserve.core.core import Core
from shmserve.core.records import Version
from shmserve.core.states import VersionState

_HINTS = """
try it from another terminal:

  {command} demo{where}

or from Python:

  import numpy as np, shmserve
  with shmserve.Client({url}) as client:
      a = np.arange(4, dtype=np.float32)
      result = client.infer("add_sub", {{"INPUT0": a, "INPUT1": a}})
      print(result["OUTPUT0"], result["OUTPUT1"])
{http}
Ctrl-C stops the server.
"""
_HTTP = """
or over HTTP:

  curl localhost:{port}/v2/models/add_sub
  curl localhost:{port}/v2/models/add_sub/infer -d '{{"inputs": [
    {{"name": "INPUT0", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]}},
    {{"name": "INPUT1", "datatype": "FP32", "shape": [4], "data": [10, 20, 30, 40]}}]}}'
"""

_FIRST_STEPS = """
try it from another terminal:

  {command} infer {model} --random{where}
{page}
Ctrl-C stops the server.
"""
_PAGE = """
or in a browser: http://localhost:{port}/
"""


class LoadProgress:
    """Reports the initial loading. Call `report` after each turn of the broker until it returns True."""

    def __init__(
        self,
        core: Core,
        ended: Callable[[int], None],
        log_record: Callable[[str, str, Mapping[str, Any]], None],
        is_incomplete: Callable[[], bool],
    ) -> None:
        """`is_incomplete()`: whether further models will be loaded."""
        self._core = core
        self._ended = ended
        self._log_record = log_record
        self._is_incomplete = is_incomplete
        self._reported: set[Version] = set()
        self._counts: dict[str, int] = {}
        """Model -> number of its versions."""
        self._loading: set[str] = set()
        """Models with versions that are loading."""
        self._started = time.monotonic()

    def report(self) -> bool:
        """Logs new READY versions. When all loads have finished, calls `ended` with the number of failures and returns
        True."""
        models = self._core.state.models
        for name in self._core.state.changed_models:
            self._look_at(name, list(models[name].versions.values()) if name in models else [])
        if self._loading or self._is_incomplete():
            return False
        failed = sum(v.state is not VersionState.READY for model in models.values() for v in model.versions.values())
        failed += sum(bool(model.reason) for model in models.values())
        self._ended(failed)
        return True

    def _look_at(self, name: str, versions: Sequence[Version]) -> None:
        self._counts[name] = len(versions)
        self._loading.discard(name)
        for version in versions:
            if version.state is VersionState.LOADING:
                self._loading.add(name)
            elif version not in self._reported:
                self._reported.add(version)
                if version.state is VersionState.READY:  # failures are logged with their reason elsewhere
                    seconds, count = time.monotonic() - self._started, sum(self._counts.values())
                    text = f"[{len(self._reported)}/{count}] {version.label} READY after {seconds:.1f} s"
                    self._log_record("info", text, {"model": version.model, "version": version.number})


def hints(runtime_dir: Path, is_default: bool, ports: Mapping[str, int]) -> str:
    """Example commands for the sample models."""
    url = "" if is_default else f"runtime_dir={str(runtime_dir)!r}"
    http = _HTTP.format(port=ports["http"]) if "http" in ports else ""
    return _HINTS.format(command=_command(), where=_where(runtime_dir, is_default), url=url, http=http)


def first_steps(model: str, runtime_dir: Path, is_default: bool, ports: Mapping[str, int]) -> str:
    """Example commands for a model."""
    page = _PAGE.format(port=ports["http"]) if "http" in ports else ""
    where = _where(runtime_dir, is_default)
    return _FIRST_STEPS.format(command=_command(), model=shlex.quote(model), where=where, page=page)


def _command() -> str:
    beside = Path(sys.executable).with_name("shmserve")
    if not beside.exists():
        return "shmserve"
    here = Path.cwd()
    return shlex.quote(str(beside.relative_to(here) if beside.is_relative_to(here) else beside))


def _where(runtime_dir: Path, is_default: bool) -> str:
    return "" if is_default else f" --runtime-dir {shlex.quote(str(runtime_dir))}"
