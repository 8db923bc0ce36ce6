"""`python -m tests` runs the whole suite in two halves beside each other; with arguments it is pytest.

The rule of the file: the halves share a machine. What looks at all of /dev/shm, or leaves names there whose owner has
died, is in the same half as all that would sweep them up.
"""

from __future__ import annotations

import compileall
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE = ("shmserve", "workers", "repo", "clients", "bench", "tests")
PURE = ["tests/unit", "tests/sim", "tests/fuzz", "tests/test_tidy.py"]
"""Little more than this one process."""
NAMES = ["tests/unit/test_leaks.py", "tests/unit/test_shm_posix.py"]
REST = ["tests/process", "tests/conformance", "tests/security", "tests/hostile", "tests/chaos", "tests/gpu"]
REST += ["tests/tritonclient", *NAMES]
WORKERS = (
    "calls coroutines load loop onnx onnx_engine openvino python senders sequences stacked stream_storms streams torch"
)
SUITES = "backend_ends clients client_links client_operations client_streams"
CALM = [f"tests/process/test_worker_{name}.py" for name in WORKERS.split()]
CALM += [f"tests/process/test_{name}.py" for name in ("install", "systemd", "warmup")]
CALM += [f"tests/conformance/test_{name}.py" for name in SUITES.split()]
"""Of those folders, what runs in the half of PURE, which would end long before the other: nobody here leaves a name."""
PYTEST = [sys.executable, "-m", "pytest"]


def compile_all() -> None:
    """Else, where Python is told to keep no bytecode, each of some thousand processes compiles a hundred files."""
    for name in CODE:
        compileall.compile_dir(ROOT / name, quiet=1)


def halves() -> int:
    pure = [*PYTEST, "-o", "leaks_alone=false", *(f"--ignore={name}" for name in NAMES), *PURE, *CALM]
    with tempfile.TemporaryFile("w+") as said, subprocess.Popen(pure, stdout=said, stderr=said) as beside:
        print(f"beside this half of the suite runs {' '.join(PURE)}, and more; what it says follows", flush=True)
        first = subprocess.call([*PYTEST, *(f"--ignore={name}" for name in CALM), *REST])
        second = beside.wait()
        said.seek(0)
        sys.stdout.writelines(said)
    return first or second


if __name__ == "__main__":
    compile_all()
    sys.exit(subprocess.call([*PYTEST, *sys.argv[1:]]) if sys.argv[1:] else halves())
