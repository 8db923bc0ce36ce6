"""`python -m tests.tritonclient.run_examples DIRECTORY`: runs the unchanged example programs of `tritonclient` against
a server, and prints a table of their results.

The examples are not part of this project. One passes if it exits with 0 and does not print FAIL.
"""

from __future__ import annotations

import argparse
import operator
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from tests.tritonclient.models import MODELS
from tests.tritonclient.serving import ABSENT, PYTHON, serving

PATTERNS = "simple_http_*.py simple_grpc_*.py grpc_explicit_*.py reuse_infer_objects_client.py memory_growth_test.py"
HTTP, GRPC = 8000, 8001
"""Some examples always use these ports."""
EXAMPLE_S = 60


@dataclass(frozen=True)
class Run:
    path: Path
    protocol: str
    arguments: tuple[str, ...] = ()
    fixed: bool = False
    """The example always uses the same port."""

    @property
    def text(self) -> str:
        return " ".join([self.path.name, *self.arguments])


def runs(folder: Path) -> Iterator[Run]:
    for path in sorted({path for pattern in PATTERNS.split() for path in folder.glob(pattern)}):
        name = path.stem
        if name.startswith(("reuse", "memory")):
            for protocol in ("http", "grpc"):
                yield Run(path, protocol, ("-i", protocol), name.startswith("memory"))
            continue
        protocol = "http" if "http" in name else "grpc"
        yield Run(path, protocol)
        if "_sequence_" in name:
            yield Run(path, protocol, ("-d",))


def attempt(run: Run, python: Path, endpoints: dict[str, str]) -> str:
    """ "", or the error."""
    command = [str(python), str(run.path), *run.arguments, *(() if run.fixed else ("-u", endpoints[run.protocol]))]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=EXAMPLE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"still running after {EXAMPLE_S} s"
    lines = (found.stdout + found.stderr).strip().splitlines() or [""]
    bad = [line for line in lines if line.startswith("FAIL")]
    if found.returncode == 0 and not bad:
        return ""
    return f"code {found.returncode}: {(bad or lines)[-1][:200]}"


def results(found: list[Run], python: Path, gpu: bool) -> Iterator[tuple[Run, str, float]]:
    """Runs each group on a server of its own."""
    needs_gpu = [run for run in found if "cudashm" in run.path.name and not gpu]
    control = [run for run in found if "model_control" in run.path.name]
    usual = [run for run in found if run not in needs_gpu and run not in control]
    groups: list[tuple[list[Run], list[str], str, dict[str, int]]] = [
        ([run for run in usual if not run.fixed], list(MODELS), "*", {}),
        ([run for run in usual if run.fixed], ["custom_identity_int32"], "*", {"http": HTTP, "grpc": GRPC}),
    ]
    # The examples of model control count the models of the repository.
    groups += [([run], list(MODELS)[: 7 if run.protocol == "http" else 8], "simple", {}) for run in control]
    for group, names, load, ports in filter(operator.itemgetter(0), groups):
        done = 0
        try:
            with tempfile.TemporaryDirectory() as work, serving(Path(work) / "models", names, load, ports) as endpoints:
                for run in group:
                    started = perf_counter()
                    yield run, attempt(run, python, endpoints), perf_counter() - started
                    done += 1
        except AssertionError as error:
            for run in group[done:]:
                yield run, str(error).strip().splitlines()[-1], 0.0
    for run in needs_gpu:
        yield run, "not run: it needs a GPU", 0.0


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tritonclient.run_examples", description=__doc__)
    parser.add_argument("folder", type=Path, help="the examples: src/python/examples of the repository of the clients")
    parser.add_argument("--python", type=Path, default=PYTHON, help="a Python that has tritonclient")
    parser.add_argument("--only", default="", metavar="TEXT", help="only examples with this text in their name")
    parser.add_argument("--gpu", action="store_true", help="also run examples that need a GPU")
    chosen = parser.parse_args(words)
    found = [run for run in runs(chosen.folder) if chosen.only in run.path.name]
    if not found or not chosen.python.exists():
        print(ABSENT if found else f"no examples in {chosen.folder}", file=sys.stderr)
        return 2
    wrong = 0
    print("| example | result | seconds |\n| --- | --- | --- |")
    for run, failed, seconds in results(found, chosen.python, chosen.gpu):
        wrong += bool(failed) and not failed.startswith("not run")
        print(f"| {run.text} | {failed.replace('|', '/') or 'ok'} | {seconds:.1f} |", flush=True)
    print(f"\n{len(found)} runs, {wrong} failed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
