"""Coverage-guided fuzzing, one process per target: `python -m tests.stress.fuzz.run SEED DIR TARGET=RUNS...`.

DIR/TARGET/code is the exit code of a target's process. It is not 0 after a finding: an error that the target does not
allow, an input that takes longer than SECONDS, growing memory, or a descriptor that stays open. The input and the log
are also in DIR/TARGET. The same seed repeats the run.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from pathlib import Path
from typing import Any

SECONDS = 30
"""Limit in wall time, for a machine that may be busy."""
LONGEST = 2048
LIMIT_MB = 4096
"""Memory limit, which includes the memory inherited from the parent process."""
GROWTH_BYTES = 96 << 20
"""Maximum growth of the process in the second half of a run: the fuzzer keeps every input that was new to it."""


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


class Watched:
    """The target, with checks that memory and descriptors do not grow."""

    def __init__(self, target: Any, runs: int) -> None:
        self._target = target
        self._half, self._last = runs // 2, runs - 1
        self._count = self._resident = self._open = 0

    def __call__(self, data: bytes) -> None:
        self._target(data)
        self._count += 1
        if self._count == self._half:
            gc.collect()
            self._resident, self._open = _resident(), len(os.listdir("/proc/self/fd"))
        elif self._count == self._last:
            gc.collect()
            grown, opened = _resident() - self._resident, len(os.listdir("/proc/self/fd")) - self._open
            assert grown < GROWTH_BYTES, f"memory has grown by {grown >> 20} MiB in the second half of the run"
            assert opened <= 0, f"{opened} descriptors more are open than at half of the run"


def fuzz(atheris: Any, targets: Any, name: str, runs: int, seed: int, folder: Path) -> None:
    beginnings = folder / "beginnings"
    beginnings.mkdir(exist_ok=True)
    for number, data in enumerate(targets.BEGINNINGS[name]()):
        (beginnings / f"{number:04}").write_bytes(data)
    options = [
        f"-runs={runs}",
        f"-seed={seed}",
        f"-max_len={LONGEST}",
        f"-timeout={SECONDS}",
        f"-rss_limit_mb={LIMIT_MB}",
        f"-artifact_prefix={folder}/",
        "-print_final_stats=1",
        "-verbosity=0" if runs < 1000 else "-verbosity=1",
    ]
    atheris.Setup([sys.argv[0], *options, str(beginnings)], Watched(targets.TARGETS[name], runs))
    atheris.Fuzz()


def redirect(log: Path) -> None:
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def main(seed: int, folder: Path, runs: dict[str, int]) -> None:
    atheris = importlib.import_module("atheris")
    # Instrumenting the code takes longer than running most targets, so it is done once for all of them.
    with atheris.instrument_imports(include=["shmserve"]):
        targets = importlib.import_module("tests.stress.fuzz.targets")
    sys.stdout.flush()
    sys.stderr.flush()
    running = {}
    for name, count in runs.items():
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        pid = os.fork()
        if not pid:
            redirect(place / "log")
            fuzz(atheris, targets, name, count, seed, place)
            sys.exit()  # as without a fork: the fuzzer writes the input of a finding when the interpreter exits
        running[pid] = place
    while running:
        pid, status = os.wait()
        (running.pop(pid) / "code").write_text(str(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    pairs = (word.partition("=") for word in sys.argv[3:])
    main(int(sys.argv[1]), Path(sys.argv[2]), {name: int(count) for name, _, count in pairs})
