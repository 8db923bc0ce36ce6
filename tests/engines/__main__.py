"""`python -m tests.engines [NAME...]`: installs the named engines, or all, and runs their tests. `python -m
tests.engines install` only installs all of them.

An engine that cannot be installed is skipped, and the summary says so. An installed engine must be importable, and its
tests must pass. While the tests of one engine run, the next one is installed.
"""

from __future__ import annotations

import configparser
import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests import ROOT
from tests.__main__ import TIMEOUT, compile_all, workers
from tests.engines.catalog import CONFORMANCE, ENGINES, Engine
from tests.support.system.apt import run

ENVIRONMENTS = ROOT / "build" / "engines"
MADE = ".made"
"""File that marks an environment as complete; it lists the installed packages."""
INSTALL_S = 900
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Pools of OpenMP threads stay until the process ends, which the leak check would report."""
NOTHING_RAN = 5
"""The status of pytest if it found no test."""


def requirements(engine: Engine) -> list[str]:
    """The requirements of the engine without those of the server, which the environment already has."""
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    extra = setup["options.extras_require"][engine.extra] if engine.extra else ""
    lines = [line.strip() for line in extra.splitlines()]
    return [*(line for line in lines if line and not line.startswith("shmserve[")), *engine.more]


def python_of(engine: Engine) -> Path:
    return ENVIRONMENTS / engine.name / "bin" / "python"


def install(engine: Engine) -> str:
    """Creates the environment, unless it exists. Returns why there is none, or "".

    It sees the packages of the environment of this process, so that only the engine is downloaded; a package that the
    engine needs in another version is installed over it.
    """
    if engine.variable and not os.environ.get(engine.variable):
        return f"{engine.variable} is not set"
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    with open(ENVIRONMENTS / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two suites may want the same environment at the same time
        return _install(engine, ENVIRONMENTS / engine.name, requirements(engine))


def _install(engine: Engine, folder: Path, wanted: list[str]) -> str:
    made, text = folder / MADE, "\n".join([sys.prefix, *wanted])
    if made.is_file() and made.read_text() == text:
        return ""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        run(sys.executable, "-m", "venv", "--without-pip", str(folder), timeout_s=INSTALL_S)
        of_engine = sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)})
        ours = sysconfig.get_path("purelib")
        Path(of_engine, "packages_of_tests.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
        pip = [str(python_of(engine)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
        run(*pip, "--retries", "1", *wanted, timeout_s=INSTALL_S)
        if engine.unused:
            run(*pip[:3], "uninstall", "--quiet", "--yes", *engine.unused, timeout_s=INSTALL_S)
    except (subprocess.SubprocessError, OSError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        return str(error)
    made.write_text(text)
    return ""


def test(engine: Engine) -> list[str]:
    """Runs the tests of an installed engine. Returns the failures."""
    python = str(python_of(engine))
    failed = []
    for module in engine.modules:
        if subprocess.call([python, "-c", f"import {module}"], cwd=ROOT):
            failed.append(f"import {module}")
    # The tests of a file run on several workers, as one file has most of the tests of an engine.
    spread = [] if engine.in_one_process else ["-n", str(workers()), "--dist", "worksteal"]
    tests = [*(CONFORMANCE if engine.kind else ()), *engine.tests, "-k", engine.chosen or engine.kind]
    command = [python, "-m", "pytest", "-q", "-rfEs", *TIMEOUT, *spread, *tests]
    status = subprocess.call(command, cwd=ROOT, env=os.environ | ONE_THREAD)
    if status:
        failed.append(" ".join(tests) + (": no test ran" if status == NOTHING_RAN else ""))
    return failed


def main(names: list[str]) -> int:
    known = {engine.name: engine for engine in ENGINES}
    if names == ["install"]:
        for engine in ENGINES:
            print(f"{engine.name}: {install(engine) or 'installed'}", flush=True)
        return 0
    unknown = sorted(set(names) - set(known))
    if unknown:
        print(f"unknown engine '{unknown[0]}'; known are: {', '.join(known)}")
        return 2
    compile_all()
    outcomes, status = [], 0
    engines = [known[name] for name in names] or ENGINES
    with ThreadPoolExecutor(1) as installer:
        installed = [installer.submit(install, engine) for engine in engines]
        for engine, done in zip(engines, installed, strict=True):
            print(f"{engine.name}: installing in {python_of(engine).parents[1].relative_to(ROOT)} ...", flush=True)
            reason = done.result()
            if reason:
                outcomes.append(f"{engine.name}: not installed, its tests are skipped: {reason}")
                continue
            start = time.monotonic()
            failed = test(engine)
            status = 1 if failed else status
            outcome = "; ".join(["FAILED", *failed]) if failed else "passed"
            outcomes.append(f"{engine.name}: {outcome} ({time.monotonic() - start:.0f} s)")
    print("\n".join(outcomes))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
