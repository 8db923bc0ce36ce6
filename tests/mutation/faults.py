"""`python -m tests.faults`: injects known faults into a copy of the source, one at a time, and reports which of them
the tests detect.

Run it before and after a change to the tests: a fault that was detected before must still be detected. For each fault,
the tests that `WHERE` selects for its package run until the first failure.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests import ROOT

LIMIT_S = 900
"""Time limit for the tests of one fault. A fault that makes them hang counts as detected."""


class Fault(NamedTuple):
    name: str
    file: str
    old: str
    """The text to replace, which occurs once in the file."""
    new: str


WHERE = {
    "shmserve/core": ["tests/unit/core"],
    "shmserve/shm": ["tests/unit/shm", "tests/conformance/test_arena.py", "tests/conformance/test_extents.py"],
    "shmserve/protocol": ["tests/unit/protocol", "tests/conformance/test_wire_independent.py"],
    "shmserve/gateway": ["tests/unit/gateway"],
    "workers": ["tests/unit/workers", "tests/conformance"],
    "shmserve/session": ["tests/unit/session", "tests/unit/clients", "tests/conformance"],
}

FAULTS = (
    Fault("batch one row too large", "shmserve/core/batching/form.py",
          "            if total > rules.max_batch:", "            if total > rules.max_batch + 1:"),
    Fault("queue delay one nanosecond late", "shmserve/core/batching/form.py",
          "    if age >= delay:", "    if age > delay:"),
    Fault("a pin is never released", "shmserve/core/ledger.py",
          "        hold.pins -= 1", "        hold.pins -= 0"),
    Fault("quota of segments off by one", "shmserve/core/requests/quotas.py",
          "if len(client.segments) >= limits.client_segments:", "if len(client.segments) > limits.client_segments:"),
    Fault("cache ignores the parameters of a request", "shmserve/core/requests/cache.py",
          "given = options.parameters.items() if options is not None else ()", "given = ()"),
    Fault("START accepted while the server drains", "shmserve/core/sequences/scheduler.py",
          "        if state.draining:", "        if False:"),
    Fault("a failed ensemble goes on", "shmserve/core/ensembles/advance.py",
          "        if run.failure is not None and not run.over:", "        if False:"),
    Fault("a lease lasts while others wait", "shmserve/core/batching/leases.py",
          "        _is_needed(version)\n        or lease", "        lease"),
    Fault("work behind a running batch does not end leases", "shmserve/core/batching/leases.py",
          "return version.waits > 0 or any(instance.waiting is not None for instance in version.instances)",
          "return version.waits > 0"),
    Fault("a leased request is counted twice if its worker dies", "shmserve/core/batching/leases.py",
          "    if error is not None and event.since != lease.recorded:", "    if error is not None:"),
    Fault("outputs over a lease have no limit together", "shmserve/core/batching/lending.py",
          "min(INLINE_BYTES // max(sizes), FIELD_BYTES // sum(sizes))", "INLINE_BYTES // max(sizes)"),
    Fault("empty blocks share an offset", "shmserve/shm/blocks.py",
          "size = (size + mask) & ~mask or mask + 1", "size = (size + mask) & ~mask"),
    Fault("the rest of a split block is lost", "shmserve/shm/blocks.py",
          "        live[offsets[-1]] += offset + whole - start", "        live[offsets[-1]] += 0"),
    Fault("strings may end behind the buffer", "shmserve/shm/strings.py",
          "        if at > end:", "        if at > end + 1:"),
    Fault("packets have no limit of size", "shmserve/protocol/codec.py",
          "        if len(packet) > PACKET_BYTES:", "        if len(packet) > 2 * PACKET_BYTES:"),
    Fault("one bad message more is kept", "shmserve/protocol/codec.py",
          "                if refused > REFUSED:", "                if refused > REFUSED + 1:"),
    Fault("two Hosts are accepted", "shmserve/gateway/http/heads.py",
          "            if name in seen:", "            if name in seen and name != b'host':"),
    Fault("HTTP/1.1 without Host is accepted", "shmserve/gateway/http/heads.py",
          'if b"host" not in seen and http == "1.1":', 'if b"host" not in seen and http == "1.2":'),
    Fault("HTTP/2 window may overflow by one", "shmserve/gateway/http2/protocol.py",
          "if self.window > frames.LARGEST_WINDOW:", "if self.window > frames.LARGEST_WINDOW + 1:"),
    Fault("a share may be exceeded by one", "shmserve/gateway/limits/caller_shares.py",
          "    if not used or used + more <= limit:", "    if not used or used + more <= limit + 1:"),
    Fault("JSON data may have one value too few", "shmserve/gateway/kserve/json_tensors.py",
          "    if decoded != count:", "    if decoded > count:"),
    Fault("rows of a tensor are not compared with the request's", "workers/batch/input_reader.py",
          "            if work.rows and (not tensor.shape or tensor.shape[0] != work.rows):", "            if False:"),
    Fault("inputs of another dtype are taken", "workers/batch/input_reader.py",
          "        if tensor.dtype != spec.dtype:", "        if False:"),
    Fault("outputs at the caller's place may be too small", "workers/batch/results.py",
          "map(lt, [place.size for place in handles], sizes)", "map(lt, [place.size + 1 for place in handles], sizes)"),
)  # fmt: skip


def detected(fault: Fault, tree: Path) -> str:
    """How the fault was detected; "" if all tests pass."""
    path = tree / fault.file
    text = path.read_text()
    if text.count(fault.old) != 1:
        raise SystemExit(f"{fault.file} has {text.count(fault.old)} times {fault.old!r}, expected once: adapt FAULTS")
    (where,) = (tests for prefix, tests in WHERE.items() if fault.file.startswith(prefix))
    path.write_text(text.replace(fault.old, fault.new))
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n2", "-p", "no:cacheprovider", *where]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=LIMIT_S, env=environment(tree))
    except subprocess.TimeoutExpired:
        return "the tests hang"
    finally:
        path.write_text(text)
    if done.returncode == 0:
        return ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode not in (1, 2) or not failed:  # 2: interrupted by -x
        raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return failed[0].split(" - ")[0]


def environment(tree: Path) -> dict[str, str]:
    """The copy's packages take precedence over installed ones."""
    return {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names: only these faults")
    chosen = parser.parse_args(words)
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(".venv", ".git", "build", "__pycache__", "*.egg-info")
        shutil.copytree(ROOT, tree, symlinks=True, ignore=ignored)
        for fault in FAULTS:
            if chosen.names and not any(name in fault.name for name in chosen.names):
                continue
            began = time.monotonic()
            how = detected(fault, tree)
            missed += not how
            print(f"{fault.name}: {how or 'NOT DETECTED'} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{missed} not detected")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
